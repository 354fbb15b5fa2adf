"""A bridge to SparseCore: `jmask.sparsecore`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmask._base.types import Argument, Arrays
from jmask._base.validation import as_table
from jmask._optim.row_rule import RowRule

# Rows on a core, and numbers in a row, come in multiples of this.
_MULTIPLE = 8


class RowOptimizer(NamedTuple):
    """An optimizer as SparseCore takes it.

    Attributes:
        computation: (grad, row, *slots, *hyperparameters) -> (row, *slots), arrays (1, D).
        slots: values before the first step, by name.
        hyperparameters: steps done -> scalars that change from step to step.
    """

    computation: Callable[..., Arrays]
    slots: dict[str, float]
    hyperparameters: Callable[[Argument], Arrays]


def row_optimizer(tx: optax.GradientTransformation) -> RowOptimizer:
    """Return `jmask.sgd`, `adam`, `adagrad` or `ftrl` as a function of rows.

    Raises:
        TypeError: if it is another transformation.
        ValueError: if it keeps one number for each row, as `rowwise_adagrad`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> from jmask import sparsecore
        >>> rule = sparsecore.row_optimizer(jmask.adagrad(0.5))
        >>> rule.slots, rule.hyperparameters(0)
        ({'sum_of_squares': 0.0}, ())
        >>> row, total = rule.computation(*jnp.ones((2, 1, 8)), jnp.zeros((1, 8)))
        >>> row[0, 0], total[0, 0]
        (Array(0.5, dtype=float32), Array(1., dtype=float32))
    """
    inner = getattr(tx, "inner", None)
    if not isinstance(inner, RowRule):
        raise TypeError(
            "`tx` must be jmask.sgd, adam, adagrad or ftrl with lazy_update=True, got "
            f"{type(tx).__name__}."
        )
    if names := ", ".join(name for name, slot in inner.slots.items() if slot.per_row):
        raise ValueError(
            f"`tx` keeps one number for each row ({names}), and SparseCore's slots have the "
            "shape of the table: use jmask.adagrad or jmask.adam."
        )
    first = inner.scalars(jnp.zeros((), jnp.int32))

    def computation(grad: jax.Array, row: jax.Array, *others: jax.Array) -> Argument:
        slots, changing = others[: len(inner.slots)], iter(others[len(inner.slots) :])
        scalars = [next(changing) if isinstance(x, jax.Array) else x for x in first]
        step, *new = inner.rule(grad, row, *slots, *scalars)
        return (row + step, *new)

    def hyperparameters(count: jax.Array) -> Arrays:
        scalars = inner.scalars(jnp.asarray(count, jnp.int32))
        return tuple(x.astype(jnp.float32) for x in scalars if isinstance(x, jax.Array))

    initial: dict[str, Argument] = {name: slot.initial for name, slot in inner.slots.items()}
    return RowOptimizer(computation, initial, hyperparameters)


def optimizer_spec(tx: optax.GradientTransformation, name: str = "jmask") -> Argument:
    """Return a `CustomOptimizerSpec` of jax-tpu-embedding, whose variables have this name.

    Raises:
        ImportError: if jax-tpu-embedding is not installed.

    Example:
        >>> import jmask
        >>> from jmask import sparsecore
        >>> spec = sparsecore.optimizer_spec(jmask.adam(0.1))      # doctest: +SKIP
    """
    from jax_tpu_embedding.sparsecore.lib.nn import embedding_spec

    rule = row_optimizer(tx)

    class Spec(embedding_spec.CustomOptimizerSpec):  # type: ignore[misc]  # of another project
        def get_hyperparameters(self, step: jax.Array | None = None) -> Arrays:
            # The compiler wants one at least; a computation ignores those left over.
            return rule.hyperparameters(0 if step is None else step) or (jnp.float32(0),)

    initializers = tuple(jax.nn.initializers.constant(value) for value in rule.slots.values())
    return Spec(  # by name: a version may have other parameters between these
        learning_rate=0.0,
        custom_computation_fn=rule.computation,
        slot_variable_initializers_tuple=initializers,
        short_name_str=name,
    )


def to_cores(table: jax.Array, cores: int) -> jax.Array:
    """Return a table (V, D), or a slot, in blocks (cores, rows of a core, columns), float32.

    Rows and columns are padded with zeros to multiples of 8.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmask import sparsecore
        >>> blocks = sparsecore.to_cores(jnp.arange(5.0)[:, None], cores=2)
        >>> blocks.shape, blocks[1, :3, 0]
        ((2, 8, 8), Array([1., 3., 0.], dtype=float32))
    """
    table = as_table(table)
    if table.ndim != 2 or cores < 1:
        raise ValueError(
            f"`table` must be (V, D) and `cores` positive, got {table.shape} and {cores}."
        )
    rows, columns = -table.shape[0] % (_MULTIPLE * cores), -table.shape[1] % _MULTIPLE
    padded = jnp.pad(table.astype(jnp.float32), ((0, rows), (0, columns)))
    return jnp.swapaxes(padded.reshape(-1, cores, padded.shape[1]), 0, 1)


def from_cores(blocks: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Return the table of the given shape: undo `to_cores`.

    Raises:
        ValueError: if the blocks hold fewer rows or columns.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmask import sparsecore
        >>> blocks = sparsecore.to_cores(jnp.arange(5.0)[:, None], cores=2)
        >>> sparsecore.from_cores(blocks, (5, 1)).ravel()
        Array([0., 1., 2., 3., 4.], dtype=float32)
    """
    cores, rows, columns = blocks.shape
    if cores * rows < shape[0] or columns < shape[1]:
        raise ValueError(
            f"`blocks` of shape {blocks.shape} have {cores * rows} rows of {columns}, fewer "
            f"than `shape` {shape}: give the shape of the table that `to_cores` took."
        )
    table = jnp.swapaxes(blocks, 0, 1).reshape(-1, columns)
    return table[: shape[0], : shape[1]]
