"""Prove that an update on rows is exact on them, and run the program that was proved.

    gradient of a table       RowSparse, coalesced
    its parameter and state   arrays with one row per table row, gathered by its ids
    everything else           as it is

    inner.update                        traced once, with the number of rows open

The plain update evaluates this program on gathered rows. The one pass makes its combiner of the
equations that compute rows.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr

from jmask._base.array_types import has_8_bits
from jmask._base.jaxprs import evaluate, origins
from jmask._base.row_ids import hide
from jmask._base.shardings import automatically, explicit_sharding, spec_of
from jmask._base.types import (
    ArraysFunction,
    Gradient,
    Gradients,
    OptState,
    PyTree,
    PyTreeDef,
    Shape,
    Table,
)
from jmask._kernels.rows import ids_after_reading
from jmask._lazy import row_local
from jmask._lazy.over_shards import is_block
from jmask._lazy.row_local import RowLocal, RowWise
from jmask._tables.rows_at import (
    RowsAt,
    as_one_table,
    fitted,
    has_sharded_rows,
    shape_of,
)
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import stored_values
from jmask._updates.checks import (
    NotRowLocalError,
    dense_gradient,
    gradient_and_valid,
    in_lines,
    is_gradient_leaf,
    keep_valid,
    summed,
    unchanged_where_masked,
)
from jmask._updates.state_rows import once_a_step, rows_of_state

# --- a call of `update`, and its leaves ---------------------------------------------------


Kind = Literal["gradient", "state", "param", "extra"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the gradient, the state, the parameters or the extra arguments.

    Attributes:
        value: an array or a table; of a gradient, an array or a `RowSparse` as it came. Stacked
            tables (M, V, D) are the one table (M * V, D) here.
        kind: which of these trees it is of.
        table: the position of the `RowSparse` gradient of its table, or None: no rows of it
            are gathered.
        valid: the valid entries of the gradient that it belongs to, if that is masked.
        row: of stacked tables, the shape of a row as `inner` sees it: (1, D), which has as many
            dimensions as a table of the stack. None where it is that of `value`.
        stack: what it was before it became one table: an array, or the gradient.
    """

    value: Table
    kind: Kind
    table: int | None = None
    valid: jax.Array | None = None
    row: Shape | None = None
    stack: Table = None

    @functools.cached_property
    def summed(self) -> Gradient:
        """The gradient, its rows of equal ids summed. One pass needs it at times."""
        return summed(self.value) if is_row_sparse(self.value) else self.value

    def shown(self, rows: jax.Array) -> jax.Array:
        """Return rows of `value` as `inner` sees them."""
        return rows if self.row is None else with_row(rows, self.row)

    def stored(self, rows: jax.Array) -> jax.Array:
        """Undo `shown`."""
        return rows if self.row is None else with_row(rows, self.value.shape[1:])

    def stacked(self, new: Gradient) -> Gradient:
        """Return what `value` becomes in the shape of the stack."""
        if self.row is None:
            return new
        if is_row_sparse(new):
            return new.stacked_as(self.stack)
        return jnp.reshape(new, self.stack.shape)


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
    trees: tuple[PyTreeDef, PyTreeDef, PyTreeDef, PyTreeDef]
    others: dict[int, object]

    @classmethod
    def of(
        cls,
        inner: optax.GradientTransformationExtraArgs,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        extra_args: dict[str, PyTree],
        *,
        on_rows: bool = True,
    ) -> "LazyCall":
        """Return the call of `inner` on rows, or on whole tables, in which a stack is one."""
        given, gradient_tree = jax.tree.flatten(updates, is_leaf=is_gradient_leaf)
        given = list(map(in_lines, given)) if on_rows else given
        states, state_tree = jax.tree.flatten(state)
        param_leaves, param_tree = jax.tree.flatten(params)
        # Without parameters the gradient has their structure and shapes.
        shapes = list(map(shape_of, given if params is None else param_leaves))
        flat, seen = list(given), list(shapes)
        stacks = {i: x for i, x in enumerate(given) if is_row_sparse(x) and x.leading > 1}
        for i, x in stacks.items():
            flat[i] = x.flat()
            row = (1,) * (x.leading - 1) + x.row
            seen[i] = shapes[i].update(shape=(x.row_count, *row))
        for i, param in enumerate(param_leaves):
            is_sharded = i not in stacks and is_row_sparse(flat[i]) and has_sharded_rows(param)
            if is_sharded:
                flat[i] = fitted(param, flat[i])
        if on_rows:
            pairs = [(x, None) if is_row_sparse(x) else gradient_and_valid(x) for x in flat]
        else:
            pairs = [(dense_gradient(x), None) for x in flat]
        gradients, valid = [x for x, _ in pairs], [x for _, x in pairs]
        is_table = [
            i in stacks or (on_rows and is_gradient_leaf(x)) for i, x in enumerate(given)
        ]
        owners = rows_of_state(
            inner.init, shapes, seen, is_table, gradient_tree, state, params is not None
        )
        for (owner, _), x in zip(owners, states, strict=True):
            if owner is None:
                continue
            if owner not in stacks and has_sharded_rows(x):
                gradients[owner] = fitted(x, flat[owner])
        tables = [i if is_row_sparse(g) else None for i, g in enumerate(gradients)]

        def leaf(x: Table, kind: Kind, i: int | None, row: Shape = ()) -> Leaf:
            if i is None:
                return Leaf(x, kind)
            if i not in stacks:
                return Leaf(x, kind, tables[i], valid[i])
            stack = stacks[i] if kind == "gradient" else x
            if kind == "param":
                x = as_one_table(x, stacks[i])
            elif kind == "state":
                # Numbers of rows have one dimension: XLA copies them in two (jaxlib 0.12).
                is_number = math.prod(row) == 1 and row != seen[i].shape[1:]
                is_flat = is_number and explicit_sharding(x) is None
                kept = () if is_flat else row[stacks[i].leading - 1 :]
                x = jnp.reshape(x, (stacks[i].row_count, *kept))
            row = seen[i].shape[1:] if kind != "state" else row
            return Leaf(x, kind, tables[i], None, row, stack)

        of_params = [leaf(x, "param", i) for i, x in enumerate(param_leaves)]  # refuses first
        leaves = [leaf(x, "gradient", i) for i, x in enumerate(gradients)]
        leaves += [leaf(x, "state", i, row) for (i, row), x in zip(owners, states, strict=True)]
        leaves += of_params
        extra, extra_tree = jax.tree.flatten(extra_args)
        others = {i: x for i, x in enumerate(extra) if not hasattr(x, "__array__")}
        leaves += [Leaf(x, "extra") for i, x in enumerate(extra) if i not in others]
        return cls(inner, leaves, (gradient_tree, state_tree, param_tree, extra_tree), others)

    @property
    def gradients(self) -> list[Leaf]:
        """The leaves of the gradient."""
        return self.leaves[: self.trees[0].num_leaves]

    def tables_in_lines(self) -> set[int]:
        """Return packed tables: their gradients are of lines, as `in_lines` makes them."""
        gradients = enumerate(self.gradients)
        return {i for i, x in gradients if x.table == i and x.value.order == "unique"}

    def has_rows(self) -> bool:
        """Decide whether `inner` is to run on rows; on whole arrays any `inner` is exact."""
        return any(leaf.table is not None for leaf in self.gradients)

    def run_flat(self) -> ArraysFunction:
        """Return `inner.update` from leaves to updates and state, all flat."""
        gradient_tree, state_tree, param_tree, extra_tree = self.trees
        first, second, third, _ = itertools.accumulate(tree.num_leaves for tree in self.trees)

        def run(*inputs: jax.Array) -> list[jax.Array]:
            # Rows of 8 bits, which JAX promotes to nothing, are computed with in 32 and stored
            # in their own dtype again.
            inputs = tuple(
                x.astype(jnp.float32) if leaf.table is not None and has_8_bits(x) else x
                for leaf, x in zip(self.leaves, inputs, strict=True)
            )
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
        """Return the shapes of the leaves as `inner` sees them, of whole tables."""
        return list(map(shape_of_leaf, self.leaves))

    def update(
        self,
        on_rows: ArraysFunction | None = None,
        unordered: Mapping[int, int] | None = None,
    ) -> tuple[Gradients, OptState]:
        """Return updates and state.

        Args:
            on_rows: the same program as `run_flat` for rows.
            unordered: for each output that is written to rows it does not depend on, the leaf
                that has these rows.
        """
        unordered = unordered or {}
        rows = []
        for leaf in self.leaves:
            if leaf.kind == "gradient":
                rows.append(stored_values(leaf.summed))
            elif leaf.table is None:
                rows.append(leaf.value)
            else:
                at = RowsAt.of(self.leaves[leaf.table].summed)
                rows.append(at.read(leaf.value))
        for i in set(unordered.values()):
            # GPUs would read them once more, for another result and after the write: from a
            # copy of the table, where that is stacked (jaxlib 0.12).
            rows[i] = lax.optimization_barrier(rows[i])
        seen = [leaf.shown(x) for leaf, x in zip(self.leaves, rows, strict=True)]
        outputs = (on_rows or self.run_flat())(*seen)
        results: list[Gradient] = []
        for i, (leaf, old, new) in enumerate(zip(self.leaves, rows, outputs, strict=False)):
            gradient = None if leaf.table is None else self.leaves[leaf.table].summed
            if gradient is not None and not gradient.nse:
                new = new[:0]  # the program had a row in the place of none
            new = leaf.stored(new)
            if leaf.kind == "gradient":
                new = unchanged_where_masked(new, leaf.valid)
            else:
                new = keep_valid(new, old, leaf.valid)
            if i in unordered and type(gradient) is RowSparse:
                # XLA knows where to write only after it has read these rows.
                ids = ids_after_reading(gradient.row_ids(), rows[unordered[i]])
                gradient = gradient.with_leaves(hide(ids), gradient.values)
            if gradient is None:
                results.append(leaf.stacked(new))
            elif leaf.kind == "gradient":
                results.append(leaf.stacked(gradient.with_values(new)))
            else:
                written = RowsAt.of(gradient).write(leaf.value, new)
                results.append(leaf.stacked(written))
        gradient_tree, state_tree, *_ = self.trees
        count = gradient_tree.num_leaves
        return gradient_tree.unflatten(results[:count]), state_tree.unflatten(results[count:])


