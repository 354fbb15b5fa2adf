"""Tables in host memory or on disk: `jmask.host`.

host_rows       the rows of a table and of its slots, read and written by their numbers
batch_rows      the distinct rows of a batch, and its ids as positions among them
slots           the slots of a transformation for tables that are on the host
snapshots       checkpoints: a copy of the tables, kept current by the rows that changed
offload         `offload`: the object that a training loop talks to
"""
