"""Optimizer states of torch, in and out: a run goes on where the other library left it.

    torch SparseAdam    exp_avg, exp_avg_sq, step        jmask.adam       mu, nu, count
    torch Adagrad       sum, step                        jmask.adagrad    sum_of_squares, count

Only mappings and arrays are read and written, so torch need not be installed. torch counts
the steps of each parameter, jmask the steps of the optimizer: in full steps they agree.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmask._base.types import HostArray, Key, KeyPath, OptState, PyTree, Shape
from jmask._optim.adam import AdamState
from jmask._optim.named import AdagradState
from jmask._updates.state_rows import states_of

# For each field of a state the key that torch gives it.
_KEYS: dict[type, dict[str, str]] = {
    AdamState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
    AdagradState: {"sum_of_squares": "sum"},
}


def from_torch_state(
    state: OptState, torch_state: Mapping[Key, PyTree], order: Sequence[Key] | None = None
) -> OptState:
    """Return the state of `adam` or `adagrad` with the numbers of a torch optimizer.

    Args:
        state: from `tx.init(params)`; the state of the optimizer may stand inside others, as
            of `optax.chain` or `jmask.skip_nonfinite`.
        torch_state: `optimizer.state_dict()`, or the "state" in it: for each parameter, by
            its number, a mapping of arrays or CPU tensors.
        order: for each leaf of the parameters, in the order of `jax.tree.leaves`, its key in
            `torch_state`, which may have more. By default 0, 1, ..., where these are all keys
            and no two parameters have one shape: torch numbers parameters as a module names
            them, and `jax.tree.leaves` sorts the keys of a dict.

    Returns:
        The state, dtypes kept.

    Raises:
        TypeError: if `torch_state` is no mapping of mappings of arrays.
        ValueError: if `state` holds no state or several of these optimizers, a parameter or an
            array is missing or too many (as with `amsgrad`), shapes differ, `order` is needed,
            steps are no counts, or the parameters took different numbers of them.

    Example:
        >>> import jax.numpy as jnp, numpy as np, jmask
        >>> tx, params = jmask.adagrad(0.1), {"t": jnp.ones((3, 1))}
        >>> of_torch = {0: {"step": 7, "sum": np.full((3, 1), 2.)}}
        >>> state = jmask.from_torch_state(tx.init(params), of_torch)
        >>> state.count, state.sum_of_squares["t"].ravel()
        (Array(7, dtype=int32), Array([2., 2., 2.], dtype=float32))
    """
    optimizer_state, keys = _only_state(state)
    torch_state = _checked_mapping(torch_state)
    paths = jax.tree.leaves_with_path(optimizer_state[1])
    numbers = _checked_order(order, len(paths))
    if order is None:
        _check_unambiguous(torch_state, [(jnp.shape(x), path) for path, x in paths])
    missing = [number for number in numbers if number not in torch_state]
    if missing:
        raise ValueError(
            f"`torch_state` has no parameter {missing[0]!r}, only {list(torch_state)}: say "
            "which is which by `order`."
        )
    for number in numbers:
        unknown = sorted(set(map(str, torch_state[number])) - {"step", *keys.values()})
        if unknown:
            raise ValueError(
                f"parameter {number!r} of `torch_state` has {unknown[0]!r}, which `state` has "
                "no place for: is it of another optimizer, or of one with `amsgrad`?"
            )
    steps = {number: _steps(torch_state[number], number) for number in numbers}
    if len(set(steps.values())) > 1:
        raise ValueError(
            f"the parameters of `torch_state` took different numbers of steps, {steps}, and "
            "jmask counts those of the optimizer: convert them separately."
        )

    def loaded(key: str, slot: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(slot)
        arrays = []
        for number, (path, _), old in zip(numbers, paths, leaves, strict=True):
            array = _array(torch_state[number], key, number)
            if array.shape != old.shape:
                raise ValueError(
                    f"{key!r} of parameter {number!r} in `torch_state` has shape "
                    f"{array.shape}, but params{jax.tree_util.keystr(path)} needs {old.shape}."
                )
            arrays.append(jnp.asarray(array, old.dtype))
        return jax.tree.unflatten(structure, arrays)

    fields = {
        field: loaded(key, getattr(optimizer_state, field)) for field, key in keys.items()
    }
    # torch counts the steps of each parameter, jmask those of the optimizer: all are equal by
    # now, and an optimizer without parameters has taken none.
    count = jnp.asarray(max(steps.values(), default=0), optimizer_state.count.dtype)
    new = optimizer_state._replace(count=count, **fields)
    return jax.tree.map(
        lambda x: new if x is optimizer_state else x,
        state,
        is_leaf=lambda x: x is optimizer_state,
    )


def to_torch_state(
    state: OptState, order: Sequence[Key] | None = None
) -> dict[Key, dict[str, HostArray]]:
    """Return what `from_torch_state` reads: for each parameter its step and arrays, as NumPy's.

    To load it, put it into a state_dict of the torch optimizer:

        whole = optimizer.state_dict()
        whole["state"] = {
            i: {k: torch.as_tensor(v) for k, v in x.items()}
            for i, x in jmask.to_torch_state(state).items()
        }
        optimizer.load_state_dict(whole)

    Args:
        state: of `adam` or `adagrad`, possibly inside others.
        order: the key that each leaf of the parameters gets; 0, 1, ... by default.

    Raises:
        ValueError: if `state` holds no state or several of these optimizers.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.to_torch_state(jmask.adagrad(0.1).init(jnp.ones(2)))
        {0: {'step': array(0., dtype=float32), 'sum': array([0., 0.], dtype=float32)}}
    """
    optimizer_state, keys = _only_state(state)
    columns = {
        key: jax.tree.leaves(getattr(optimizer_state, field)) for field, key in keys.items()
    }
    numbers = _checked_order(order, len(next(iter(columns.values()))))
    return {
        number: {
            "step": np.asarray(optimizer_state.count, np.float32),
            # torch keeps the arrays it is given and writes into them.
            **{key: np.array(leaves[i]) for key, leaves in columns.items()},
        }
        for i, number in enumerate(numbers)
    }


def _only_state(state: OptState) -> tuple[OptState, dict[str, str]]:
    """Return the state of the optimizer, and for each of its fields the key of torch."""
    states = states_of(tuple(_KEYS), state)
    if len(states) != 1:
        raise ValueError(
            f"`state` must hold one state of jmask.adam or jmask.adagrad, found {len(states)} "
            f"in {jax.tree.structure(state)}."
        )
    keys = _KEYS[type(states[0])]
    shapes = [list(map(jnp.shape, jax.tree.leaves(getattr(states[0], x)))) for x in keys]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            "`state` has one number for each row, as jmask.rowwise_adam's, and torch has no "
            "such optimizer: it must be of jmask.adam or jmask.adagrad."
        )
    return states[0], keys


def _checked_order(order: Sequence[Key] | None, count: int) -> list[Key]:
    if order is not None and not isinstance(order, list | tuple | range):
        raise TypeError(f"`order` must be a list, got {type(order).__name__}.")
    numbers = list(range(count) if order is None else order)
    if len(numbers) != count or len(set(numbers)) != count:
        raise ValueError(
            f"`order` must name each of the {count} parameters once, got {numbers}."
        )
    return numbers


def _checked_mapping(torch_state: object) -> Mapping[Key, PyTree]:
    if isinstance(torch_state, Mapping):
        # A whole state_dict has its numbers under "state", beside "param_groups".
        states = torch_state.get("state", torch_state)
        if isinstance(states, Mapping) and all(isinstance(x, Mapping) for x in states.values()):
            return states
    raise TypeError(
        "`torch_state` must be `optimizer.state_dict()`, or the mapping from numbers of "
        f"parameters to mappings of arrays in it, got {type(torch_state).__name__}."
    )


def _check_unambiguous(
    torch_state: Mapping[Key, PyTree], leaves: Sequence[tuple[Shape, KeyPath]]
) -> None:
    """Refuse to go by numbers where parameters may be taken for each other."""
    if len(torch_state) > len(leaves):
        raise ValueError(
            f"`torch_state` has {len(torch_state)} parameters, {list(torch_state)}, and the "
            f"optimizer {len(leaves)}: say by `order` which are meant."
        )
    first: dict[Shape, KeyPath] = {}
    for shape, path in leaves:
        # Parameters of different shapes cannot be taken for each other: shapes are checked
        # later.
        if first.setdefault(shape, path) is not path:
            names = [f"params{jax.tree_util.keystr(x)}" for x in (first[shape], path)]
            raise ValueError(
                f"`order` must be given: {names[0]} and {names[1]} both have shape {shape}, "
                "and torch numbers parameters in its own order. List the number of each leaf, "
                "in the order of jax.tree.leaves(params)."
            )


def _steps(entries: Mapping[str, ArrayLike], number: object) -> int:
    step = _array(entries, "step", number)
    is_number = not step.ndim and step.dtype.kind in "iuf" and np.isfinite(step)
    if not is_number or step < 0 or step != np.floor(step):
        raise ValueError(
            f"'step' of parameter {number!r} in `torch_state` must be a number of steps, got "
            f"{entries['step']!r}."
        )
    return int(step)


def _array(entries: Mapping[str, ArrayLike], key: str, number: object) -> HostArray:
    if key not in entries:
        raise ValueError(
            f"parameter {number!r} of `torch_state` has no {key!r}, only {list(entries)}: is "
            "it of another optimizer?"
        )
    array = np.asarray(entries[key])
    if array.dtype.kind not in "iuf" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{key!r} of parameter {number!r} in `torch_state` must be an array of real "
            f"numbers, got {type(entries[key]).__name__} of {array.dtype}."
        )
    return array
