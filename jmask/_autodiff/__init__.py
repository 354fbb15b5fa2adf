"""`jmask.grad`: the gradient program of JAX, interpreted so that gradients of tables stay rows.

values, row_pattern         cotangents that are still rows; which equations write rows
row_moves                   reshape, pad, slice, transpose and concatenate sums of rows
gathered_rows               rows of another array times a number each, and who reads them so
provenance                  what each equation adds to what is known of arrays
interpreter                 running a jaxpr by a table of rules
rules, control_flow, collectives    the table
uses                        what a program does with its inputs: lookups, or all of them
loss, tensor_arguments      the function differentiated, and its arguments that are tensors
after_reading               gradients whose ids wait until tables were read
value_and_grad              `jmask.value_and_grad`
"""
