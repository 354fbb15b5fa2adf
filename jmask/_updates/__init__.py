"""Gradients, parameters and states as every optimizer meets them.

checks      what they must be; masks of gradients; the error of what `lazy` cannot wrap
state_rows  which arrays of a state hold rows of which table; validation of states
"""
