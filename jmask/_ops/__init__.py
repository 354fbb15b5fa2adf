"""Functions on tensors of every storage.

lift                entrywise, moves, contracts: functions of JAX on masked tensors
reduce              reduces: reductions of the valid entries of every storage
formulas            the formulas that are reduced, norms among them
rows                functions of entries on sparse tensors, whose other entries are zeros
selection           by conditions and indices: where, take, masked_where, `x[...]`, `x.at[...]`
products            `dot` of every pair of storages, and of masked ones; attention; sums
statistics          sort, top_k, unique; running sums; covariance, comparisons
tree                arithmetic on whole gradients: `jmask.tree`
"""
