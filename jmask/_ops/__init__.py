"""Functions on every storage, by four words for masks and three for zeros.

lift                entrywise, moves, contracts: functions of JAX on masked tensors
reduce              reduces: reductions of the valid entries of every storage
formulas, norms     the formulas that are reduced
rows                what a function of entries makes of zeros that are not stored
order               sorted, the largest, the different ones; running sums
selection           by conditions and indices: where, take, pad, masked_where
indexing            `x[...]`, `x.at[...]` and `retain`
products            `dot` of every pair of storages
contractions        products of masked tensors, attention
statistics          without nan, weighted, of pairs; comparisons
tree                arithmetic on whole gradients: `jmask.tree`
"""
