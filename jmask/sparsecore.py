"""A bridge to SparseCore, the part of a TPU that trains embeddings (jax-tpu-embedding).

Its update takes an optimizer as a function of rows, which is what a named optimizer of jmask
is made of:

    computation(grad, row, *slots, *hyperparameters) -> (row, *slots)        each (1, D)

and its tables are float32, row i on core i % S at place i // S, padded:

    V = 5, S = 2         core 0: rows 0, 2, 4, -, ...       core 1: rows 1, 3, -, ...

The package is optional: `optimizer_spec` needs it, the rest does not.
"""

from jmask._optim.sparsecore import RowOptimizer as RowOptimizer
from jmask._optim.sparsecore import from_cores as from_cores
from jmask._optim.sparsecore import optimizer_spec as optimizer_spec
from jmask._optim.sparsecore import row_optimizer as row_optimizer
from jmask._optim.sparsecore import to_cores as to_cores
