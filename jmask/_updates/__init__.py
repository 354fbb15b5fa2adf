"""Gradients, parameters and states as every optimizer meets them.

checks              what parameters, gradients and states must be
state_rows          which arrays of a state hold rows of which table
masked_gradient     gradients with masks
fit                 gradients beside the parameters that they belong to
row_update          the rows of a gradient, updated in the fastest way
apply               `apply_updates`, `apply_gradients`, `densify`
dense_tables        a notice of dense gradients of large tables in lazy optimizers
eager               optimizers outside jit: compiled, and remembered
plain_optax         what JAX says of a gradient that met plain optax
not_row_local       the error of a transformation that `lazy` cannot wrap
"""
