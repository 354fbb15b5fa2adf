"""What optimizers check of parameters and gradients before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR

from jmask._masked_gradient import is_gradient_leaf
from jmask._masked_tensor import MaskedTensor
from jmask._row_sparse import RowSparse

_NOT_DENSE = (RowSparse, MaskedTensor, BCOO, BCSR)


def check_parameters(params: Any) -> None:
    """Refuse parameters that are not dense arrays of real numbers.

    Raises:
        TypeError: naming the parameter, what it is and what to do.
    """

    def is_not_dense(x: Any) -> bool:
        return isinstance(x, _NOT_DENSE)

    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_not_dense):
        name = f"`params{jax.tree_util.keystr(path)}`"
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
    parameters = jax.tree.leaves_with_path(params)
    expected: Any = jax.tree.structure(params)
    if tree != expected:
        raise ValueError(
            f"`updates` and `params` must have the same structure, got {tree} and {expected}."
        )
    for (path, gradient), (_, param) in zip(gradients, parameters, strict=True):
        if is_gradient_leaf(gradient):
            check_fits(path, gradient, param)


def check_fits(path: Any, update: Any, param: Any) -> None:
    """Refuse an update of another shape than its parameter, at `path` in both trees."""
    if update.shape != jnp.shape(param):
        raise ValueError(
            f"`updates{jax.tree_util.keystr(path)}` of shape {update.shape} does not fit "
            f"its parameter of shape {jnp.shape(param)}."
        )
