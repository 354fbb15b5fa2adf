"""Tables that are no single array: narrow rows side by side, rows over devices, rows that wait.

stored_table    what lookups, gradients and optimizers know of one
packed          narrow rows in lines of 128, as TPUs lay them out
sharded         rows spread over the devices of a mesh
shard_layout    where each row of a sharded table is
routed_rows     rows of a gradient brought to their shards
row_exchange    rows sent to their owners alone
deferral        what gradients and updates know of deferred tables
add_to_dense    the one sum of a table and rows that costs only the rows
plain_arrays    tensors and tables as the arrays that checkpoints keep, and back
huge_pages      tables in large pages of memory, on CPUs
"""
