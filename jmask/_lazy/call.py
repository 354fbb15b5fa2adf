"""The arguments of one lazy update: what is rows of which table, and the update on rows.

    gradient of a table       RowSparse, coalesced
    its parameter and state   arrays with one row per table row, gathered by its ids
    everything else           as it is

`lazy` makes one of these for each call; see there for what it is to do.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import optax

from jmask._kernels.rows import ids_after_reading
from jmask._lazy.spread_sums import Axes, axes_of_rows
from jmask._lazy.state_rows import tables_of_state
from jmask._tables.stored_table import (
    StoredTable,
    fitted,
    is_stored_table,
    rows_of,
    shape_of,
    with_rows,
)
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import stored_values
from jmask._updates.checks import (
    NotRowLocalError,
    gradient_and_valid,
    is_gradient_leaf,
    keep_valid,
    unchanged_where_masked,
)


@dataclasses.dataclass(frozen=True)
class LazyCall:
    """The arguments of one `update`, flat, and which of their leaves hold rows.

    Attributes:
        gradients: leaves of the gradient, arrays or coalesced `RowSparse`.
        given: the same leaves as they came.
        valid: for each gradient its valid entries if it is masked, or None.
        params: leaves of the parameters, none if they were not given.
        trees: structures of gradient, state and parameters.
        owners: for each leaf of the state the position in `gradients` of the sparse or
            masked gradient whose parameter it belongs to, or None.
        gradient_tables, state_tables, param_tables: for each leaf the position in
            `gradients` of the `RowSparse` whose rows are gathered from it, or None.
    """

    inner: optax.GradientTransformationExtraArgs
    gradients: list[Any]
    given: list[Any]
    valid: list[jax.Array | None]
    state: list[Any]
    params: list[Any]
    trees: tuple[Any, Any, Any]
    owners: list[int | None]
    gradient_tables: list[int | None]
    state_tables: list[int | None]
    param_tables: list[int | None]

    @classmethod
    def of(
        cls,
        inner: optax.GradientTransformationExtraArgs,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
    ) -> "LazyCall":
        leaves, gradient_tree = jax.tree.flatten(updates, is_leaf=is_gradient_leaf)
        state_leaves, state_tree = jax.tree.flatten(state, is_leaf=is_stored_table)
        param_leaves, param_tree = jax.tree.flatten(params, is_leaf=is_stored_table)
        for i, param in enumerate(param_leaves):
            if is_stored_table(param):
                leaves[i] = fitted(param, leaves[i])
        pairs = [gradient_and_valid(leaf) for leaf in leaves]
        gradients = [gradient for gradient, _ in pairs]
        has_state_rows = list(map(is_gradient_leaf, leaves))
        # Without parameters the gradient has their structure and shapes.
        like = gradients if params is None else param_leaves
        tables = [i if is_row_sparse(g) else None for i, g in enumerate(gradients)]
        owners = tables_of_state(
            inner,
            list(map(shape_of, like)),
            has_state_rows,
            gradient_tree,
            state,
            dtypes=params is not None,
        )
        for owner, leaf in zip(owners, state_leaves, strict=True):
            if owner is not None and is_stored_table(leaf):
                gradients[owner] = fitted(leaf, leaves[owner])
        return cls(
            inner,
            gradients,
            leaves,
            [valid for _, valid in pairs],
            state_leaves,
            param_leaves,
            (gradient_tree, state_tree, param_tree),
            owners,
            tables,
            [None if i is None else tables[i] for i in owners],
            [] if params is None else tables,
        )

    def has_rows(self) -> bool:
        """Whether `inner` is to run on rows; on whole arrays any `inner` is exact."""
        return any(map(is_row_sparse, self.gradients))

    def signature(self, extra_args: dict[str, Any]) -> Any:
        """What row-locality depends on: structures, shapes and dtypes.

        None if it may depend on more: an extra argument that is no array (a flag, a function)
        may choose what Python runs.
        """
        arrays, extra_tree, others = arrays_of(extra_args)
        if others:
            return None
        leaves = [*self.gradients, *self.state, *self.params]
        sizes = [g.nse for g in self.gradients if is_row_sparse(g)]
        shapes = [*map(shape_of, leaves), *arrays]
        return (
            self.trees,
            extra_tree,
            tuple(sizes),
            tuple((x.shape, x.dtype) for x in shapes),
        )

    def run(
        self,
        gradients: Sequence[Any],
        state: Sequence[Any],
        params: Sequence[Any],
        extra_args: dict[str, Any],
    ) -> tuple[list[Any], list[Any]]:
        """`inner.update` on flat leaves; its updates and state as flat leaves."""
        gradient_tree, state_tree, param_tree = self.trees
        updates, new_state = self.inner.update(
            gradient_tree.unflatten(gradients),
            state_tree.unflatten(state),
            param_tree.unflatten(params),
            **extra_args,
        )
        for name, tree, expected in (
            ("updates", updates, gradient_tree),
            ("state", new_state, state_tree),
        ):
            if jax.tree.structure(tree) != expected:
                raise NotRowLocalError(f"update changes the structure of its {name}")
        return jax.tree.leaves(updates), jax.tree.leaves(new_state)

    def run_flat(self, extra_args: dict[str, Any]) -> Callable[..., list[Any]]:
        """`run` of gradients, state, parameters and extra arrays in one flat list."""
        _, tree, others = arrays_of(extra_args)
        ends = list(itertools.accumulate(map(len, (self.gradients, self.state, self.params))))

        def run(*inputs: Any) -> list[Any]:
            first, second, third = ends
            updates, state = self.run(
                inputs[:first],
                inputs[first:second],
                inputs[second:third],
                with_arrays(tree, others, inputs[third:]),
            )
            return [*updates, *state]

        return run

    def shapes(self, of_rows: bool) -> list[Any]:
        """The shapes of gradients, state and parameters: of whole tables, or of their rows."""
        leaves = [*self.gradients, *self.state, *self.params]
        if not of_rows:
            return list(map(shape_of_leaf, leaves))
        tables = self.gradient_tables + self.state_tables + self.param_tables
        return list(map(self._shape_of_rows, tables, leaves))

    def _shape_of_rows(self, table: int | None, x: Any) -> Any:
        x = shape_of_leaf(x)
        if table is None:
            return x
        rows = self.gradients[table].nse
        if rows == 0 < x.shape[0]:
            # On no rows JAX leaves operations out: some, and not as many as the table has.
            rows = 2 if x.shape[0] == 1 else 1
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, weak_type=x.weak_type)

    def spread(self) -> dict[int, Axes]:
        """The axes of a `shard_map` for each table whose rows are spread over them."""
        found = enumerate(map(axes_of_rows, self.gradients))
        return {table: axes for table, axes in found if axes}

    def update(
        self,
        on_rows: Callable[..., list[Any]],
        extra_args: dict[str, Any],
        overwritten: Collection[int],
    ) -> tuple[Any, Any]:
        """Updates and state.

        Args:
            on_rows: `run` of gradients, state, parameters and extra arrays in one flat list.
            extra_args: of `inner.update`.
            overwritten: positions in the state of rows whose new values do not depend on the
                old ones.
        """
        rows = list(map(self._rows, self.state_tables, self.state))
        outputs = on_rows(
            *map(stored_values, self.gradients),
            *rows,
            *map(self._rows, self.param_tables, self.params),
            *arrays_of(extra_args)[0],
        )
        tables = self.gradient_tables + self.state_tables
        outputs = list(map(self._as_many, tables, outputs))
        count = len(self.gradients)
        updates = list(map(unchanged_where_masked, outputs[:count], self.valid))
        updates = [
            g.with_values(u) if is_row_sparse(g) else u
            for g, u in zip(self.gradients, updates, strict=True)
        ]
        new_state = [
            new if owner is None else keep_valid(new, old, self.valid[owner])
            for owner, new, old in zip(self.owners, outputs[count:], rows, strict=True)
        ]
        read = [x if i in overwritten else None for i, x in enumerate(rows)]
        new_state = list(map(self._with_rows, self.state_tables, self.state, new_state, read))
        gradient_tree, state_tree, _ = self.trees
        return gradient_tree.unflatten(updates), state_tree.unflatten(new_state)

    def _as_many(self, table: int | None, rows: Any) -> Any:
        """The rows of a table, none where the program had one in their place."""
        return rows if table is None or self.gradients[table].nse else rows[:0]

    def _rows(self, table: int | None, x: Any) -> Any:
        return x if table is None else rows_of(x, self.gradients[table])

    def _with_rows(self, table: int | None, old: Any, new: Any, read: Any) -> Any:
        if table is None:
            return new
        gradient = self.gradients[table]
        if read is not None and not is_stored_table(old):
            ids = ids_after_reading(gradient.row_ids(), read)
            is_sorted = gradient.coalesced
            gradient = RowSparse.of_rows(ids, new, gradient.shape, coalesced=is_sorted)
        return with_rows(old, gradient, new)


def shape_of_leaf(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf, and whether the dtype is weak."""
    shape = shape_of(x)
    weak = not isinstance(x, RowSparse | StoredTable) and jax.typeof(x).weak_type
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=weak)


def arrays_of(extra_args: dict[str, Any]) -> tuple[list[Any], Any, dict[int, Any]]:
    """The arrays among extra arguments; the tree, and its other leaves by place."""
    leaves, tree = jax.tree.flatten(extra_args)
    others = {i: x for i, x in enumerate(leaves) if not hasattr(x, "__array__")}
    return [x for i, x in enumerate(leaves) if i not in others], tree, others


def with_arrays(tree: Any, others: dict[int, Any], arrays: Sequence[Any]) -> Any:
    """Extra arguments of their arrays and what else there is, as `arrays_of` parts them."""
    given = iter(arrays)
    count = len(arrays) + len(others)
    return tree.unflatten([others[i] if i in others else next(given) for i in range(count)])
