"""Table containers: packed rows, rows sharded over devices.

stored_table    what lookups, gradients and optimizers ask of a container
packed          narrow rows in lines of 128, as TPUs lay them out
sharded         rows sharded over the devices of a mesh, and gradients routed to them
shard_layout    where each row of a sharded table is, and how rows travel
deferral        what the sub-packages before `_deferred` know of deferred tables
plain_arrays    tensors and tables as the arrays that checkpoints keep, and back
"""
