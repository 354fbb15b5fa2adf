"""What among the leaves of a tree is no array, and how an error names it.

    {"table": jnp.ones((3, 2)), "activation": jax.nn.relu}     `params['activation']`
    eqx.nn.MLP(...)                                            `params.activation`

Models of equinox and flax nnx are trees that hold functions, names and counters beside
their parameters. In a tree with a function or a flag only floating arrays are parameters, as in
`eqx.filter_value_and_grad`. Of any other leaf JAX says that it is no array, but not which.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


class Model:
    """A tree, and what in it is no parameter if it holds functions or flags.

    Attributes:
        parameters: the tree with None for everything that is no floating array or tensor; the
            tree itself if it holds neither functions nor flags, or no parameters.
    """

    def __init__(self, tree: Any, is_tensor: Callable[[Any], bool]):
        self.is_leaf = lambda x: x is None or is_tensor(x)
        self.structure: Any
        leaves, self.structure = jax.tree.flatten(tree, is_leaf=self.is_leaf)
        self.parameters, self.others = tree, dict[int, Any]()
        of_models = (callable(x) or isinstance(x, bool) for x in leaves if not is_tensor(x))
        if any(of_models) and any(x is not None and self._is_parameter(x) for x in leaves):
            self.others = {i: x for i, x in enumerate(leaves) if not self._is_parameter(x)}
            kept = [None if i in self.others else x for i, x in enumerate(leaves)]
            self.parameters = self.structure.unflatten(kept)

    def _is_parameter(self, x: Any) -> bool:
        if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return jnp.issubdtype(x.dtype, jnp.inexact)
        return self.is_leaf(x)

    def with_parameters(self, parameters: Any) -> Any:
        """The tree with other parameters, arrays or what stands for them."""
        if not self.others:
            return parameters
        leaves = jax.tree.leaves(parameters, is_leaf=self.is_leaf)
        return self.structure.unflatten(
            [self.others.get(i, leaf) for i, leaf in enumerate(leaves)]
        )


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
