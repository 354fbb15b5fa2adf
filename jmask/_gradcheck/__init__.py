"""`jmask.gradcheck`: gradients against differences, in plain and in masked semantics.

gradcheck           the check, and gradients of gradients
problem             the function with its arguments, and the premises of a check
entries             the entries of its inputs, which are moved
jacobian            derivatives by differences and by JAX: every entry, random directions
message             the errors
"""
