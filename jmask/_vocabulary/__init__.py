"""Rows of a table for keys that are not known beforehand.

keys        keys of all kinds as words of 32 bits; hashes of strings
vocabulary  the places of keys, a pytree of arrays
rows_of     the rows that the keys of a batch have or get
reset       rows that another key got start anew, and so do the slots of their optimizer
"""
