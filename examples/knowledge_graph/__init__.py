"""TransE on a knowledge graph: `train.py` is the program."""
