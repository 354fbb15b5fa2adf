"""LightGCN on who imports what: `train.py` is the program."""
