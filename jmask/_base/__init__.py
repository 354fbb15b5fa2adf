"""What everything else stands on; no file here knows of a tensor.

fallback        leaving sparse storage warns, or raises
row_ids         row ids: canonical form, and the opaque dtype in which they travel
forms           what is relied on of JAX's programs: names and parameters of equations
lowering        what is decided only where a program is lowered for its devices
jaxprs          running jaxprs, and which outputs depend on which inputs
shapes          arrays beside those of more dimensions; sizes that are not known
array_types     what the type of an array says: how it is spread, over what it varies
leaves          what among the leaves of a tree is no array, by name
doors           what comes in: taken, or refused by its name
norms           norms of rows that neither overflow nor vanish
precision       which dtype to compute in, and which casts add
"""
