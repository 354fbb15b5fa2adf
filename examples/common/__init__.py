"""Modules that several examples share.

program          arguments, progress bar, Ctrl-C
checkpoints      a run that is stopped goes on where it was
step_timing      steps that do the same in different ways, side by side
learning_curve   the picture of a run
python_corpus    identifiers of the Python sources on this machine
labelled_texts   functions of Python packages, with the package as the label
hashed_texts     texts as rows of a sparse matrix, in batches
interactions     made-up users, and the items they took
processes        several processes of one program
"""
