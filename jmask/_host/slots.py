"""Find, allocate and initialise the slots of a transformation for tables on the host.

    params  table (V, 8) of NumPy, w (8,)       state  count (), mu (V, 8), (8,), nu alike
    owners  of the state's leaves               None, table, None, table, None

Nothing of a table's size is made on the device: `tx.init` is evaluated for shapes, for a row or
two, and for blocks of a table where a slot begins with what its rows hold, as averages do.
"""

import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmask._base.array_types import shapes_from
from jmask._base.jaxprs import inlined, origins
from jmask._base.types import HostArray, PyTree, PyTreeDef
from jmask._base.validation import leaf_name
from jmask._deferred.deferred import DeferredState
from jmask._host.host_rows import blocks
from jmask._lazy.checks import NotRowLocalError, is_gradient_leaf
from jmask._lazy.state_rows import rows_of_state, states_of
from jmask._optim.microbatches import holds_gradients
from jmask._tables.rows_at import shape_of
from jmask._tensors.row_sparse import RowSparse, is_row_sparse


def state_on_host(
    tx: optax.GradientTransformation, model: PyTree, directory: str | PathLike[str] | None
) -> tuple[PyTree, list[int | None]]:
    """Return the state that `tx.init` makes, with slots of NumPy leaves on the host.

    With it comes, for each leaf, the number of the parameter whose rows it has, or None.
    """
    params: list[PyTree] = jax.tree.leaves(model)
    tree: PyTreeDef = jax.tree.structure(model)
    is_table = [isinstance(x, np.ndarray) for x in params]
    shapes = [shape_of(x) for x in params]
    state = shapes_from(tx.init, tree.unflatten(shapes))
    _check_takes_rows(tx, state, shapes, is_table, tree)
    owners = [x for x, _ in rows_of_state(tx.init, shapes, is_table, tree, state)]

    def init(tables: dict[int, PyTree]) -> list[PyTree]:
        leaves = [tables.get(i, x) for i, x in enumerate(params)]
        return jax.tree.leaves(tx.init(tree.unflatten(leaves)))

    first = {i: jnp.asarray(x[:2]) for i, x in enumerate(params) if is_table[i]}
    program = inlined(jax.make_jaxpr(init)(first))
    depends = origins(program.jaxpr, [1] * len(first))  # on the values of tables
    # A slot that a batch can have is the same whether `init` sees one row of a table or two.
    leaves, one_row = init(first), init({i: x[:1] for i, x in first.items()})
    for k, (path, _) in enumerate(jax.tree.leaves_with_path(state)):
        name, owner = leaf_name("state", path), owners[k]
        if owner is None:
            x, y = leaves[k], one_row[k]
            is_same = not depends[k] and bool(jnp.all((x == y) | (x != x)))  # or nan
        else:
            row, rows = np.asarray(one_row[k]), np.asarray(leaves[k])
            rows = rows[:1] if depends[k] else rows
            is_same = rows.tobytes() == np.repeat(row, len(rows), 0).tobytes()
        if not is_same:
            raise ValueError(
                f"{name} depends on all rows of a table, or on their number, when it is made, "
                "and a step sees those of a batch: keep the table on the device, jnp.asarray."
            )
        if owner is None:
            continue
        table = params[owner]
        leaves[k] = slot = _new_slot(table, row, directory, f"{k}-{name}")
        # Zeros are not written, so that a file stays sparse.
        for block in blocks(len(slot), table) if depends[k] or any(row.tobytes()) else ():
            new = init({**first, owner: jnp.asarray(table[block])})[k] if depends[k] else row
            slot[block] = np.asarray(new)
    return jax.tree.unflatten(jax.tree.structure(state), leaves), owners


def _new_slot(
    table: HostArray, row: HostArray, directory: str | PathLike[str] | None, name: str
) -> HostArray:
    """Return zeros for each row of a table: in memory, a folder, or near the table's file."""
    shape, stem = (len(table), *row.shape[1:]), re.sub(r"\W+", "-", name).strip("-")
    file = getattr(table, "filename", None)
    if directory is None and file is None:
        return np.zeros(shape, row.dtype)
    path = Path(f"{file}.{stem}.slot" if directory is None else f"{directory}/{stem}.slot")
    path.parent.mkdir(parents=True, exist_ok=True)
    return np.memmap(path, row.dtype, "w+", shape=shape)  # a sparse file


def _check_takes_rows(
    tx: optax.GradientTransformation,
    state: PyTree,
    shapes: Sequence[jax.ShapeDtypeStruct],
    is_table: Sequence[bool],
    tree: PyTreeDef,
) -> None:
    """Refuse a transformation that moves rows without a gradient, or keeps their numbers."""
    lazy = "give jmask.lazy(...), or an optimizer by name, or keep the table on the device"
    if states_of(DeferredState, state):
        raise ValueError(
            "`tx` is jmask.deferred, where rows wait for the steps that they miss, and are "
            f"caught up in turn, by numbers of rows that are not in a step here: {lazy}."
        )
    if holds_gradients(state):
        raise ValueError(
            "`tx` keeps gradients of rows for a later step, as jmask.multi_steps does, by ids "
            "that are positions in one batch: sum them inside a step, with jmask.tree.merge."
        )

    def updates(params: PyTree) -> list[PyTree]:
        ids = jnp.zeros(1, jnp.int32)
        gradients = [
            RowSparse.from_rows(ids, x[:1], x.shape, coalesced=False) if table else x
            for x, table in zip(jax.tree.leaves(params), is_table, strict=True)
        ]
        new = tx.update(tree.unflatten(gradients), tx.init(params), params)[0]
        return jax.tree.leaves(new, is_leaf=is_gradient_leaf)

    small = [
        x.update(shape=(8, *x.shape[1:])) if table else x
        for x, table in zip(shapes, is_table, strict=True)
    ]
    try:
        new = jax.eval_shape(updates, tree.unflatten(small))
    except NotRowLocalError:
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"`tx` takes no row-sparse gradients ({reason}): {lazy}.") from error
    if not all(is_row_sparse(x) for x, table in zip(new, is_table, strict=True) if table):
        raise ValueError(
            f"`tx` makes gradients dense, and moves all rows in each step: {lazy}."
        )
