"""The arguments of one lazy update: what is rows of which table, and the update on rows.

    gradient of a table       RowSparse, coalesced
    its parameter and state   arrays with one row per table row, gathered by its ids
    everything else           as it is

`lazy` makes one of these for each call; see there for what it is to do.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import optax
from jax.extend.core import ClosedJaxpr

from jmask._base.jaxprs import origins
from jmask._kernels.rows import ids_after_reading
from jmask._lazy.lattice import Kind, NotRowLocal, Replicated, RowWise
from jmask._lazy.row_locality import classify
from jmask._lazy.spread_sums import axes_of_rows, with_sums_over
from jmask._lazy.state_rows import tables_of_state
from jmask._tables.stored_table import (
    fitted,
    is_stored_table,
    rows_of,
    shape_of,
    with_rows,
)
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import stored_values
from jmask._updates.masked_gradient import (
    gradient_and_valid,
    is_gradient_leaf,
    keep_valid,
    unchanged_where_masked,
)
from jmask._updates.not_row_local import NotRowLocalError


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
        owners = tables_of_state(inner, _shapes(like), has_state_rows, gradient_tree, state)
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
        arrays, extra_tree, others = _arrays(extra_args)
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
        gradients: list[Any],
        state: list[Any],
        params: list[Any],
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

    def update(
        self, extra_args: dict[str, Any], overwritten: Collection[int]
    ) -> tuple[Any, Any]:
        """The lazy update; `overwritten` as `check_row_local` returns it."""
        rows = list(map(self._rows, self.state_tables, self.state))
        updates, new_state = self._run_on_devices(
            list(map(stored_values, self.gradients)),
            rows,
            list(map(self._rows, self.param_tables, self.params)),
            extra_args,
        )
        updates = list(map(unchanged_where_masked, updates, self.valid))
        updates = [
            g.with_values(u) if is_row_sparse(g) else u
            for g, u in zip(self.gradients, updates, strict=True)
        ]
        new_state = [
            new if owner is None else keep_valid(new, old, self.valid[owner])
            for owner, new, old in zip(self.owners, new_state, rows, strict=True)
        ]
        read = [x if i in overwritten else None for i, x in enumerate(rows)]
        new_state = list(map(self._with_rows, self.state_tables, self.state, new_state, read))
        gradient_tree, state_tree, _ = self.trees
        return gradient_tree.unflatten(updates), state_tree.unflatten(new_state)

    def _run_on_devices(
        self,
        gradients: list[Any],
        state: list[Any],
        params: list[Any],
        extra_args: dict[str, Any],
    ) -> tuple[list[Any], list[Any]]:
        """`run` on rows, which in a `shard_map` may be spread over the devices."""
        found = enumerate(map(axes_of_rows, self.gradients))
        spread = {table: axes for table, axes in found if axes}
        if not spread:
            return self.run(gradients, state, params, extra_args)
        arrays, tree, others = _arrays(extra_args)
        leaves = jax.tree.leaves(extra_args)
        given = [x for i, x in enumerate(leaves) if i not in others]

        def run(gradients, state, params, given):
            return self.run(gradients, state, params, _with(tree, others, given))

        run_on_all = with_sums_over(spread, self._kinds(arrays), run)
        return run_on_all(gradients, state, params, given)

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

    def check_row_local(self, extra_args: dict[str, Any]) -> frozenset[int]:
        """Refuse `inner` unless its update on the touched rows is exact on them.

        Returns:
            Positions in the state of rows whose new values do not depend on the old ones.
        """

        arrays, extra_tree, others = _arrays(extra_args)

        def run(gradients, state, params, arrays):
            return self.run(gradients, state, params, _with(extra_tree, others, arrays))

        shapes = map(_shapes, (self.gradients, self.state, self.params))
        dense = jax.make_jaxpr(run)(*shapes, arrays)
        try:
            rows = self.program_on_rows(run, arrays)
        except (TypeError, ValueError) as error:
            (reason, *_) = str(error).splitlines() or [type(error).__name__]
            raise NotRowLocalError(
                f"it runs on whole tables and not on rows ({reason})"
            ) from error
        kinds = classify(dense, rows, self._kinds(arrays))
        tables = self.gradient_tables + self.state_tables
        avals = zip(dense.out_avals, rows.out_avals, strict=True)
        for table, kind, (x, y) in zip(tables, kinds, avals, strict=True):
            why = _why_not(table, kind)
            if why is None and table is None and x.shape != y.shape:
                why = "what it returns has a shape that depends on the number of rows"
            if why is not None:
                raise NotRowLocalError(why)
        found = origins(rows.jaxpr, [1 << i for i in range(len(rows.jaxpr.invars))])
        places = enumerate(self.state_tables, len(self.gradients))
        return frozenset(
            place - len(self.gradients)
            for place, table in places
            if table is not None and not found[place] >> place & 1
        )

    def _kinds(self, arrays: list[Any]) -> list[Kind]:
        """What is known of gradients, state, parameters and arrays among extra arguments."""
        kinds: list[Kind] = [
            Replicated() if table is None else RowWise(table, 0, off_support=0)
            for table in self.gradient_tables
        ]
        kinds += [
            Replicated() if table is None else RowWise(table, 0)
            for table in self.state_tables + self.param_tables
        ]
        return kinds + [Replicated()] * len(arrays)

    def program_on_rows(self, function: Any, *others: Any) -> ClosedJaxpr:
        """The jaxpr of a function of rows of gradients, state and parameters, and others."""
        return jax.make_jaxpr(function)(
            list(map(self._shape_of_rows, self.gradient_tables, self.gradients)),
            list(map(self._shape_of_rows, self.state_tables, self.state)),
            list(map(self._shape_of_rows, self.param_tables, self.params)),
            *others,
        )

    def _shape_of_rows(self, table: int | None, x: Any) -> Any:
        x = shape_of(x)
        if table is None:
            return x
        rows = self.gradients[table].nse
        if rows == 0 < x.shape[0]:
            # On no rows JAX leaves operations out: some, and not as many as the table has.
            rows = 2 if x.shape[0] == 1 else 1
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)


def _shapes(leaves: list[Any]) -> list[jax.ShapeDtypeStruct]:
    return list(map(shape_of, leaves))


def _arrays(extra_args: dict[str, Any]) -> tuple[list[Any], Any, dict[int, Any]]:
    """Shapes of the arrays among extra arguments; the tree, and its other leaves by place."""
    leaves, tree = jax.tree.flatten(extra_args)
    others = {i: x for i, x in enumerate(leaves) if not hasattr(x, "__array__")}
    arrays = [x for i, x in enumerate(leaves) if i not in others]
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays], tree, others


def _with(tree: Any, others: dict[int, Any], arrays: Sequence[Any]) -> Any:
    """Extra arguments of their arrays and what else there is, as `_arrays` takes them apart."""
    given = iter(arrays)
    count = len(arrays) + len(others)
    return tree.unflatten([others[i] if i in others else next(given) for i in range(count)])


def _why_not(table: int | None, kind: Kind) -> str | None:
    """Why an output is not what it must be: rows of its table, or shared."""
    if isinstance(kind, NotRowLocal):
        return kind.why
    if isinstance(kind, Replicated):
        by_position = table is not None and 0 not in kind.uniform
        return "it treats rows by their position" if by_position else None
    stays = (kind.table, kind.axis, kind.merged) == (table, 0, (1, 1))
    return None if stays else "it moves rows elsewhere"
