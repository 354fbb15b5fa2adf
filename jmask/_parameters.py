"""What optimizers check of parameters and gradients before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR

from jmask._array_leaves import KEEP_ARRAYS, abstract_leaf, leaf_name, not_an_array
from jmask._masked_gradient import is_gradient_leaf
from jmask._masked_tensor import MaskedTensor
from jmask._row_sparse import RowSparse
from jmask._stored_table import StoredTable, is_stored_table, shape_of

_NOT_DENSE = (RowSparse, MaskedTensor, BCOO, BCSR)


def check_parameters(params: Any) -> None:
    """Refuse parameters that are not dense arrays of real numbers.

    Raises:
        TypeError: naming the parameter, what it is and what to do.
    """

    def is_not_dense(x: Any) -> bool:
        return isinstance(x, (*_NOT_DENSE, StoredTable))

    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_not_dense):
        if isinstance(leaf, StoredTable):
            continue
        if is_not_dense(leaf):
            raise TypeError(
                f"{leaf_name('params', path)} is a {type(leaf).__name__}: parameters must be "
                "dense arrays (gradients may be sparse or masked). Use its dense form."
            )
        array = abstract_leaf(leaf)
        if array is None:
            advice = f"pass eqx.filter(model, eqx.is_inexact_array), or {KEEP_ARRAYS}"
            raise not_an_array(leaf_name("params", path), leaf, advice)
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise TypeError(
                f"{leaf_name('params', path)} is {array.dtype}: complex parameters are not "
                "supported. Store the real and the imaginary part as two parameters."
            )


def check_transformation(name: str, tx: Any, order: str) -> None:
    """Refuse what is no optax transformation.

    Raises:
        TypeError: naming the argument, and how the call is written.
    """
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise TypeError(
            f"`{name}` must be an optax transformation, got {type(tx).__name__}: write for "
            f"example {order}."
        )


def check_gradient(updates: Any, params: Any) -> None:
    """Refuse a gradient with sparse or masked leaves that does not fit the parameters.

    Raises:
        ValueError: naming the parameter and both shapes, or both structures.
    """
    gradients, tree = jax.tree.flatten_with_path(updates, is_leaf=is_gradient_leaf)
    parameters = jax.tree.leaves(params, is_leaf=is_stored_table)
    if not any(is_gradient_leaf(g) for _, g in gradients) and not any(
        map(is_stored_table, parameters)
    ):
        return
    expected: Any = jax.tree.structure(params, is_leaf=is_stored_table)
    if tree != expected:
        raise ValueError(
            f"`updates` and `params` must have the same structure, got {tree} and {expected}. "
            "The order is tx.update(grads, opt_state, params)."
        )
    for (path, gradient), param in zip(gradients, parameters, strict=True):
        if is_gradient_leaf(gradient):
            check_fits(path, gradient, param)
        elif is_stored_table(param):
            raise ValueError(
                f"{leaf_name('updates', path)} is dense, and its parameter is a "
                f"{type(param).__name__}, which takes a RowSparse: use jmask.grad, and do "
                "not make gradients dense before the optimizer."
            )


def check_fits(path: Any, update: Any, param: Any) -> None:
    """Refuse an update that its parameter, at `path` in both trees, cannot take."""
    like = shape_of(param)
    shape, dtype = like.shape, like.dtype
    if update.shape != shape:
        raise ValueError(
            f"{leaf_name('updates', path)} of shape {update.shape} does not fit its parameter "
            f"of shape {shape}."
        )
    if not jnp.issubdtype(dtype, jnp.inexact) and jnp.issubdtype(update.dtype, jnp.inexact):
        raise TypeError(
            f"{leaf_name('updates', path)} is {update.dtype} and its parameter {dtype}: an "
            "update would be cut to integers. Store the parameter as a floating array, "
            "`.astype(jnp.float32)`."
        )
