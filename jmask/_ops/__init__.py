"""Functions on every storage. One mechanism for each kind of function.

elementwise         a function of JAX, lifted to masked and to sparse tensors
zero_semantics      how it behaves at entries that are not stored
groups, kernels     storages become groups, kernels work on groups
reductions          the table of reductions, and the functions
order               running sums, sorting, quantiles, the largest, the different ones
shape               data and mask moved together; shapes
indexing            `x[...]`, `x.at[...]` and `retain`
masking             masks made of conditions
products            `dot` of every pair of storages
contractions        products of masked tensors
statistics          without nan, of pairs, of bins; comparisons
softmax             the softmax family: `jmask.nn`
tree                arithmetic on whole gradients: `jmask.tree`
"""
