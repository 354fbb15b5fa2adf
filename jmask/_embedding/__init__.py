"""Lookups and bags of rows.

ids         validation of ids, and their canonical form
lookup      `embedding_lookup`, and `max_norm`
bag         `embedding_bag`
pad_bags    ragged bags as arrays of a few sizes; bags by offsets, segments, padding
"""
