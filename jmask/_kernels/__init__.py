"""The only gathers, scatters and de-duplications of rows: arrays in, arrays out.

rows                    gathers and scatters of whole rows
gather                  a lookup as XLA's CPU compiler vectorizes it
coalesce                equal ids sorted and summed
hash_dedup              equal ids summed into the first of them, by hashing
scatter_update          one scatter whose combiner is an optimizer
stochastic_rounding     sums rounded to a narrow dtype, right on average
"""
