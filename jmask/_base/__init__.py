"""The base of all other sub-packages: nothing here knows of a tensor.

types           names for the types of arguments
array_types     shapes, and dtypes to compute in
side_table      what is known of objects, as long as they live
shardings       where the entries of arrays are, by their types; code for each device
validation      validation of public arguments and of the leaves of trees
row_ids         row ids: canonical form, and the opaque dtype in which they travel
fallback        the warning, or error, where sparse storage becomes dense
forms           what is relied on of JAX's programs: names and parameters of equations
jaxprs          running jaxprs, and which outputs depend on which inputs
lowering        primitives that become what suits the devices
"""
