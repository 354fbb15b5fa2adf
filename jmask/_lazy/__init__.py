"""`jmask.lazy`: the proof that an optax transformation may be run on the touched rows.

checks              gradients and parameters at the border: refused, or as steps take them
open_rows           shapes and programs with the number of rows open, and numbers in its place
state_rows          which arrays of a state hold rows of which table; validation of states
row_local           the proof, from one trace with the number of rows open
step                the leaves of one update, its proof, its run on rows, and applying it
one_pass            update and application in one pass over the rows
programs            the steps in a program of other transformations, in one pass each
lazy                the transformation; `densify`; `apply_updates`, `apply_gradients`
"""
