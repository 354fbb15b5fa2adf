"""`jmask.lazy`: the proof that an optax transformation may be run on the touched rows.

lattice             what can be known of a value, and what operations make of it
row_locality        the proof
proved_update       the leaves of one update, its proof, and the update on rows
one_pass            update and application in one pass over the rows
psum_over_shards    sums over rows that several devices have
lazy                the transformation, of every kind of table
"""
