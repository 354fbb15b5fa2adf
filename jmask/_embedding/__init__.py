"""Lookups and bags of rows.

ids         ids as arguments: checked, canonical
lookup      `embedding_lookup`
bag_forms   bags by offsets, by segments, by lines
bag         `embedding_bag`
pad_bags    ragged bags as arrays of a few sizes
max_norm    rows that are too long, scaled
"""
