"""One step on the rows of its gradients: whose rows all arrays have, the proof, and the run.

    gradient of a table       RowSparse
    its parameter and state   arrays with one row per table row, gathered by its ids
    everything else           as it is

    step = LazyStep.of(inner, gradients, state, params, extra_args)
    step.proved()             traces `inner.update` once, with the number of rows open
    step.update()             gathers rows, runs that program on them, scatters the state

The one pass makes its combiner of the equations of the same program.
"""

import contextlib
import dataclasses
import functools
import math
import operator
import weakref
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr

from jmask._base.array_types import has_8_bits
from jmask._base.jaxprs import evaluate, in_sequence, lifted, origins
from jmask._base.row_ids import hide
from jmask._base.shardings import automatically, explicit_mesh, spec_of, varying_axes
from jmask._base.side_table import SideTable
from jmask._base.types import Argument, Atom, PyTree, PyTreeDef, RowArray, Shape, Table
from jmask._kernels.rows import gather_unique_rows, ids_after_reading, set_rows
from jmask._kernels.sharded_rows import Exchange
from jmask._lazy import row_local
from jmask._lazy.checks import (
    NotRowLocalError,
    coalesced,
    gradient_and_valid,
    is_entries,
    is_gradient_leaf,
    keep_valid,
    unchanged_where_masked,
    with_whole_rows,
    with_wide_rows,
)
from jmask._lazy.open_rows import operations_of
from jmask._lazy.row_local import Known, RowLocal, RowWise
from jmask._lazy.state_rows import check_nothing_held_back, rows_of_state
from jmask._tables.rows_at import (
    check_one_table,
    exchange_for,
    from_lines,
    in_lines,
    routed_to_shards,
    shape_of,
)
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import stored_values

Kind = Literal["gradient", "state", "param", "extra"]
_KINDS: tuple[Kind, ...] = get_args(Kind)


