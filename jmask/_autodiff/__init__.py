"""`jmask.grad`: JAX's gradient program, interpreted so that gradients of tables stay rows.

value_and_grad              `jmask.value_and_grad`
nnx                         the same of flax nnx modules: `jmask.nnx`
arguments                   the function, its arguments, and the order of its gradients
interpreter                 running a jaxpr by a table of rules
rules, control_flow         the table
values                      cotangents that are still rows
row_pattern                 equations that write rows, and equations that move them
gathered_rows, provenance   rows of another array, scaled: what is known, who asks
views                       rows of what is made of tables, read from the tables themselves
uses                        how a program uses its inputs: by lookups, or as a whole
"""
