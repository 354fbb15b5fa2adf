"""`jmask.grad`: the gradient program of JAX, interpreted so that gradients of tables stay rows.

values, row_pattern         cotangents that are still rows; which equations write rows
origins                     what makes an array of the program
row_entries                 what an equation does to rows, entry by entry
factors                     which rows repeat those of a smaller array, or are those of another
slices_of_rows              the same of slices that are put side by side
sums_of_lookups             `table[ids].sum(1)` of the forward pass
interpreter                 running a jaxpr by a table of rules
rules, control_flow, collectives    the table
uses                        what a program does with its inputs: lookups, or all of them
loss, tensor_arguments      the function differentiated, and its arguments that are tensors
after_reading               gradients whose ids wait until tables were read
value_and_grad              `jmask.value_and_grad`
"""
