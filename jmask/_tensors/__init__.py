"""What tensors are. What can be done with them is installed by the rooms above.

row_sparse, checks              a tensor that stores some of its rows
storage                         what code for any storage needs of it
masked_tensor, masked_storage   a tensor some entries of which do not exist
mask_positions                  masks that store other positions than the data
misuse                          what a `RowSparse` says to code that is for arrays
methods                         methods that are functions of rooms above
cast_storage, npz, flax_state   from one storage to another, to files
specified, phantom              which entries count for a gradient: `todense`, `sparse_mask`
printing                        how tensors print, in notebooks too
"""
