"""Gradients of flax nnx modules: `nnx.value_and_grad` and `nnx.grad`, row-sparse for tables.

    nnx.value_and_grad(loss)(model, ids)         dense gradients
    jmask.nnx.value_and_grad(loss)(model, ids)   the same, rows for tables that are looked up

A module is an object: a call changes its counts of random numbers (Dropout) and its statistics
(BatchNorm). `jmask.value_and_grad` takes trees of arrays and refuses functions that write to
them. Here a module is split into its parameters, which are differentiated, and its other state,
which the function returns and which is written back.

flax is optional: these functions need it, the rest of jmask does not.
"""

from jmask._autodiff.nnx import grad as grad
from jmask._autodiff.nnx import value_and_grad as value_and_grad
