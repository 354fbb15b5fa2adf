"""`jmask.lazy`: the proof that an optax transformation may be run on the touched rows.

lattice             what can be known of a value
row_locality        the proof
leaves              the arguments of one update: which leaves are rows of which table
proved_update       the update on rows, with its proof
one_pass            update and application in one pass over the rows
psum_over_shards    sums over rows that several devices have
stacked_step        a step with gradients of stacked tables
lazy                the transformation
"""
