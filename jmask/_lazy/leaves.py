"""Describe the leaves of one lazy update: which of them hold rows of which table.

    gradient of a table       RowSparse, coalesced
    its parameter and state   arrays with one row per table row, gathered by its ids
    everything else           as it is

`lazy` makes one `LazyCall` for each call of `update`. Stacked tables become one table before.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jmask._base.types import Gradients, OptState, PyTree, Table, TensorLike, Value
from jmask._kernels.rows import ids_after_reading
from jmask._lazy.psum_over_shards import Axes, axes_of_rows
from jmask._tables.stored_table import RowsAt, StoredTable, fitted, is_stored_table, shape_of
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import stored_values
from jmask._updates.checks import (
    NotRowLocalError,
    gradient_and_valid,
    is_gradient_leaf,
    keep_valid,
    unchanged_where_masked,
)
from jmask._updates.state_rows import tables_of_state


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the gradient, the state, the parameters or the extra arguments.

    Attributes:
        value: an array or a table; of a gradient, an array or a coalesced `RowSparse`.
        kind: which of these trees it is of.
        table: the position of the `RowSparse` gradient of its table, or None: no rows of it
            are gathered.
        valid: the valid entries of the gradient that it belongs to, if that is masked.
        uncoalesced: a gradient as it came, before equal ids were summed.
    """

    value: Table
    kind: Literal["gradient", "state", "param", "extra"]
    table: int | None = None
    valid: jax.Array | None = None
    uncoalesced: Any = None


