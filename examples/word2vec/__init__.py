"""word2vec on the names in Python code: `train.py` is the program."""
