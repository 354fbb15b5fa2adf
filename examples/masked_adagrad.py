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
`jmask.adagrad` takes the same masked gradients; the picture has all entries over the steps.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.table import Table

import jmask
from common.program import Arguments, Program
from jmask.numpy import sqrt

LEARNING_RATE, EPS, START = 0.1, 1e-10, 0.5

GRADIENT = jnp.array([[0.0, 0.0, 3.0, 0.0], [4.0, 0.0, 5.0, 0.0]])


def gradients() -> dict[str, jmask.MaskedTensor]:
    """Return the same masked gradient on every storage."""
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
    """Do one step of Adagrad on the entries of `grad` that exist."""
    state_sum = state_sum + (grad**2).to_tensor(0)
    std = sqrt(jmask.masked_tensor(state_sum, grad.mask)) + EPS
    param = param + (-LEARNING_RATE * grad / std).to_tensor(0)
    return param, state_sum


def numbers(x: jax.Array) -> str:
    return str(np.asarray(x, np.float64).round(4).tolist())


def save_plot(path: Path, params: np.ndarray) -> None:
    """Draw the entries over steps (n, 2, 4): those that are masked do not move."""
    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    exists = np.asarray(GRADIENT != 0).ravel()
    for entry, moves in zip(params.reshape(len(params), -1).T, exists, strict=True):
        axes.plot(entry, color="tab:blue" if moves else "lightgrey")
    axes.set(xlabel="step", ylabel="entries of param; grey: masked")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments("masked_adagrad", __doc__)
    parser.number("--steps", 2, "of Adagrad")
    args = parser.parse_args(argv)
    table = Table("storage", "step", "param", "state_sum", title="Masked Adagrad")
    tx = jmask.adagrad(LEARNING_RATE, initial_accumulator_value=START, eps=EPS)
    grads, done = gradients(), 0
    with Program("masked_adagrad") as program:
        program.console.width = 140
        with program.bar("storages", len(grads)) as show:
            for storage, grad in program.until_stopped(grads.items()):
                param = jnp.arange(8.0).reshape(2, 4)
                state_sum, params = jnp.full_like(param, START), [param]
                for step in range(1, args.steps + 1):
                    param, state_sum = adagrad_step(param, state_sum, grad)
                    params.append(param)
                    table.add_row(storage, str(step), numbers(param), numbers(state_sum))
                param = params[0]
                state = tx.init(param)
                for _ in range(args.steps):
                    updates, state = tx.update(grad, state, param)
                    param = optax.apply_updates(param, updates)
                row = f"adagrad, {storage}", str(args.steps), numbers(param)
                table.add_row(*row, numbers(state.sum_of_squares))
                done += 1
                show(done)
        save_plot(args.plot, np.array(params))
        program.wrote("entries over steps", args.plot)
        program.print(table)


if __name__ == "__main__":
    main()
