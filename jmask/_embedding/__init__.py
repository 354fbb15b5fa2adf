"""Lookups and bags of rows.

lookup      `embedding_lookup` and `max_norm`; validation of ids; `exchange_overflow`
bag         `embedding_bag`
pad_bags    ragged bags as arrays of a few sizes; bags by offsets, segments, padding
"""