def step_of(
    inner: optax.GradientTransformationExtraArgs,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    extra_args: dict[str, PyTree],
) -> "LazyStep":
    """Return the step of `inner` on rows, proved.

    Single entries of a table are rows of one entry where `inner` works entry by entry, else
    they are rows of zeros but for an entry.

    Rows of 16 bits are summed in float32. An `inner` that does not take gradients wider than
    its state gets the sums in 16 bits, as from JAX: one branch of the `lax.cond` in
    `optax.novograd` has the dtype of the state, the other has the gradient's.
    """
    check_nothing_held_back(state)
    proved = lambda x, **how: LazyStep.of(inner, x, state, params, extra_args).proved(**how)

    def by_entries_or_rows(gradients: PyTree, **how: bool) -> "LazyStep":
        step = proved(with_whole_rows(gradients), **how)
        entries = [i for i, x in enumerate(leaves) if is_entries(x)]
        if entries and step.proof and not any(map(step.proof.mixes_entries, entries)):
            alone = proved(gradients, **how)
            # The length of a row may be in a number.
            if alone.proof:
                made = operations_of(alone.proof.program)
                if made == operations_of(step.proof.program):
                    return alone
        return step

    leaves_of = functools.partial(jax.tree.leaves, is_leaf=is_gradient_leaf)
    wide, leaves, step = with_wide_rows(updates), leaves_of(updates), None
    if any(map(operator.is_not, leaves, leaves_of(wide))):
        with contextlib.suppress(TypeError):
            step = by_entries_or_rows(wide, same_dtypes=True)
    step = step or by_entries_or_rows(updates)
    packed = [i for i, leaf in enumerate(step.gradients) if leaf.packed is not None]
    if step.proof and any(step.proof.mixes_entries(i) for i in packed):
        raise NotRowLocalError(
            "it works row by row, and the table is packed: it would take lines of several rows "
            "for rows",
            "Leave the table unpacked, `jmask.embedding_lookup(lines, jnp.arange(V), "
            "width=D)`, or use an optimizer that works entry by entry.",
        )
    return step


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["given", "valid", "home", "packed"],
    meta_fields=["kind", "table", "inner_row", "stored"],
)
@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the gradient, the state, the parameters or the extra arguments.

    Stacked tables (M, V, D) are stored as one table (M * V, D). `inner` sees (M * V, 1, D): a
    mask by `ndim` gives the same for it as for the stack.
    """

    given: Argument  # an array; of a gradient, an array or a `RowSparse`
    kind: Kind  # which of these trees it is of
    # The position of the `RowSparse` gradient of its table, or None: no rows of it are
    # gathered.
    table: int | None = None
    # The valid entries of the gradient that it belongs to, if that is masked.
    valid: jax.Array | None = None
    inner_row: Shape | None = None  # of a stack, a row as `inner` sees it: (1, D)
    stored: Shape | None = None  # of a stack, the shape as one table
    # Of a gradient, the parameter or state whose type shards the rows of its table, if any.
    home: jax.Array | None = None
    # Of a packed table, the gradient in rows; what is given are its lines.
    packed: RowSparse | None = None

    @functools.cached_property
    def value(self) -> Argument:
        """The given array or gradient; stacked tables are reshaped to one."""
        if is_row_sparse(self.given):
            return self.given.flat()
        return self.given if self.stored is None else jnp.reshape(self.given, self.stored)

    @functools.cached_property
    def exchange(self) -> Exchange | None:
        """How many rows of the gradient go to the shards of their table in rounds, or None."""
        return None if self.home is None else exchange_for(self.home, self.value)

    @functools.cached_property
    def coalesced_value(self) -> Argument:
        """The gradient, its rows of equal ids summed, each where its shard is.

        One pass needs it at times: it routes rows to their shards as it updates them.
        """
        home, rows = self.home, self.value
        return coalesced(rows if home is None else routed_to_shards(home, rows))

    @property
    def inner_shape(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype as `inner` sees them, of whole tables; and whether that is weak."""
        like, x = shape_of(self.value), self.value
        weak = not is_row_sparse(x) and jax.typeof(x).weak_type
        shape = like.shape if self.inner_row is None else (like.shape[0], *self.inner_row)
        return jax.ShapeDtypeStruct(shape, like.dtype, weak_type=weak)

    def to_inner(self, rows: RowArray) -> RowArray:
        """Return rows of `value` as `inner` sees them."""
        return rows if self.inner_row is None else with_row(rows, self.inner_row)

    def from_inner(self, rows: RowArray) -> RowArray:
        """Undo `to_inner`."""
        return rows if self.inner_row is None else with_row(rows, self.value.shape[1:])

    def as_given(self, new: Table) -> Table:
        """Return what `value` becomes, of a stack in the shape that was given."""
        if is_row_sparse(new):
            new = new if self.packed is None else from_lines(new, self.packed)
            return new if self.stored is None else new.stacked_as(self.given)
        new = new if self.stored is None else jnp.reshape(new, self.given.shape)
        return new if self.table is None else written_in_rows(new, self.given)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["leaves", "proof"],
    meta_fields=["trees"],
    drop_fields=["inner", "others"],
)
@dataclasses.dataclass(frozen=True)
class LazyStep:
    """The arguments of one `update`; one that is proved is a tree of its arrays."""

    # Of the gradient, then of the state, of the parameters if they were given, and of the
    # arrays among extra arguments. So leaf i of gradient and state is what output i of the
    # update replaces.
    leaves: list[Leaf]
    # Structures of gradient, state, parameters and extra arguments.
    trees: tuple[PyTreeDef, PyTreeDef, PyTreeDef, PyTreeDef]
    # The program of `inner` from leaves to updates and state, if it was proved.
    proof: RowLocal | None = None
    # What is not needed then: the transformation, which may hold tracers, and extra arguments
    # that are no arrays, by their position among all leaves.
    inner: optax.GradientTransformationExtraArgs | None = None
    others: dict[int, object] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        inner: optax.GradientTransformationExtraArgs,
        updates: PyTree,
        state: PyTree,
        params: PyTree,
        extra_args: dict[str, PyTree],
        by_lines: bool = True,
    ) -> "LazyStep":
        """Return a step of `inner` whose arguments fit, not proved; packed tables by lines."""
        given, gradient_tree = jax.tree.flatten(updates, is_leaf=is_gradient_leaf)
        states, state_tree = jax.tree.flatten(state)
        param_leaves, param_tree = jax.tree.flatten(params)
        # Without parameters the gradient has their structure and shapes.
        shapes = list(map(shape_of, given if params is None else param_leaves))
        sparse = {i: x for i, x in enumerate(given) if is_row_sparse(x)}
        packed = {i: x.coalesce() for i, x in sparse.items() if by_lines and x.width}
        stacks = {i: x for i, x in sparse.items() if x.leading > 1 and i not in packed}
        flat = [
            x.update(shape=(g.row_count, *(1,) * (g.leading - 1), *g.row)) if i in stacks else x
            for i, (x, g) in enumerate(zip(shapes, given, strict=True))
        ]
        is_table = list(map(is_gradient_leaf, given))
        dtypes = params is not None
        owners = rows_of_state(
            inner.init, shapes, is_table, gradient_tree, state, as_tables=flat, dtypes=dtypes
        )
        split = lambda x: (x, None) if is_row_sparse(x) else gradient_and_valid(x)
        pairs = [in_lines(packed[i]) if i in packed else split(x) for i, x in enumerate(given)]
        gradients, valid = [x for x, _ in pairs], [x for _, x in pairs]
        # The parameter says which shards have which rows; where it is not given, the state.
        arrays = [(i, x) for (i, _), x in zip(owners, states, strict=True)]
        arrays += enumerate(param_leaves)
        unpacked = sparse.keys() - packed.keys()
        homes = {i: x for i, x in arrays if i in unpacked and any(spec_of(x)[:1])}

        def leaf(x: Argument, kind: Kind, i: int | None, row: Shape = ()) -> Leaf:
            if i is None:
                return Leaf(x, kind)
            table = i if is_row_sparse(gradients[i]) else None
            if i not in stacks:
                known = (homes.get(i), packed.get(i)) if kind == "gradient" else (None, None)
                return Leaf(x, kind, table, valid[i], None, None, *known)
            like, table_row = stacks[i], flat[i].shape[1:]
            if kind == "state":
                # One number for each row is stored in one dimension: XLA copies the scattered
                # array where it has two (jaxlib 0.12).
                is_number = math.prod(row) == 1 and row != table_row
                is_flat = is_number and explicit_mesh(x) is None
                stored = (like.row_count, *(() if is_flat else row[like.leading - 1 :]))
                return Leaf(x, kind, table, None, row, stored)
            if kind == "param":
                check_one_table(x, like)
            return Leaf(x, kind, table, None, table_row, like.flat().shape)

        of_params = [leaf(x, "param", i) for i, x in enumerate(param_leaves)]  # refuses first
        leaves = [leaf(x, "gradient", i) for i, x in enumerate(gradients)]
        leaves += [leaf(x, "state", i, row) for (i, row), x in zip(owners, states, strict=True)]
        leaves += of_params
        extra, extra_tree = jax.tree.flatten(extra_args)
        numbered = list(enumerate(extra, start=len(leaves)))
        others = {i: x for i, x in numbered if not hasattr(x, "__array__")}
        leaves += [Leaf(x, "extra") for i, x in numbered if i not in others]
        trees = gradient_tree, state_tree, param_tree, extra_tree
        return cls(leaves, trees, None, inner, others)

    @property
    def gradients(self) -> list[Leaf]:
        """The leaves of the gradient."""
        return self.leaves[: self.trees[0].num_leaves]

    def flat_update(self, *inputs: jax.Array) -> list[jax.Array]:
        """Run `inner.update` from leaves to updates and state, all flat."""
        assert self.inner is not None
        # Rows of 8 bits, which JAX promotes to nothing, are computed with in 32 and stored in
        # their own dtype again.
        wide = (
            x.astype(jnp.float32) if leaf.table is not None and has_8_bits(x) else x
            for leaf, x in zip(self.leaves, inputs, strict=True)
        )
        tree: PyTreeDef = jax.tree_util.treedef_tuple(self.trees)
        every = range(tree.num_leaves)
        leaves = [self.others[i] if i in self.others else next(wide) for i in every]
        updates, state, params, extra = tree.unflatten(leaves)
        results = self.inner.update(updates, state, params, **extra)
        for name, new, expected in zip(("updates", "state"), results, self.trees, strict=False):
            if jax.tree.structure(new) != expected:
                raise NotRowLocalError(f"update changes the structure of its {name}")
        return jax.tree.leaves(results)

    # --- its proof -----------------------------------------------------------------------

    def proved(self, *, same_dtypes: bool = False) -> "LazyStep":
        """Return the step with its proof, if it is on rows; on whole arrays any is exact.

        Args:
            same_dtypes: whether numbers of the state that belong to no row must keep their
                dtype. (Rows do: they are stored in the dtype of their table.)

        Raises:
            NotRowLocalError: with the first operation that mixes or counts rows.
            TypeError: from `inner`, or by `same_dtypes`.
        """
        if all(leaf.table is None for leaf in self.gradients):
            return self
        shapes, tables = [x.inner_shape for x in self.leaves], [x.table for x in self.leaves]
        inputs = _in_untouched_rows(self.leaves)
        # JAX keeps for a while what it has traced; it need not keep arrays.
        leaves = [Leaf(None, leaf.kind, leaf.table) for leaf in self.leaves]
        program = row_local.proved(
            dataclasses.replace(self, leaves=leaves).flat_update,
            shapes,
            tables,
            inputs,
            is_row_wise=isinstance(self.inner, RowWise),
        )
        new = program.program.out_avals
        for leaf, x, y in zip(self.leaves, shapes, new, strict=False):
            is_number = leaf.kind == "state" and leaf.table is None
            if same_dtypes and is_number and x.dtype != y.dtype:
                raise TypeError(f"update makes a state of {y.dtype} of one of {x.dtype}")
        # A table is a block of one device if it differs over an axis of a `shard_map` over
        # which another parameter is the same: a sum would be of one device's rows alone. Where
        # all parameters differ, each device trains a model of its own.
        params = [varying_axes(leaf.value) for leaf in self.leaves if leaf.kind == "param"]
        blocks = [params[i] - frozenset.intersection(*params) for i in program.rows if params]
        if any(blocks) and program.sums_over_rows:
            raise NotRowLocalError(
                "it sums over rows, and in this shard_map every device has other rows of a "
                "table",
                "Make the step outside of the shard_map, in the same jit: the table is sharded "
                "there, too.",
            )
        return dataclasses.replace(self, proof=program)

    def then(self, other: "LazyStep") -> "LazyStep":
        """Return the step of a chain in which the proved step `other` gets updates of this one.

        Their tables and parameters are the same, and the gradients of this one not masked.

        Raises:
            NotRowLocalError: if `other` counts on zeros in rows that are not in the gradient,
                as a norm does, where updates of this one have none.
        """
        assert self.proof is not None
        assert other.proof is not None
        # --- the programs of both, and what the second one gets
        gradients, states = (self.trees[i].num_leaves for i in (0, 1))
        params = [i for i, leaf in enumerate(self.leaves) if leaf.kind == "param"]
        outputs = gradients + states
        known = {"gradient": iter(range(gradients)), "param": (outputs + i for i in params)}
        sources = [next(known[x.kind]) if x.kind in known else None for x in other.leaves]
        program = in_sequence(self.proof.traced, other.proof.traced, sources)

        # --- in the order of leaves
        pairs = zip(other.leaves, sources, strict=True)
        leaves = [*self.leaves, *(leaf for leaf, source in pairs if source is None)]
        order = sorted(range(len(leaves)), key=lambda i: _KINDS.index(leaves[i].kind))
        invars = [program.jaxpr.invars[i] for i in order]
        leaves = [leaves[i] for i in order]
        results: list[Atom] = program.jaxpr.outvars
        end = outputs + gradients
        outvars = [*results[outputs:end], *results[gradients:outputs], *results[end:]]
        jaxpr = program.jaxpr.replace(invars=invars, outvars=outvars)
        traced = ClosedJaxpr(jaxpr, program.consts)
        proof = RowLocal.of(traced, _in_untouched_rows(leaves), self.proof.rows)
        gradient_tree, _, param_tree, _ = self.trees
        both = zip(self.trees, other.trees, strict=True)
        _, state_tree, _, extra_tree = map(jax.tree_util.treedef_tuple, both)
        trees = gradient_tree, state_tree, param_tree, extra_tree
        return LazyStep(leaves, trees, proof)

    @functools.cached_property
    def read_first(self) -> dict[int, int]:
        """Outputs that do not depend on the rows they overwrite, and leaves to be read before.

        A new row of the state that does not depend on the old one; an update that does not
        depend on the parameter where the state does (an average of parameters). XLA may then
        write before it reads, to a copy of the table.
        """
        if self.proof is None:
            return {}
        jaxpr = self.proof.program.jaxpr
        inputs = origins(jaxpr, [1 << i for i in range(len(jaxpr.invars))])
        params = {leaf.table: i for i, leaf in enumerate(self.leaves) if leaf.kind == "param"}
        read_first: dict[int, int] = {}
        for i, (leaf, bits) in enumerate(zip(self.leaves, inputs, strict=False)):
            read = i if leaf.kind == "state" else params.get(leaf.table)
            if leaf.table is None or read is None or bits >> read & 1:
                continue
            if any(x >> read & 1 for x in inputs):
                read_first[i] = read
        return read_first

    # --- its run -------------------------------------------------------------------------

    def update(self) -> tuple[PyTree, PyTree]:
        """Return updates and state."""
        rows = self.rows()
        if self.proof is None:
            outputs = self.flat_update(*rows)
        else:
            sizes = {i: self.leaves[i].coalesced_value.nse for i in self.proof.rows}
            program = self.proof.at(sizes)
            # Types that say where an array is were not known when the program was traced.
            if all(jax.typeof(x) == y for x, y in zip(rows, program.in_avals, strict=True)):
                outputs = jax.core.eval_jaxpr(program.jaxpr, program.consts, *rows)
            else:
                # Numbers that it holds, as an injected rate, may be on a mesh, too.
                run = functools.partial(evaluate, ClosedJaxpr(lifted(program), []))
                # Updates and state lie where gradients and state did.
                specs = [spec_of(x) for x in rows[: len(program.out_avals)]]
                outputs = automatically(run, *program.consts, *rows, spec=specs)
        results: list[Table] = []
        for i, (leaf, old, new) in enumerate(zip(self.leaves, rows, outputs, strict=False)):
            gradient = None if leaf.table is None else self.leaves[leaf.table].coalesced_value
            if leaf.kind == "gradient":
                new = unchanged_where_masked(new, leaf.valid)
            else:
                new = keep_valid(new, old, leaf.valid)
            if gradient is not None:
                new = leaf.from_inner(new)
                if i in self.read_first:
                    # XLA knows where to write only after it has read these rows.
                    ids = ids_after_reading(gradient.row_ids(), rows[self.read_first[i]])
                    gradient = gradient.with_leaves(hide(ids), gradient.values)
                if leaf.kind == "gradient":
                    new = gradient.with_values(new)
                else:
                    new = set_rows(leaf.value, gradient.row_ids(), new, gradient.order)
            results.append(leaf.as_given(new))
        gradient_tree, state_tree, *_ = self.trees
        count = gradient_tree.num_leaves
        return gradient_tree.unflatten(results[:count]), state_tree.unflatten(results[count:])

    def rows(self) -> list[jax.Array]:
        """Return all leaves as `inner` sees them: of tables the rows of the gradient."""
        rows = []
        for i, leaf in enumerate(self.leaves):
            if leaf.kind == "gradient":
                x = stored_values(leaf.coalesced_value)
            elif leaf.table is None:
                x = leaf.value
            else:
                gradient = self.leaves[leaf.table].coalesced_value
                x = gather_unique_rows(leaf.value, gradient.row_ids(), gradient.order)
            if i in self.read_first.values():
                # GPUs would read them once more, for another result and after the write: from
                # a copy of the table, where that is stacked (jaxlib 0.12).
                x = lax.optimization_barrier(x)
            rows.append(leaf.to_inner(x))
        return rows


def _in_untouched_rows(leaves: Sequence[Leaf]) -> list[Known]:
    """Return what each leaf is in rows without a gradient; None where that is not known."""
    is_rows = lambda leaf: leaf.kind == "gradient" and leaf.table is not None
    return [0 if is_rows(leaf) else None for leaf in leaves]


def with_row(rows: RowArray, row: Shape) -> RowArray:
    """Return rows (n, ...) reshaped to (n, *row)."""
    return rows if rows.shape[1:] == row else jnp.reshape(rows, (rows.shape[0], *row))


# --- arrays that a step changes in rows of the gradient alone -------------------------------
#
# Guards ask for them: a step of padding, in which there are no rows, has left all else of them.

_BEFORE = SideTable["weakref.ref[jax.Array]"]()


def written_in_rows(new: jax.Array, old: jax.Array) -> jax.Array:
    """Note that an array is another one with rows of the gradient written; return it."""
    _BEFORE.note(new, weakref.ref(old))
    return new


def is_written_in_rows(new: object, old: object) -> bool:
    """Decide whether `new` is `old`, or was noted as `old` with rows written."""
    before = _BEFORE.of(new)
    return new is old or (before is not None and before() is old)
