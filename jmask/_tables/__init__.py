"""Table containers, and tables whose rows are sharded over devices, which are arrays.

stored_table    what lookups, gradients and optimizers ask of a container
packed          narrow rows in lines of 128, as TPUs lay them out
sharded         arrays with their rows sharded over the devices of a mesh
plain_arrays    tensors and tables as the arrays that checkpoints keep, and back
"""
