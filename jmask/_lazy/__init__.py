"""`jmask.lazy`: the proof that an optax transformation may be run on the touched rows.

lattice                 what can be known of a value
same_program            whether an operation is the same for two numbers of rows
row_locality            the proof
state_rows              which arrays of a state have a row for each row of a table
call                    the arguments of one update: what is rows of which table
proved_update           the update on rows, with its proof
elementwise_program     an update taken apart, for one pass over the rows
one_pass                that pass
spread_sums             sums over rows that several devices have
away_forms              what a value is in a row that has no gradient
without_gradient        what an optimizer does to such rows, found while it runs
deferred_step           a step with deferred tables
stacked_step            a step with gradients of stacked tables
lazy                    the transformation
"""
