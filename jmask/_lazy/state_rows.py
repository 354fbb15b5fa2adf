"""Find which arrays of an optimizer state hold one entry for each row of a table; check it.

Nothing is known of the optimizer but its `init`. It is evaluated for its shapes alone, with the
number of rows of each table left open:

    tables (rows0, 8) and (rows1, 4)   ->   count (), mu (rows0, 8), (rows1, 4), sum (rows0, 1)
"""

import math
from collections.abc import Iterator, Sequence

import jax
import optax
from jax import export

from jmask._base.array_types import shapes_from
from jmask._base.types import PyTree, PyTreeDef, Shape
from jmask._base.validation import abstract_leaf, is_on_host, leaf_name, not_on_device
from jmask._lazy.checks import ORDER, NotRowLocalError
from jmask._lazy.open_rows import open_shapes, traced_open
from jmask._tables.rows_at import shape_of

_ANOTHER_STATE = "it keeps another state for a table of this size"


def rows_of_state(
    init: optax.TransformInitFn,
    params: list[jax.ShapeDtypeStruct],
    is_table: list[bool],
    param_tree: PyTreeDef,
    state: PyTree,
    *,
    as_tables: list[jax.ShapeDtypeStruct] | None = None,
    dtypes: bool = True,
) -> list[tuple[int | None, Shape]]:
    """Return, for each leaf of the state, the table whose rows it holds, or None; their shape.

    Args:
        params: shapes of the leaves of the parameters.
        is_table: which of them have a sparse or masked gradient.
        as_tables: their shapes, of stacked tables (M, V, D) as one table (M * V, 1, D).
        dtypes: whether the dtypes of `params` are known; then rows must have the dtypes that
            `init` gives them. All other leaves may get another dtype in a step, as optax
            promotes them.
    """
    as_tables = params if as_tables is None else as_tables
    rows, opened = open_shapes(as_tables, [i if x else None for i, x in enumerate(is_table)])

    with traced_open("its state"):
        made = shapes_from(init, param_tree.unflatten(opened))
    expected = shapes_from(init, param_tree.unflatten(params))
    structures: list[PyTreeDef] = [jax.tree.structure(x) for x in (made, expected)]
    if structures[0] != structures[1]:
        raise NotRowLocalError(_ANOTHER_STATE)
    table_of = {size: i for i, size in rows.items()}
    owners: list[tuple[int | None, Shape]] = []
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        owner = table_of.get(x.shape[0]) if x.ndim else None
        row = x.shape if owner is None else x.shape[1:]
        if any(map(export.is_symbolic_dim, row)):
            raise NotRowLocalError(
                f"its state holds an array of shape {x.shape} that depends on the number of "
                "rows of a table, but has not one entry for each of them"
            )
        if owner is not None and y.size != math.prod((*as_tables[owner].shape[:1], *row)):
            if as_tables[owner].shape == params[owner].shape:
                raise NotRowLocalError(_ANOTHER_STATE)
            raise NotRowLocalError(
                f"its state holds an array of shape {y.shape} for stacked tables, which has "
                "not one entry for each of their rows",
                "Make one table of them, `table.reshape(-1, table.shape[-1])`.",
            )
        owners.append((owner, x.shape[1:]))
    check_state(state, expected, [dtypes and owner is not None for owner, _ in owners])
    return owners


def check_state_type(
    state: object, expected: type, advice: str = f"The order is {ORDER}."
) -> None:
    """Refuse what is no state of a transformation."""
    if not isinstance(state, expected):
        raise TypeError(
            f"`state` must be a {expected.__name__}, which `init` of the transformation makes, "
            f"got {type(state).__name__}. {advice}"
        )


def check_state(state: PyTree, expected: PyTree, dtypes: Sequence[bool]) -> None:
    """Refuse a state that is not as `init` makes it, naming the first array that differs.

    Args:
        dtypes: of which leaves the dtype is looked at, too. Rows are written in the dtype that
            their table has: it would go on in that one for ever.
    """
    have: PyTreeDef = jax.tree.structure(state)
    want: PyTreeDef = jax.tree.structure(expected)
    if have != want:
        raise ValueError(
            "`state` was not made by `init` of this transformation for these parameters: "
            f"expected {want}, got {have}."
        )
    leaves = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True)
    for ((path, leaf), like), has_dtype in zip(leaves, dtypes, strict=True):
        name, x = leaf_name("state", path), shape_of(leaf)
        if is_on_host(abstract_leaf(leaf)):
            raise not_on_device(name)
        if x.shape != like.shape:
            raise ValueError(
                f"{name} has shape {x.shape}, expected {like.shape} for these parameters."
            )
        if has_dtype and x.dtype != like.dtype:
            raise ValueError(
                f"{name} is {x.dtype}, and `init` of this transformation makes "
                f"{like.dtype} for these `params`: keep the dtype (`state_dtype`, `mu_dtype`) "
                "that the state was made with, or cast the state, "
                "jax.tree.map(lambda x, y: x.astype(y.dtype), state, tx.init(params))."
            )


def check_made_by(
    init: optax.TransformInitFn, state: PyTree, params: PyTree, *, dtypes: bool = True
) -> None:
    """Refuse a state that is not as `init` makes it for these parameters, if they are given."""
    if params is not None:
        expected = shapes_from(init, jax.tree.map(shape_of, params))
        check_state(state, expected, [dtypes] * len(jax.tree.leaves(expected)))


# What transformations hold back until a later step, by their states, and what to do instead. A
# row held back need not be among the rows that the later step touches: it would be lost.
_ACCUMULATE = "Use jmask.multi_steps(...), or jmask.tree.add and one update."
_HELD_BACK: dict[type, tuple[str, str]] = {
    optax.MultiStepsState: ("gradients", _ACCUMULATE),
    optax.ApplyEvery: ("gradients", _ACCUMULATE),
    optax.contrib.SAMState: (
        "the way back from where it takes the second gradient",
        "Take both gradients in one step, of the same rows, and give the second to jmask.lazy.",
    ),
    optax.LookaheadState: (
        "slow parameters",
        "Use jmask.densify() before it, or jmask.ema for averages of parameters.",
    ),
}


def check_nothing_held_back(state: PyTree) -> None:
    """Refuse the states of transformations that keep something of a row for a later step."""
    for kind, what, remedy in held_back(state):
        raise NotRowLocalError(
            f"{kind} holds {what} back for a later step, and a row that is not among those "
            "touched then would lose them",
            remedy,
        )


def held_back(state: PyTree) -> Iterator[tuple[str, str, str]]:
    """Yield the kinds of state that hold something back, what, and what to do instead."""
    for node in states_of(tuple(_HELD_BACK), state):
        what, remedy = next(x for kind, x in _HELD_BACK.items() if isinstance(node, kind))
        yield type(node).__name__, what, remedy


def states_of(kinds: type | tuple[type, ...], state: PyTree) -> list[PyTree]:
    """Return the states of transformations of these types that a state holds."""
    is_one = lambda x: isinstance(x, kinds)
    return [x for x in jax.tree.leaves(state, is_leaf=is_one) if is_one(x)]


def only_state(kinds: type | tuple[type, ...], name: str, state: PyTree, makers: str) -> PyTree:
    """Return the one state of these types that the argument `name`, or a chain in it, holds."""
    states = states_of(kinds, state)
    if len(states) != 1:
        raise ValueError(
            f"`{name}` must hold one state of {makers}, and holds {len(states)}: pass the "
            "state of the chain that it is part of."
        )
    return states[0]
