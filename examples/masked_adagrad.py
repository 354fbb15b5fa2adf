"""Adagrad in three lines of masked arithmetic, the same for every storage.

    python examples/masked_adagrad.py

A sparse gradient handed to Adagrad does not mean "zero elsewhere": the entries that are not
there are to be left alone. Frameworks that know sparsity only as a way of storing zeros
write the update on indices and values, once for each storage:

    state_sum[i] += v**2;   param[i] -= lr * v / (sqrt(state_sum[i]) + eps)

With a `MaskedTensor` the missing entries are masked, arithmetic leaves them alone by
definition, and the storage is nobody's business:

    state_sum = state_sum + (grad**2).to_tensor(0)
    std = sqrt(masked_tensor(state_sum, grad.mask)) + eps
    param = param + (-lr * grad / std).to_tensor(0)

The numbers are those of PyTorch's MaskedTensor tutorial on Adagrad. The last rows show that
`jmask.adagrad` takes the same masked gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jmask
from jmask.numpy import sqrt

LEARNING_RATE, EPS, START = 0.1, 1e-10, 0.5

GRADIENT = jnp.array([[0.0, 0.0, 3.0, 0.0], [4.0, 0.0, 5.0, 0.0]])


def gradients() -> dict[str, jmask.MaskedTensor]:
    """The same masked gradient on every storage."""
    dense = jmask.masked_tensor(GRADIENT, GRADIENT != 0)
    return {
        "dense": dense,
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "row_sparse": dense.to_row_sparse(),
    }


@jax.jit
def adagrad_step(
    param: jax.Array, state_sum: jax.Array, grad: jmask.MaskedTensor
) -> tuple[jax.Array, jax.Array]:
    """One step of Adagrad that moves the entries of `grad` that exist."""
    state_sum = state_sum + (grad**2).to_tensor(0)
    std = sqrt(jmask.masked_tensor(state_sum, grad.mask)) + EPS
    param = param + (-LEARNING_RATE * grad / std).to_tensor(0)
    return param, state_sum


def numbers(x: jax.Array) -> str:
    return str(np.asarray(x, np.float64).round(4).tolist())


def main() -> None:
    table = Table("storage", "step", "param", "state_sum", title="Masked Adagrad")
    for storage, grad in gradients().items():
        param = jnp.arange(8.0).reshape(2, 4)
        state_sum = jnp.full_like(param, START)
        for step in (1, 2):
            param, state_sum = adagrad_step(param, state_sum, grad)
            table.add_row(storage, str(step), numbers(param), numbers(state_sum))

    tx = jmask.adagrad(LEARNING_RATE, initial_accumulator_value=START, eps=EPS)
    for storage, grad in gradients().items():
        param = jnp.arange(8.0).reshape(2, 4)
        state = tx.init(param)
        for _ in range(2):
            updates, state = tx.update(grad, state, param)
            param = optax.apply_updates(param, updates)
        state_sum = state.sum_of_squares
        table.add_row(f"adagrad, {storage}", "2", numbers(param), numbers(state_sum))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
