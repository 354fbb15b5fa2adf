"""What `masked_elementwise.py` measures: the same expressions in every namespace, on one data.

OPERATIONS["exp(x)"](jax.numpy, x, y)        OPERATIONS["exp(x)"](torch, x, y)
"""

import numpy as np

OPERATIONS = {
    "exp(x)": lambda f, x, y: f.exp(x),
    "sqrt(x)": lambda f, x, y: f.sqrt(x),
    "x * x + x": lambda f, x, y: x * x + x,
    "x + y": lambda f, x, y: x + y,
    "x * y": lambda f, x, y: x * y,
    "tanh(x) / y": lambda f, x, y: f.tanh(x) / y,
}


def operands(size):
    """Two float32 arrays (size,), and a mask of about half of their entries."""
    rng = np.random.default_rng(0)
    x, y = (rng.uniform(0.5, 2, size).astype(np.float32) for _ in range(2))
    return x, y, rng.random(size) < 0.5
