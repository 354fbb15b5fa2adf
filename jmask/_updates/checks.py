"""What optimizers check of parameters and gradients before anything is computed."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.leaves import (
    KEEP_ARRAYS,
    Model,
    abstract_leaf,
    is_about_structure,
    leaf_name,
    not_an_array,
)
from jmask._tables.deferral import is_new_table
from jmask._tables.stored_table import StoredTable, is_stored_table, shape_of
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import RowSparse
from jmask._updates.masked_gradient import check_gradients, is_gradient_leaf

_ORDER = "tx.update(grads, opt_state, params)"
_NOT_DENSE = (RowSparse, MaskedTensor, BCOO, BCSR)


def model_of(params: Any) -> Model:
    """The parameters, which may be a whole model, and what else it holds."""
    return Model(params, _is_no_array)


def _is_no_array(x: Any) -> bool:
    return isinstance(x, (*_NOT_DENSE, StoredTable))


def check_parameters(params: Any) -> None:
    """Refuse parameters that are not arrays of real numbers, or `RowSparse` with all rows.

    Raises:
        TypeError: naming the parameter, what it is and what to do.
    """

    params = model_of(params).parameters
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=_is_no_array):
        if isinstance(leaf, StoredTable) or is_full(leaf):
            continue
        if _is_no_array(leaf):
            raise TypeError(
                f"{leaf_name('params', path)} is a {type(leaf).__name__}: parameters must be "
                "dense arrays, or RowSparse with all rows stored (gradients may be sparse or "
                "masked). Use its dense form."
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


def is_full(x: Any) -> bool:
    """Whether a parameter is a `RowSparse` that stores all its rows."""
    return isinstance(x, RowSparse) and x.nse >= x.shape[0]


def check_gradient(updates: Any, params: Any) -> None:
    """Refuse a gradient that does not fit the parameters.

    Structures must be the same where a gradient is sparse or masked, or a table stored; else
    that is left to optax.

    Args:
        updates: arrays, `RowSparse` and `MaskedTensor`.
        params: arrays and stored tables.

    Raises:
        ValueError: naming the parameter and both shapes, or both structures; and where a
            deferred table has taken its step already.
        TypeError: naming the parameter, if its gradient is no array or has a dtype that it
            cannot take.
    """
    if any(map(is_new_table, jax.tree.leaves(updates, is_leaf=is_new_table))):
        raise ValueError(
            "`updates` has the step of a deferred table already, and what is chained behind "
            "would change it: put all of the chain into one jmask.lazy(optax.chain(...))."
        )
    check_gradients(updates)
    gradients = jax.tree.leaves_with_path(updates, is_leaf=is_gradient_leaf)
    parameters = jax.tree.leaves(params, is_leaf=is_stored_table)
    if any(is_gradient_leaf(g) for _, g in gradients) or any(map(is_stored_table, parameters)):
        check_structure(updates, params)
    elif not _are_alike(updates, params):
        return
    for (path, gradient), param in zip(gradients, parameters, strict=True):
        if is_stored_table(param) and not is_gradient_leaf(gradient):
            raise ValueError(
                f"{leaf_name('updates', path)} is dense, and its parameter is a "
                f"{type(param).__name__}, which takes a RowSparse: use jmask.grad, and do "
                "not make gradients dense before the optimizer."
            )
        check_fits(path, gradient, param)


def check_structure(updates: Any, params: Any) -> None:
    """Refuse gradients whose tree is another than that of the parameters.

    Raises:
        ValueError: with both structures, or the name of the parameter that has no gradient.
    """
    if not _are_alike(updates, params):
        raise ValueError(_other_structure(updates, params))


def _are_alike(updates: Any, params: Any) -> bool:
    """Whether each gradient has an array or a table."""
    given: Any = jax.tree.structure(updates, is_leaf=is_gradient_leaf)
    return given == jax.tree.structure(params, is_leaf=is_stored_table)


@contextlib.contextmanager
def naming_structures(updates: Any, params: Any, order: str = _ORDER) -> Iterator[None]:
    """Context of what maps over both trees; its error says which structures they have.

    Raises:
        ValueError: in place of that of JAX, where they differ.
    """
    try:
        yield
    except ValueError as error:
        given, expected = _structures(updates, params)
        if not is_about_structure(error) or params is None or given == expected:
            raise
        raise ValueError(_other_structure(updates, params, order)) from error


def _structures(updates: Any, params: Any) -> list[Any]:
    is_leaf = lambda x: is_gradient_leaf(x) or is_stored_table(x)
    return [jax.tree.structure(x, is_leaf=is_leaf) for x in (updates, params)]


def _other_structure(updates: Any, params: Any, order: str = _ORDER) -> str:
    """What to say of gradients whose structure is not that of the parameters."""
    given, expected = _structures(updates, params)
    missing = _missing(updates, params)
    if missing is not None:
        return (
            f"{missing} is None, and there is a parameter: give it a gradient, or keep the "
            "parameter out with optax.partition or eqx.partition."
        )
    return (
        f"`updates` and `params` must have the same structure, got {given} and {expected}. "
        f"The order is {order}."
    )


def _missing(updates: Any, params: Any) -> str | None:
    """The name of the first leaf that is None where there is a parameter, if all others fit."""
    is_leaf = lambda x: x is None or is_gradient_leaf(x) or is_stored_table(x)
    leaves: Any = jax.tree.leaves_with_path(updates, is_leaf=is_leaf)
    parameters: Any = jax.tree.leaves_with_path(params, is_leaf=is_leaf)
    if [path for path, _ in leaves] != [path for path, _ in parameters]:
        return None
    for (path, leaf), (_, param) in zip(leaves, parameters, strict=True):
        if leaf is None is not param:
            return leaf_name("updates", path)
    return None


def check_fits(path: Any, update: Any, param: Any) -> None:
    """Refuse an update that its parameter, at `path` in both trees, cannot take."""
    name = leaf_name("updates", path)
    if not is_stored_table(param) and abstract_leaf(param) is None:
        raise not_an_array(leaf_name("params", path), param, KEEP_ARRAYS)
    like, dtype = shape_of(param), jnp.result_type(shape_of(param).dtype)
    shape = tuple(jnp.shape(update))
    of_update = update.dtype if hasattr(update, "dtype") else jnp.result_type(update)
    if shape != like.shape:
        raise ValueError(
            f"{name} of shape {shape} does not fit its parameter of shape {like.shape}."
        )
    if jnp.issubdtype(of_update, jnp.bool_) and dtype != of_update:
        raise TypeError(f"{name} is bool, and its parameter {dtype}: is it a mask?")
    is_complex = [jnp.issubdtype(x, jnp.complexfloating) for x in (of_update, dtype)]
    if is_complex == [True, False]:
        raise TypeError(
            f"{name} is {of_update} and its parameter {dtype}: complex gradients of real "
            "parameters are not supported. Take the real part, `.real`, if that is meant."
        )
    is_floating = [jnp.issubdtype(x, jnp.inexact) for x in (of_update, dtype)]
    if is_gradient_leaf(update) and is_floating == [True, False]:
        raise TypeError(
            f"{name} is {of_update} and its parameter {dtype}: an update would be cut to "
            "integers. Store the parameter as a floating array, `.astype(jnp.float32)`."
        )
