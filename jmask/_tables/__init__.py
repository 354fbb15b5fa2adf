"""Tables, which are arrays: sharded, packed, quantized, and their rows.

rows_at         the rows of a gradient in its tables: read, written, added
packed          narrow rows in lines of 128, as TPUs lay them out
sharded         arrays with their rows sharded over the devices of a mesh
quantized       tables in 8 or 4 bits for serving
plain_arrays    tensors and tables as the arrays that checkpoints keep, and back
"""