@dataclasses.dataclass(frozen=True)
class LazyCall:
    """The arguments of one `update`.

    Attributes:
        inner: the transformation.
        leaves: of the gradient, then of the state, of the parameters if they were given, and
            of the arrays among extra arguments. So leaf i of gradient and state is what output
            i of the update replaces.
        trees: structures of gradient, state, parameters and extra arguments.
        others: extra arguments that are no arrays, by their position among all.
    """

    inner: optax.GradientTransformationExtraArgs
    leaves: list[Leaf]
    trees: tuple[Any, Any, Any, Any]
    others: dict[int, Any]

    @classmethod
    def of(
        cls,
        inner: optax.GradientTransformationExtraArgs,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        extra_args: dict[str, Any],
    ) -> "LazyCall":
        uncoalesced, gradient_tree = jax.tree.flatten(updates, is_leaf=is_gradient_leaf)
        states, state_tree = jax.tree.flatten(state, is_leaf=is_stored_table)
        param_leaves, param_tree = jax.tree.flatten(params, is_leaf=is_stored_table)
        for i, param in enumerate(param_leaves):
            if is_stored_table(param):
                uncoalesced[i] = fitted(param, uncoalesced[i])
        pairs = [gradient_and_valid(x) for x in uncoalesced]
        gradients, valid = [x for x, _ in pairs], [x for _, x in pairs]
        # Without parameters the gradient has their structure and shapes.
        like = gradients if params is None else param_leaves
        owners = tables_of_state(
            inner,
            list(map(shape_of, like)),
            list(map(is_gradient_leaf, uncoalesced)),
            gradient_tree,
            state,
            dtypes=params is not None,
        )
        for owner, x in zip(owners, states, strict=True):
            if owner is not None and is_stored_table(x):
                gradients[owner] = fitted(x, uncoalesced[owner])
        tables = [i if is_row_sparse(g) else None for i, g in enumerate(gradients)]
        leaves = [
            Leaf(gradient, "gradient", table, mask, x)
            for gradient, table, mask, x in zip(
                gradients, tables, valid, uncoalesced, strict=True
            )
        ]
        for owner, x in zip(owners, states, strict=True):
            of = (None, None) if owner is None else (tables[owner], valid[owner])
            leaves.append(Leaf(x, "state", *of))
        leaves += [Leaf(x, "param", i) for x, i in zip(param_leaves, tables, strict=False)]
        extra, extra_tree = jax.tree.flatten(extra_args)
        others = {i: x for i, x in enumerate(extra) if not hasattr(x, "__array__")}
        leaves += [Leaf(x, "extra") for i, x in enumerate(extra) if i not in others]
        return cls(inner, leaves, (gradient_tree, state_tree, param_tree, extra_tree), others)

    def of_kind(self, kind: str) -> list[Leaf]:
        """Return the leaves of one of the trees."""
        return [leaf for leaf in self.leaves if leaf.kind == kind]

    def has_rows(self) -> bool:
        """Decide whether `inner` is to run on rows; on whole arrays any `inner` is exact."""
        return any(leaf.table is not None for leaf in self.of_kind("gradient"))

    def signature(self) -> Any:
        """Return what row-locality depends on: structures, shapes and dtypes.

        None if it may depend on more: an extra argument that is no array (a flag, a function)
        may choose what Python runs.
        """
        if self.others:
            return None
        values = [leaf.value for leaf in self.leaves]
        return (
            self.trees,
            tuple(x.nse for x in values if is_row_sparse(x)),
            tuple((x.shape, x.dtype) for x in map(shape_of, values)),
        )

    def run_flat(self) -> Callable[..., list[Any]]:
        """Return `inner.update` from leaves to updates and state, all flat."""
        gradient_tree, state_tree, param_tree, extra_tree = self.trees
        first, second, third, _ = itertools.accumulate(tree.num_leaves for tree in self.trees)

        def run(*inputs: Any) -> list[Any]:
            arrays = iter(inputs[third:])
            extra = [
                self.others[i] if i in self.others else next(arrays)
                for i in range(extra_tree.num_leaves)
            ]
            updates, new_state = self.inner.update(
                gradient_tree.unflatten(inputs[:first]),
                state_tree.unflatten(inputs[first:second]),
                param_tree.unflatten(inputs[second:third]),
                **extra_tree.unflatten(extra),
            )
            for name, tree, expected in (
                ("updates", updates, gradient_tree),
                ("state", new_state, state_tree),
            ):
                if jax.tree.structure(tree) != expected:
                    raise NotRowLocalError(f"update changes the structure of its {name}")
            return [*jax.tree.leaves(updates), *jax.tree.leaves(new_state)]

        return run

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the leaves, of whole tables."""
        return [shape_of_leaf(leaf.value) for leaf in self.leaves]

    def shapes_of_rows(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the leaves, of tables of the rows that the gradient has."""
        shapes = []
        for leaf, x in zip(self.leaves, self.shapes(), strict=True):
            if leaf.table is not None:
                rows = self.leaves[leaf.table].value.nse
                if rows == 0 < x.shape[0]:
                    # On no rows JAX leaves operations out: trace with some, and not with as
                    # many as the table has.
                    rows = 2 if x.shape[0] == 1 else 1
                x = x.update(shape=(rows, *x.shape[1:]))
            shapes.append(x)
        return shapes

    def sharded_axes(self) -> dict[int, Axes]:
        """Return the axes of a `shard_map` for each table whose rows are sharded over them."""
        axes = {i: axes_of_rows(leaf.value) for i, leaf in enumerate(self.of_kind("gradient"))}
        return {table: names for table, names in axes.items() if names}

    def update(
        self,
        on_rows: Callable[..., list[Any]],
        unordered: Mapping[int, int],
    ) -> tuple[Any, Any]:
        """Return updates and state.

        Args:
            on_rows: `run_flat`, or the same program for rows.
            unordered: for each output that is written to rows it does not depend on, the leaf
                that has these rows.
        """
        rows = [self._rows(leaf) for leaf in self.leaves]
        outputs = on_rows(*rows)
        results = [
            self._result(leaf, old, new, rows[unordered[i]] if i in unordered else None)
            for i, (leaf, old, new) in enumerate(zip(self.leaves, rows, outputs, strict=False))
        ]
        gradient_tree, state_tree, *_ = self.trees
        count = gradient_tree.num_leaves
        return gradient_tree.unflatten(results[:count]), state_tree.unflatten(results[count:])

    def _rows(self, leaf: Leaf) -> Any:
        if leaf.kind == "gradient":
            return stored_values(leaf.value)
        if leaf.table is None:
            return leaf.value
        return RowsAt.of(leaf.value, self._gradient(leaf)).read(leaf.value)

    def _gradient(self, leaf: Leaf) -> RowSparse:
        assert leaf.table is not None
        return self.leaves[leaf.table].value

    def _result(self, leaf: Leaf, old: Value, new: Value, read: Value) -> Any:
        """Return the update or the new state, from rows `old` that became `new`.

        Args:
            leaf: what is updated.
            old, new: its rows.
            read: rows at the place to be written that nothing else orders before the write.
        """
        if leaf.table is not None and not self._gradient(leaf).nse:
            new = new[:0]  # the program had a row in the place of none
        if leaf.kind == "gradient":
            new = unchanged_where_masked(new, leaf.valid)
            if leaf.table is None:
                return new
            return _after(leaf.value, read).with_values(new)
        new = keep_valid(new, old, leaf.valid)
        if leaf.table is None:
            return new
        gradient = self._gradient(leaf)
        return RowsAt.of(leaf.value, _after(gradient, read)).write(leaf.value, new)


