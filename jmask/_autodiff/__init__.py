"""`jmask.grad`: JAX differentiates a program that has an argument of zeros at each lookup.

value_and_grad        `jmask.value_and_grad`: trace, read, differentiate, rows
nnx                   the same of flax nnx modules: `jmask.nnx`
arguments             the function and its arguments, sparse and masked tensors among them
taps                  the arguments of zeros, and gradients of tables from theirs
forward, nested       running a program some of whose values are views, or trying to
views                 arrays computed from tables, not materialised: how their rows are read
view_rules            what equations make of views
lookups               equations that read rows, or sum them
bags_by_hand          rows that are looked up, weighted and summed, as one bag sum
uses                  what to say of a dense gradient
"""
