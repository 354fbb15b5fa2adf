"""The only gathers, scatters and de-duplications of rows: arrays in, arrays out.

rows                    gathers and scatters of whole rows, and how a lookup is vectorized
coalesce                rows of equal ids summed, into as many slots as there are ids
sharded_rows            lookups in sharded tables, and rows sent to their shards
gathered_rows           rows of another array, scaled, and sums of rows, not materialised
update_rows             tables updated at unique ids: a primitive that knows the device
scatter_update          one scatter whose combiner is an optimizer
lines                   narrow rows packed in lines of 128 lanes
tuning                  thresholds between two ways to compute the same, and why
keep_memory             freed memory stays with the process, on CPUs
stochastic_rounding     sums rounded to a narrow dtype, right on average
_tpu/                   kernels of row DMAs, and which updates they make
"""
