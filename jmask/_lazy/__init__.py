"""`jmask.lazy`: the proof that an optax transformation may be run on the touched rows.

lattice             what can be known of a value
row_locality        the proof
leaves              the leaves of one update: which are rows of which table; stacked tables
proved_update       the update on rows, with its proof
one_pass            update and application in one pass over the rows
psum_over_shards    sums over rows that several devices have
lazy                the transformation
"""
