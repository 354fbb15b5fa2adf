"""DLRM on click logs in the format of Criteo's: `train.py` is the program."""
