"""A two-tower recommender in four frameworks: `train.py` is the program."""
