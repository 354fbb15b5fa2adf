"""The tensors. Their methods are functions of sub-packages above, looked up when called.

row_sparse, checks              a tensor that stores some of its rows
masked_tensor                   a tensor some entries of which are not valid
storage                         what code for any storage asks of it
conversions                     from one storage to another, to files and text
specified                       which entries count for a gradient: `todense`, `sparse_mask`
methods                         methods that are functions of sub-packages above
flax_state                      state dicts of flax
"""
