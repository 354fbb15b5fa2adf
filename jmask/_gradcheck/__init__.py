"""`jmask.gradcheck`: gradients against differences, in plain and in masked semantics.

gradcheck           the check
problem, entries    what is perturbed: the function, its inputs and their entries
premises            what must hold before anything is compared
slow, fast, jacobian, second    every entry, random directions, second derivatives
message             what a failure says
masked_function     functions that masked semantics hold for
"""