def with_row(rows: jax.Array, row: Shape) -> jax.Array:
    """Return rows (n, ...) reshaped to (n, *row)."""
    return rows if rows.shape[1:] == row else jnp.reshape(rows, (rows.shape[0], *row))


def has_entries(updates: Gradients) -> bool:
    """Decide whether a gradient is of single entries of a table, whose rows are finer."""
    return any(map(_is_entries, jax.tree.leaves(updates, is_leaf=is_gradient_leaf)))


def _is_entries(x: object) -> bool:
    return is_row_sparse(x) and x.leading > 1 and not x.row


def with_whole_rows(updates: Gradients, *, lines: bool = False) -> Gradients:
    """Return gradients of entries (V, D) as rows, of zeros but for an entry each.

    Args:
        lines: whether to return rows of packed tables as lines, too.
    """

    def whole(x: Gradient) -> Gradient:
        if not _is_entries(x) and not (lines and is_row_sparse(x) and x.width):
            return x
        width, ids = x.width or 1, x.flat().row_ids()
        each = x.shape[-1] // width
        place = lax.broadcasted_iota(ids.dtype, (x.nse, each, width), 1)
        rows = x.values.reshape(x.nse, 1, width)
        values = jnp.where(place == (ids % each)[:, None, None], rows, 0)
        values = values.reshape(x.nse, each * width)
        return RowSparse.from_rows(
            ids // each, values, x.shape, coalesced=False, leading=x.leading - 1
        )

    return jax.tree.map(whole, updates, is_leaf=is_gradient_leaf)


