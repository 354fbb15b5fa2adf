"""`jmask.grad`: JAX differentiates a program that has an argument of zeros at each lookup.

value_and_grad        `jmask.value_and_grad`: trace, read, differentiate, rows
nnx                   the same of flax nnx modules: `jmask.nnx`
arguments             the function and its arguments, sparse and masked tensors among them
forward, nested       running a program some of whose values are views, or trying to
views                 the arguments of zeros; arrays computed of tables, not materialised
view_rules            what equations make of views
lookups               equations that read rows, or sum them
uses                  what to say of a dense gradient
"""
