"""What optimizers check of parameters and gradients before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR

from jmask._masked_gradient import is_gradient_leaf
from jmask._masked_tensor import MaskedTensor
from jmask._row_sparse import RowSparse
from jmask._stored_table import StoredTable, is_stored_table

_NOT_DENSE = (RowSparse, MaskedTensor, BCOO, BCSR)


def check_parameters(params: Any) -> None:
    """Refuse parameters that are not dense arrays of real numbers.

    Raises:
        TypeError: naming the parameter, what it is and what to do.
    """

    def is_not_dense(x: Any) -> bool:
        return isinstance(x, (*_NOT_DENSE, StoredTable))

    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_not_dense):
        name = f"`params{jax.tree_util.keystr(path)}`"
        if isinstance(leaf, StoredTable):
            continue
        if is_not_dense(leaf):
            raise TypeError(
                f"{name} is a {type(leaf).__name__}: parameters must be dense arrays "
                "(gradients may be sparse or masked). Use its dense form."
            )
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise TypeError(
                f"{name} is {jnp.result_type(leaf)}: complex parameters are not "
                "supported. Store the real and the imaginary part as two parameters."
            )


def check_gradient(updates: Any, params: Any) -> None:
    """Refuse a gradient with sparse or masked leaves that does not fit the parameters.

    Raises:
        ValueError: naming the parameter and both shapes, or both structures.
    """
    gradients, tree = jax.tree.flatten_with_path(updates, is_leaf=is_gradient_leaf)
    if not any(is_gradient_leaf(leaf) for _, leaf in gradients):
        return
    parameters = jax.tree.leaves_with_path(params, is_leaf=is_stored_table)
    expected: Any = jax.tree.structure(params, is_leaf=is_stored_table)
    if tree != expected:
        raise ValueError(
            f"`updates` and `params` must have the same structure, got {tree} and {expected}."
        )
    for (path, gradient), (_, param) in zip(gradients, parameters, strict=True):
        if is_gradient_leaf(gradient):
            check_fits(path, gradient, param)
        elif is_stored_table(param):
            raise ValueError(
                f"`updates{jax.tree_util.keystr(path)}` is dense, and its parameter is a "
                f"{type(param).__name__}, which takes a RowSparse: use jmask.grad, and do "
                "not make gradients dense before the optimizer."
            )


def check_fits(path: Any, update: Any, param: Any) -> None:
    """Refuse an update of another shape than its parameter, at `path` in both trees."""
    shape = param.shape if is_stored_table(param) else jnp.shape(param)
    if update.shape != shape:
        raise ValueError(
            f"`updates{jax.tree_util.keystr(path)}` of shape {update.shape} does not fit "
            f"its parameter of shape {shape}."
        )