def _after(gradient: RowSparse, read: jax.Array) -> RowSparse:
    """Return the gradient with ids that XLA knows only after rows were read."""
    if read is None or type(gradient) is not RowSparse:
        return gradient
    ids = ids_after_reading(gradient.row_ids(), read)
    return RowSparse.from_rows(
        ids, gradient.values, gradient.shape, coalesced=gradient.coalesced
    )


def shape_of_leaf(x: TensorLike) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf, and whether the dtype is weak."""
    shape = shape_of(x)
    weak = not isinstance(x, RowSparse | StoredTable) and jax.typeof(x).weak_type
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=weak)


# --- gradients of stacked tables ---------------------------------------------------------
#
#     gradient   RowSparse (M, V, D), leading=2        x.flat(), of shape (M * V, D)
#     parameter  (M, V, D)                             reshaped to (M * V, D)
#     state      of `init` for (M, V, D)               reshaped to `init` for (M * V, D)
#
# Stacked tables are one table of M * V rows, and a reshape moves nothing. The results of the
# step get the old shapes again.


def is_stacked(x: Any) -> bool:
    """Decide whether `x` is the row-sparse gradient of stacked tables."""
    return is_row_sparse(x) and x.leading > 1


def has_stacked(updates: Gradients) -> bool:
    """Decide whether some gradients are of stacked tables."""
    return any(map(is_stacked, jax.tree.leaves(updates, is_leaf=is_gradient_leaf)))


def stacked_step(
    init: Callable[[Any], Any],
    run: Callable[..., tuple[Any, Any]],
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
) -> tuple[Any, optax.OptState]:
    """Run a step on the tables (M * V, *row) that stacked tables are.

    Args:
        init: of the transformation.
        run: (gradients, state, params) -> (updates or new parameters, state).
        updates, state, params: of the step; the parameters may be None.

    Raises:
        ValueError: if the state has one entry for each of the M tables: what is computed for
            a row has none of its own then.
    """
    tree: Any = jax.tree.structure(updates, is_leaf=is_gradient_leaf)
    gradients = jax.tree.leaves(updates, is_leaf=is_gradient_leaf)
    leaves = gradients if params is None else tree.flatten_up_to(params)
    shapes = list(map(shape_of, leaves))
    flat = [
        jax.ShapeDtypeStruct(g.flat().shape, x.dtype) if is_stacked(g) else x
        for g, x in zip(gradients, shapes, strict=True)
    ]
    usual, wanted = (jax.eval_shape(init, tree.unflatten(x)) for x in (shapes, flat))
    if params is not None:
        params = tree.unflatten(
            jnp.reshape(x, shape.shape) if is_stacked(g) and not is_stored_table(x) else x
            for x, g, shape in zip(leaves, gradients, flat, strict=True)
        )
    results, new_state = run(
        tree.unflatten([g.flat() if is_stacked(g) else g for g in gradients]),
        _state_as(state, usual, wanted),
        params,
    )
    restored = [
        x.stacked_as(g) if is_row_sparse(x) else jnp.reshape(x, g.shape) if is_stacked(g) else x
        for x, g in zip(tree.flatten_up_to(results), gradients, strict=True)
    ]
    return tree.unflatten(restored), _state_as(new_state, wanted, usual)


def _state_as(state: OptState, old: PyTree, new: PyTree) -> OptState:
    """Return the state with each array that has a shape of `old` in the shape of `new`."""
    old, new = ([x.shape for x in jax.tree.leaves(shapes)] for shapes in (old, new))
    leaves: Any = jax.tree.leaves(state, is_leaf=is_stored_table)
    tree: Any = jax.tree.structure(state, is_leaf=is_stored_table)
    if len(leaves) != len(old):  # not the state of `init`, as `run` will say
        return state
    moved = []
    for x, before, after in zip(leaves, old, new, strict=True):
        if before != after and jnp.size(x) != jax.ShapeDtypeStruct(after, jnp.int32).size:
            raise ValueError(
                f"`state` holds an array of shape {before} for stacked tables, one entry for "
                "each table and none for each of its rows: make one table of them, "
                "`table.reshape(-1, table.shape[-1])`, and number its rows."
            )
        moved.append(x if before == after or jnp.shape(x) != before else jnp.reshape(x, after))
    return tree.unflatten(moved)
