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
    """Refuse a row-sparse gradient that does not fit its parameter.

    Raises:
        ValueError: naming the parameter and both shapes.
    """
    parameters = dict(jax.tree.leaves_with_path(params))
    for path, leaf in jax.tree.leaves_with_path(updates, is_leaf=is_row_sparse):
        if not is_row_sparse(leaf):
            continue
        name = jax.tree_util.keystr(path)
        if path not in parameters:
            raise ValueError(
                f"the gradient `updates{name}` has no parameter at that place: `updates` "
                "and `params` must have the same structure."
            )
        if tuple(parameters[path].shape) != leaf.shape:
            raise ValueError(
                f"the gradient `updates{name}` of shape {leaf.shape} does not fit its "
                f"parameter of shape {tuple(parameters[path].shape)}."
            )
