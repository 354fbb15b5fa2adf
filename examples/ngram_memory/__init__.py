"""A language model with a memory of n-grams: `train.py` is the program."""
