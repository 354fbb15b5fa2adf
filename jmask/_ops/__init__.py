"""Functions on every storage, by four words for masks and three for zeros.

lift                entrywise, moves, contracts: functions of JAX on masked tensors
reduce              reduces: reductions of the valid entries of every storage
formulas            the formulas that are reduced, norms among them
rows                what a function of entries makes of zeros that are not stored
selection           by conditions and indices: where, take, masked_where, `x[...]`, `x.at[...]`
products            `dot` of every pair of storages, and of masked ones; attention; sums
statistics          sorted, the largest, the different ones; running sums; of pairs
tree                arithmetic on whole gradients: `jmask.tree`
"""
