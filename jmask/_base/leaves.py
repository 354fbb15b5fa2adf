"""What among the leaves of a tree is no array, and how an error names it.

    {"table": jnp.ones((3, 2)), "activation": jax.nn.relu}     `params['activation']`
    eqx.nn.MLP(...)                                            `params.activation`

Models of equinox and flax nnx are trees that hold functions, names and counters beside
their parameters. JAX says of such a leaf that it is one, but not which.
"""

from typing import Any

import jax
import jax.numpy as jnp

KEEP_ARRAYS = (
    "keep the parameters apart from what else a model holds, with eqx.partition(model, "
    "eqx.is_inexact_array) or nnx.split(model, nnx.Param, ...)"
)


def leaf_name(tree: str, path: Any) -> str:
    """How the leaf at `path` of the tree called `tree` is written, in backticks."""
    return f"`{tree}{jax.tree_util.keystr(path)}`"


def abstract_leaf(leaf: Any) -> Any:
    """Shape and dtype of what JAX takes for an array; None of anything else."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return jax.typeof(leaf)
    except TypeError:
        return None


def as_table(table: Any) -> jax.Array:
    """`table` as an array.

    Raises:
        TypeError: if it is none.
    """
    try:
        if isinstance(table, list | tuple) or abstract_leaf(table) is not None:
            return jnp.asarray(table)
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"`table` must be an array (V, *row), got {type(table).__name__}: of a tree of "
        "parameters give the one that is looked up, as in `params['table']`."
    )


def is_about_structure(error: ValueError) -> bool:
    """Whether JAX raised it for trees that were mapped together and differ."""
    words = ("pytree", "expected", "mismatch", "structure")
    return any(word in str(error).lower() for word in words)


def not_an_array(name: str, leaf: Any, advice: str) -> TypeError:
    """The error for a leaf that is no array."""
    kind = type(leaf).__name__
    article = "an" if kind[0].lower() in "aeio" else "a"
    return TypeError(f"{name} is {article} {kind}, not an array: {advice}.")
