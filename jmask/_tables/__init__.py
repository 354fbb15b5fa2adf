"""Table containers: packed rows, rows sharded over devices, rows caught up when they are read.

stored_table    what lookups, gradients and optimizers ask of a container
packed          narrow rows in lines of 128, as TPUs lay them out
sharded         rows sharded over the devices of a mesh, and gradients routed to them
shard_layout    where each row of a sharded table is, and how rows travel
deferred_table  rows that, when read, are those of a dense optimizer
skipped_steps   the closed form of steps without a gradient
plain_arrays    tensors and tables as the arrays that checkpoints keep, and back
huge_pages      tables in large pages of memory, on CPUs
"""
