"""Functions on every storage. One mechanism for each kind of function.

elementwise         a function of JAX, lifted
zero_semantics      its results where entries that are not stored are zeros
groups, kernels     storages become groups, kernels work on groups
reductions          the reductions themselves
shape               data and mask moved together; shapes
indexing            `x[...]`, `x.at[...]` and `retain`
products            `dot` of every pair of storages
contractions        products of masked tensors
"""
