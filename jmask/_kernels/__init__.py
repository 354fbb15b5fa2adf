"""The only gathers, scatters and de-duplications of rows: arrays in, arrays out.

rows                    gathers and scatters of whole rows
gather                  a lookup as XLA's CPU compiler vectorizes it
bag_sum                 sums of rows that are never written out
bag_columns             those of bags that are equally long, on all cores
coalesce                equal ids sorted and summed
gathered_rows           rows that are rows of another array, each times a number
hash_dedup              equal ids summed into the first of them, by hashing
block_loops             loops over blocks of rows, side by side
row_blocks              equal ids summed and used, block by block
update_rows             tables updated at unique ids: a primitive that knows the machine
odd_windows             rows as windows, which XLA's CPU compiler scatters faster
lines                   narrow rows side by side in lines of 128
tpu_rows                tables updated by row DMAs, one kernel for TPUs
tpu_choice              which updates are this kernel
scatter_update          one scatter whose combiner is an optimizer
stochastic_rounding     sums rounded to a narrow dtype, right on average
"""
