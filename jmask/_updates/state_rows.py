"""Find which arrays of an optimizer state hold one entry for each row of a table.

Nothing is known of the optimizer but its `init`. It is evaluated for its shapes alone, once
for the parameters as they are and once with more rows in each table:

    tables of 1000 and 500 rows     ->  count (), mu (1000, 8), (500, 4), sum (1000, 1)
    3 rows more and 4 rows more     ->  count (), mu (1003, 8), (504, 4), sum (1003, 1)

The arrays that grew by 3 belong to the first table, those that grew by 4 to the second.
"""

from typing import Any

import jax
import optax

from jmask._base.types import OptState, PyTreeDef
from jmask._tables.stored_table import is_stored_table, shape_of
from jmask._updates.checks import NotRowLocalError


def tables_of_state(
    inner: optax.GradientTransformation,
    params: list[jax.ShapeDtypeStruct],
    is_table: list[bool],
    param_tree: PyTreeDef,
    state: optax.OptState,
    dtypes: bool = True,
) -> list[int | None]:
    """Return, for each leaf of the state, the table whose rows it holds.

    Args:
        inner: the transformation, for its `init`.
        params: shapes of the leaves of the parameters.
        is_table: which of them have a sparse or masked gradient.
        param_tree: the structure of the parameters.
        state: the state passed to update.
        dtypes: whether those of `params` are known, and the rows must have the dtypes that
            `init` gives them. All other leaves may get another dtype in a step, as optax
            promotes them.

    Returns:
        For each leaf of the state the position of a table in `params`, or None.

    Raises:
        ValueError: if the state does not come from `inner.init` for these parameters, or if
            its shapes depend on the tables in another way.
    """
    # Numbers of extra rows of which none is a multiple of another or a sum of others: what
    # grows by one of them has one entry for each row of that table.
    base = sum(is_table) + 1
    tables = [i for i, table in enumerate(is_table) if table]
    extra = {position: base + k for k, position in enumerate(tables)}
    grown = list(params)
    for i, rows in extra.items():
        x = params[i]
        grown[i] = jax.ShapeDtypeStruct((x.shape[0] + rows, *x.shape[1:]), x.dtype)
    usual, larger = (
        jax.eval_shape(inner.init, param_tree.unflatten(leaves)) for leaves in (params, grown)
    )
    check_state(state, usual)
    tables_by_growth = {rows: position for position, rows in extra.items()}
    owners = [
        _owner(x.shape, y.shape, tables_by_growth)
        for x, y in zip(jax.tree.leaves(usual), jax.tree.leaves(larger), strict=True)
    ]
    if dtypes:
        check_dtypes(state, usual, [owner is not None for owner in owners])
    return owners


def _owner(
    shape: tuple[int, ...], grown: tuple[int, ...], owners: dict[int, int]
) -> int | None:
    if shape == grown:
        return None
    growth = grown[0] - shape[0] if len(shape) == len(grown) else None
    if shape[1:] == grown[1:] and growth in owners:
        return owners[growth]
    raise NotRowLocalError(
        f"its state holds an array of shape {shape} that depends on the number of rows of "
        "a table, but has not one entry for each of them"
    )


def check_state_type(state: object, expected: type) -> None:
    """Refuse what is no state of a transformation.

    Raises:
        TypeError: with what it is.
    """
    if not isinstance(state, expected):
        raise TypeError(
            f"`state` must be a {expected.__name__}, which `init` of the transformation makes, "
            f"got {type(state).__name__}. The order is tx.update(grads, opt_state, params)."
        )


def check_dtypes(state: OptState, expected: OptState, which: list[bool] | None = None) -> None:
    """Refuse a state whose arrays have other dtypes than `init` gives them, naming the first.

    Rows are written in the dtype that their table has: it would go on in that one for ever.

    Args:
        state, expected: of one structure, but for stored tables.
        which: the leaves to look at; all by default.
    """
    leaves = jax.tree.leaves_with_path(state, is_leaf=is_stored_table)
    likes = jax.tree.leaves(expected, is_leaf=is_stored_table)
    for (path, x), like, is_checked in zip(
        leaves, likes, which or [True] * len(leaves), strict=True
    ):
        dtypes = shape_of(x).dtype, shape_of(like).dtype
        if is_checked and dtypes[0] != dtypes[1]:
            raise ValueError(
                f"`state{jax.tree_util.keystr(path)}` is {dtypes[0]}, and `init` of this "
                f"transformation makes {dtypes[1]} for these `params`: keep the dtype "
                "(`state_dtype`, `mu_dtype`) that the state was made with, or cast the state, "
                "jax.tree.map(lambda x, y: x.astype(y.dtype), state, tx.init(params))."
            )


def check_state(state: optax.OptState, expected: optax.OptState) -> None:
    """Refuse a state whose structure or shapes are not those expected, naming the first."""
    have: Any = jax.tree.structure(state, is_leaf=is_stored_table)
    want: Any = jax.tree.structure(expected)
    if have != want:
        raise ValueError(
            "`state` was not made by `init` of this transformation for these parameters: "
            f"expected {want}, got {have}."
        )
    for (path, leaf), shaped in zip(
        jax.tree.leaves_with_path(state, is_leaf=is_stored_table),
        jax.tree.leaves(expected),
        strict=True,
    ):
        shape = shape_of(leaf).shape
        if is_stored_table(leaf) and len(shape) != len(shaped.shape):
            table = type(leaf).__name__
            raise ValueError(
                f"`state{jax.tree_util.keystr(path)}` is kept as an array of shape "
                f"{shaped.shape} for each parameter, and the state of a {table} has rows: make "
                "the table an array, `table.todense()`, or use an optimizer whose state has "
                "the shape of its parameters."
            )
        if shape != shaped.shape:
            raise ValueError(
                f"`state{jax.tree_util.keystr(path)}` has shape {shape}, "
                f"expected {shaped.shape} for these parameters."
            )