def shape_of_leaf(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf as `inner` sees it, and whether the dtype is weak."""
    shape, x = shape_of(leaf.value), leaf.value
    weak = not isinstance(x, RowSparse) and jax.typeof(x).weak_type
    seen = shape.shape if leaf.row is None else (shape.shape[0], *leaf.row)
    return jax.ShapeDtypeStruct(seen, shape.dtype, weak_type=weak)


# --- its proof ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ProvedUpdate:
    """`inner.update` on rows.

    Attributes:
        call: what it was traced for.
        proof: its program, of gradients, state, parameters and arrays among the extra
            arguments, flat. Its results are updates and state.
        unordered: see `_unordered`.
    """

    call: LazyCall
    proof: RowLocal
    unordered: Mapping[int, int]

    def update(self) -> tuple[Gradients, OptState]:
        """Return updates and state."""
        return self.call.update(self._run, self.unordered)

    def _run(self, *inputs: jax.Array) -> Sequence[jax.Array]:
        gradients = self.call.gradients
        # A table without lookups has a row here: of no rows there is no maximum.
        sizes = {i: max(gradients[i].summed.nse, 1) for i in self.proof.rows}
        program = self.proof.at(sizes)
        avals = program.in_avals
        arrays = [
            x if jnp.shape(x) == aval.shape else jnp.zeros(aval.shape, aval.dtype)
            for x, aval in zip(inputs, avals, strict=True)
        ]
        # Types that say where an array is were not known when the program was traced.
        if all(jax.typeof(x) == aval for x, aval in zip(arrays, avals, strict=True)):
            return jax.core.eval_jaxpr(program.jaxpr, program.consts, *arrays)
        sharding = explicit_sharding(*arrays)
        if sharding is None:
            return evaluate(program, *arrays)
        # It was traced for no mesh. Updates and state lie where gradients and state did.
        specs = [spec_of(x) for x in arrays[: len(program.out_avals)]]
        run = functools.partial(evaluate, program)
        return automatically(run, *arrays, like=sharding, spec=specs)


def _proof(call: LazyCall) -> RowLocal:
    shapes, tables = call.shapes(), [leaf.table for leaf in call.leaves]
    of_shapes = [(x.shape, x.dtype, x.weak_type) for x in shapes]
    others = [(i, id(x)) for i, x in call.others.items()]
    key = (call.inner.update, call.trees, *of_shapes, *tables, *others)
    kept = call.others  # while its proof is, so that no other object gets the same `id`
    proof, _ = once_a_step(
        key,
        lambda: (
            row_local.proved(
                call.run_flat(),
                shapes,
                tables,
                [leaf.kind == "gradient" for leaf in call.leaves],
                is_row_wise=isinstance(call.inner, RowWise),
            ),
            kept,
        ),
    )
    return proof


def proved(call: LazyCall, *, same_dtypes: bool = False) -> ProvedUpdate:
    """Return the update of a call; refuse it unless it is exact on the touched rows.

    Args:
        same_dtypes: whether numbers of the state that belong to no row must keep their dtype.
            (Rows do: they are stored in the dtype of their table.)

    Raises:
        NotRowLocalError: with the first operation that mixes or counts rows.
        TypeError: from `inner`, or by `same_dtypes`.
    """
    proof = _proof(call)
    for leaf, new in zip(call.leaves, proof.program.out_avals, strict=False):
        old = shape_of_leaf(leaf)
        is_number = leaf.kind == "state" and leaf.table is None
        if same_dtypes and is_number and old.dtype != new.dtype:
            raise TypeError(f"update makes a state of {new.dtype} of one of {old.dtype}")
    params = [leaf.value for leaf in call.leaves if leaf.kind == "param"]
    tables = [params[i] for i in proof.rows] if params else []
    if any(is_block(x, params) for x in tables) and proof.sums_over_rows():
        raise NotRowLocalError(
            "it sums over rows, and in this shard_map every device has other rows of a table",
            "Make the step outside of the shard_map, in the same jit: the table is sharded "
            "there, too.",
        )
    return ProvedUpdate(call, proof, _unordered(call, proof.program))


def _unordered(call: LazyCall, program: ClosedJaxpr) -> dict[int, int]:
    """Return outputs that are written to rows which they do not depend on, and these rows.

    A new row of the state that does not depend on the old one; an update that does not depend
    on the parameter where the state does (an average of parameters).

    Returns:
        A dict from the position of the output to the position of the leaf that is read.
    """
    inputs = origins(program.jaxpr, [1 << i for i in range(len(program.jaxpr.invars))])
    params = {leaf.table: i for i, leaf in enumerate(call.leaves) if leaf.kind == "param"}
    written = {
        i: i if leaf.kind == "state" else params.get(leaf.table)
        for i, leaf in enumerate(call.leaves)
        if leaf.kind in ("state", "gradient") and leaf.table is not None
    }
    return {
        i: read
        for i, read in written.items()
        if read is not None
        and not inputs[i] >> read & 1
        and any(bits >> read & 1 for bits in inputs)
    }
