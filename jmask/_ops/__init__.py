"""Functions on every storage. One mechanism for each kind of function.

elementwise                                 a function of JAX, lifted
zero_preserving, zero_semantics             what it does at entries that are not stored
safe_numbers                                numbers harmless to a function and its slopes
masked_moves, masked_shape                  data and mask moved together; shapes
masked_index, masked_at, row_shape, row_index   indexing, `.at`, shapes of rows
groups, reduction_kernels, reduce           storages become groups, kernels work on groups
reductions, order_reductions                the reductions themselves
products, product_operands, csr_kernel      `dot` of every pair of storages
contractions                                products of masked tensors
row_operations                              MXNet's functions of rows
"""
