"""`jmask.gradcheck`: gradients against differences, in plain and in masked semantics.

check       the check, gradients of gradients, and `is_masked_function`
message     its errors
chart       arguments and results as real vectors
"""
