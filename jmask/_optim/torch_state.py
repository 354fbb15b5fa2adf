"""Optimizer states of torch, in and out: a run goes on where the other library left it.

torch SparseAdam    exp_avg, exp_avg_sq, step        jmask.adam       mu, nu, count
torch Adagrad       sum, step                        jmask.adagrad    sum_of_squares, count
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.types import Argument, HostArray, PyTree
from jmask._base.validation import leaf_name
from jmask._deferred.deferred import DeferredState
from jmask._lazy.state_rows import only_state, states_of
from jmask._optim.adam import AdamState
from jmask._optim.named import AdagradState

# The fields of a state after `count`, by the keys that torch gives them.
_KEYS: dict[type, tuple[str, ...]] = {
    AdamState: ("exp_avg", "exp_avg_sq"),
    AdagradState: ("sum",),
}


def from_torch_state(
    state: PyTree,
    torch_state: Mapping[Hashable, PyTree],
    order: Sequence[Hashable] | None = None,
) -> PyTree:
    """Return the state of `adam` or `adagrad` with the numbers of a torch optimizer.

    Args:
        state: from `tx.init(params)`, possibly inside others, as of `optax.chain`.
        torch_state: `optimizer.state_dict()`, or the "state" in it: for each parameter, by
            its number, a mapping of arrays or CPU tensors.
        order: the key in `torch_state` of each leaf of the parameters, in the order of
            `jax.tree.leaves`. By default 0, 1, ..., where no two parameters have one shape.

    Raises:
        TypeError: if `torch_state` is no mapping of mappings of numbers.
        ValueError: if `state` does not hold one such state, keys or shapes differ, or the
            parameters took different numbers of steps.

    Example:
        >>> import jax.numpy as jnp, numpy as np, jmask
        >>> tx, params = jmask.adagrad(0.1), {"t": jnp.ones((3, 1))}
        >>> of_torch = {0: {"step": 7, "sum": np.full((3, 1), 2.)}}
        >>> state = jmask.from_torch_state(tx.init(params), of_torch)
        >>> state.count, state.sum_of_squares["t"].ravel()
        (Array(7, dtype=int32), Array([2., 2., 2.], dtype=float32))
    """
    old, keys = _only_state(state)
    entries = torch_state.get("state", torch_state) if isinstance(torch_state, Mapping) else 0
    is_tree = isinstance(entries, Mapping)
    if not is_tree or not all(isinstance(x, Mapping) for x in entries.values()):
        raise TypeError(
            "`torch_state` must be `optimizer.state_dict()`, or the mapping from numbers of "
            f"parameters to mappings of arrays in it, got {type(torch_state).__name__}."
        )
    leaves = jax.tree.leaves_with_path(old[1])
    numbers = _checked_order(order, len(leaves))
    is_ambiguous = len({x.shape for _, x in leaves}) < len(leaves) or len(entries) > len(leaves)
    if order is None and is_ambiguous:
        raise ValueError(
            "`order` must be given: torch numbers parameters in its own order, "
            f"{list(entries)}, and shapes do not tell them apart. List the number of each leaf."
        )
    arrays = [{k: _in_numpy(x, n, k) for k, x in entries.get(n, {}).items()} for n in numbers]
    for number, of_torch, (path, like) in zip(numbers, arrays, leaves, strict=True):
        name = f"parameter {number!r} of `torch_state`"
        shapes = {k: x.shape for k, x in of_torch.items()}
        expected = {"step": (), **dict.fromkeys(keys, like.shape)}
        if shapes != expected:
            raise ValueError(
                f"{name}, for {leaf_name('params', path)}, has {shapes}, expected {expected}: "
                "is it of another optimizer, or one with `amsgrad`? Say which is which by "
                "`order`."
            )
        dtypes = {k: x.dtype.name for k, x in of_torch.items()}
        if any(x.dtype.kind in "bcmMOSU" for x in of_torch.values()):
            raise TypeError(f"{name} must be of real numbers, got {dtypes}.")
    count, *others = {float(x["step"]) for x in arrays} or {0.0}
    most = jnp.iinfo(old.count.dtype).max
    if others or not (0 <= count <= most and count.is_integer()):
        raise ValueError(
            "'step' in `torch_state` must be one number of steps for all parameters, at most "
            f"{most}, got {sorted([count, *others])}."
        )
    columns = [iter([x[key] for x in arrays]) for key in keys]
    filled = lambda slot, new: jax.tree.map(lambda y: _placed_as(y, next(new)), slot)
    new = type(old)(jnp.asarray(count, old.count.dtype), *map(filled, old[1:], columns))
    return jax.tree.map(lambda x: new if x is old else x, state, is_leaf=lambda x: x is old)


def to_torch_state(
    state: PyTree, order: Sequence[Hashable] | None = None
) -> dict[Hashable, dict[str, HostArray]]:
    """Return what `from_torch_state` reads: for each parameter its step and arrays, as NumPy's.

    It goes, as tensors, into the "state" of the `state_dict()` of the torch optimizer. What is
    bfloat16, which torch takes from no NumPy array, is float32: `load_state_dict` casts it.

    Args:
        state: of `adam` or `adagrad`, possibly inside others.
        order: the key that each leaf of the parameters gets; 0, 1, ... by default.

    Raises:
        ValueError: if `state` holds no state or several of these optimizers, or one number for
            each row; or if it is of `deferred`, whose rows may wait.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.to_torch_state(jmask.adagrad(0.1).init(jnp.ones(2)))
        {0: {'step': array(0., dtype=float32), 'sum': array([0., 0.], dtype=float32)}}
    """
    if states_of(DeferredState, state):
        raise ValueError(
            "`state` is of jmask.deferred, where rows wait for the steps that they missed: "
            "give `state.inner` after `params, state = tx.catch_up(params, state)`."
        )
    old, keys = _only_state(state)
    step = np.asarray(old.count, np.float32)
    columns = [jax.tree.leaves(slot) for slot in old[1:]]
    taken = lambda x: np.array(x, jnp.float32 if x.dtype == jnp.bfloat16 else x.dtype)
    numbers = _checked_order(order, len(columns[0]))
    # torch keeps the arrays it is given and writes into them.
    return {
        number: {"step": step.copy(), **dict(zip(keys, map(taken, slots), strict=True))}
        for number, slots in zip(numbers, zip(*columns, strict=True), strict=True)
    }


def _in_numpy(x: PyTree, number: Hashable, key: Hashable) -> HostArray:
    try:
        return np.asarray(x)
    except (TypeError, RuntimeError) as error:  # torch's, of a GPU, of bfloat16
        raise TypeError(
            f"{key!r} of parameter {number!r} of `torch_state` is no array of NumPy: give a "
            f"CPU tensor, x.detach().float().cpu() ({error})"
        ) from error


def _placed_as(like: Argument, x: HostArray) -> jax.Array:
    """Return an array of the dtype of another, on its devices if they were chosen."""
    is_here = isinstance(like, jax.Array) and not isinstance(like, jax.core.Tracer)
    place = like.sharding if is_here and like.committed else None
    # A copy: torch writes into what is its own, and JAX may take memory as it is.
    return jax.device_put(np.array(x, like.dtype), place)


def _only_state(state: PyTree) -> tuple[PyTree, tuple[str, ...]]:
    """Return the state of the optimizer, and the keys of torch for what follows its count."""
    old = only_state(tuple(_KEYS), "state", state, "jmask.adam or jmask.adagrad")
    shapes = [jax.tree.map(jnp.shape, slot) for slot in old[1:]]
    if shapes[0] != shapes[-1]:
        raise ValueError(
            "`state` has one number for each row, as jmask.rowwise_adam's, and torch has no "
            "such optimizer: it must be of jmask.adam or jmask.adagrad."
        )
    return old, _KEYS[type(old)]


def _checked_order(order: Sequence[Hashable] | None, count: int) -> list[Hashable]:
    if order is not None and not isinstance(order, list | tuple | range):
        raise TypeError(f"`order` must be a list, got {type(order).__name__}.")
    numbers = list(range(count) if order is None else order)
    if len(numbers) != count or len(set(numbers)) != count:
        raise ValueError(
            f"`order` must name each of the {count} parameters once, got {numbers}."
        )
    return numbers
