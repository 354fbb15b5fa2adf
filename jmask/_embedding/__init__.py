"""Lookups and bags of rows.

lookup      `embedding_lookup` and `max_norm`; validation of ids
bag         `embedding_bag`
overflow    `exchange_overflow`, of large batches on sharded tables
pad_bags    ragged bags as arrays of a few sizes; bags by offsets, segments, padding
"""
