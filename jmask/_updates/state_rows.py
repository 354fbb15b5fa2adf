"""Find which arrays of an optimizer state hold one entry for each row of a table; check it.

Nothing is known of the optimizer but its `init`. It is evaluated for its shapes alone, with the
number of rows of each table left open:

    tables (rows0, 8) and (rows1, 4)   ->   count (), mu (rows0, 8), (rows1, 4), sum (rows0, 1)
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import optax
from jax import export

from jmask._base.types import OptState, Params, PyTreeDef, Shape, Value
from jmask._base.validation import leaf_name
from jmask._tables.stored_table import shape_of
from jmask._updates.checks import NotRowLocalError

Dimension = Value
"""A size that `jax.export` leaves open: `rows0`, or a multiple of it."""


def open_shapes(
    shapes: Sequence[jax.ShapeDtypeStruct], tables: Sequence[int | None]
) -> tuple[dict[int, Dimension], list[jax.ShapeDtypeStruct]]:
    """Leave open how many rows arrays have along their first axis.

    Args:
        shapes: of whole tables, and of other arrays.
        tables: whose rows each of them has, or None.

    Returns:
        The open number of rows of each table, and the shapes with it.
    """
    rows = _open_rows(tuple(sorted({i for i in tables if i is not None})))
    opened = [
        x if i is None else x.update(shape=(rows[i], *x.shape[1:]))
        for x, i in zip(shapes, tables, strict=True)
    ]
    return rows, opened


@contextlib.contextmanager
def refusing_counts(subject: str) -> Iterator[None]:
    """Context of a trace of open shapes, which fails where code asks for the number of rows."""
    try:
        yield
    except NotRowLocalError:
        raise
    except Exception as error:  # whatever code makes of a number that is not known
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        why = f"{subject} depends on the number of rows ({reason})"
        raise NotRowLocalError(why) from error


@functools.cache
def _open_rows(tables: tuple[int, ...]) -> dict[int, Dimension]:
    """Return an open number of rows for each table, all of one scope.

    They are the same in each call, so that JAX finds what it has traced for these shapes.
    """
    names = ", ".join(f"rows{i}" for i in tables)
    return dict(zip(tables, export.symbolic_shape(names), strict=True)) if tables else {}


def rows_of_state(
    init: optax.TransformInitFn,
    params: list[jax.ShapeDtypeStruct],
    seen: list[jax.ShapeDtypeStruct],
    is_table: list[bool],
    param_tree: PyTreeDef,
    state: optax.OptState,
    dtypes: bool = True,
) -> list[tuple[int | None, Shape]]:
    """Return, for each leaf of the state, the table whose rows it holds, and their shape.

    None where it holds rows of none.

    Args:
        init: of the transformation.
        params: shapes of the leaves of the parameters.
        seen: the same, of stacked tables (M, V, D) as one table (M * V, 1, D).
        is_table: which of them have a sparse or masked gradient.
        param_tree: the structure of the parameters.
        state: the state passed to update.
        dtypes: whether those of `params` are known, and the rows must have the dtypes that
            `init` gives them. All other leaves may get another dtype in a step, as optax
            promotes them.

    Raises:
        ValueError: if the state does not come from `init` for these parameters, or if its
            shapes depend on the tables in another way.
    """
    rows, opened = open_shapes(seen, [i if x else None for i, x in enumerate(is_table)])
    usual = jax.eval_shape(init, param_tree.unflatten(params))
    with refusing_counts("its state"):
        made = jax.eval_shape(init, param_tree.unflatten(opened))
    table_of = {size: i for i, size in rows.items()}
    owners: list[tuple[int | None, Shape]] = []
    for x, y in zip(jax.tree.leaves(usual), jax.tree.leaves(made), strict=True):
        owner = table_of.get(y.shape[0]) if y.ndim else None
        rows_seen = x.shape[:1] if owner is None else seen[owner].shape[:1]
        is_stack = owner is not None and params[owner].shape != seen[owner].shape
        if is_stack and x.size != math.prod(rows_seen + y.shape[1:]):
            raise NotRowLocalError(
                f"its state holds an array of shape {x.shape} for stacked tables, which has "
                "not one entry for each of their rows",
                "Make one table of them, `table.reshape(-1, table.shape[-1])`.",
            )
        wanted = y.shape if owner is None else x.shape[:1] + y.shape[1:]
        if not is_stack and x.shape != wanted:
            raise NotRowLocalError(
                f"its state holds an array of shape {x.shape} that depends on the number of "
                "rows of a table, but has not one entry for each of them"
            )
        owners.append((owner, y.shape[1:]))
    check_state(state, usual, [dtypes and owner is not None for owner, _ in owners])
    return owners


def check_state_type(state: object, expected: type) -> None:
    """Refuse what is no state of a transformation."""
    if not isinstance(state, expected):
        raise TypeError(
            f"`state` must be a {expected.__name__}, which `init` of the transformation makes, "
            f"got {type(state).__name__}. The order is tx.update(grads, opt_state, params)."
        )


def check_state(
    state: OptState, expected: OptState, dtypes: Sequence[bool] | None = None
) -> None:
    """Refuse a state that is not as `init` makes it, naming the first array that differs.

    Args:
        state, expected: of one structure.
        dtypes: of which leaves the dtype is looked at too; of all by default. Rows are written
            in the dtype that their table has: it would go on in that one for ever.
    """
    have: PyTreeDef = jax.tree.structure(state)
    want: PyTreeDef = jax.tree.structure(expected)
    if have != want:
        raise ValueError(
            "`state` was not made by `init` of this transformation for these parameters: "
            f"expected {want}, got {have}."
        )
    likes = jax.tree.leaves(expected)
    leaves = jax.tree.leaves_with_path(state)
    for (path, leaf), like in zip(leaves, likes, strict=True):
        name, shape = leaf_name("state", path), shape_of(leaf).shape
        if shape != like.shape:
            raise ValueError(
                f"{name} has shape {shape}, expected {like.shape} for these parameters."
            )
    for (path, leaf), like, is_checked in zip(
        leaves, likes, dtypes or [True] * len(leaves), strict=True
    ):
        dtype = shape_of(leaf).dtype
        if is_checked and dtype != like.dtype:
            raise ValueError(
                f"{leaf_name('state', path)} is {dtype}, and `init` of this transformation "
                f"makes {like.dtype} for these `params`: keep the dtype (`state_dtype`, "
                "`mu_dtype`) that the state was made with, or cast the state, "
                "jax.tree.map(lambda x, y: x.astype(y.dtype), state, tx.init(params))."
            )


def check_made_by(init: optax.TransformInitFn, state: OptState, params: Params) -> None:
    """Refuse a state that is not as `init` makes it for these parameters."""
    shapes = jax.tree.map(shape_of, params)
    check_state(state, jax.eval_shape(init, shapes))


def states_of(kinds: type | tuple[type, ...], state: OptState) -> list[OptState]:
    """Return the states of transformations of these types that a state holds."""
    is_one = lambda x: isinstance(x, kinds)
    return [x for x in jax.tree.leaves(state, is_leaf=is_one) if is_one(x)]
