"""What optimizers check of parameters and gradients before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR

from jmask._row_sparse import RowSparse, is_row_sparse

_SPARSE = (RowSparse, BCOO, BCSR)


def check_parameters(params: Any) -> None:
    """Refuse parameters that are not dense arrays of real numbers.

    Raises:
        TypeError: naming the parameter, what it is and what to do.
    """

    def is_sparse(x: Any) -> bool:
        return isinstance(x, _SPARSE)

    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_sparse):
        name = f"`params{jax.tree_util.keystr(path)}`"
        if is_sparse(leaf):
            raise TypeError(
                f"{name} is a {type(leaf).__name__}: parameters must be dense arrays "
                "(gradients may be sparse). Use its dense form."
            )
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise TypeError(
                f"{name} is {jnp.result_type(leaf)}: complex parameters are not "
                "supported. Store the real and the imaginary part as two parameters."
            )


def check_gradient(updates: Any, params: Any) -> None:
    """Refuse a gradient with row-sparse leaves that does not fit the parameters.

    Raises:
        ValueError: naming the parameter and both shapes, or both structures.
    """
    gradients, tree = jax.tree.flatten_with_path(updates, is_leaf=is_row_sparse)
    if not any(is_row_sparse(leaf) for _, leaf in gradients):
        return
    parameters = jax.tree.leaves_with_path(params)
    expected: Any = jax.tree.structure(params)
    if tree != expected:
        raise ValueError(
            "`updates` and `params` must have the same structure, got "
            f"{tree} and {expected}."
        )
    for (path, gradient), (_, param) in zip(gradients, parameters, strict=True):
        if is_row_sparse(gradient):
            check_fits(path, gradient, param)


def check_fits(path: Any, update: RowSparse, param: Any) -> None:
    """Refuse an update of another shape than its parameter, at `path` in both trees."""
    if update.shape != jnp.shape(param):
        raise ValueError(
            f"`updates{jax.tree_util.keystr(path)}` of shape {update.shape} does not fit "
            f"its parameter of shape {jnp.shape(param)}."
        )
