"""Prove that an update on rows is exact on them, and run the program that was proved.

    gradient of a table       RowSparse, coalesced
    its parameter and state   arrays with one row per table row, gathered by its ids
    everything else           as it is

    inner.update on whole tables        traced once, for the proof
    inner.update on rows                traced once, for the proof and to run

The program on rows is a jaxpr, and the proof knows the kind of each of its variables. The plain
update evaluates the program on gathered rows. The one pass makes its combiner of the equations
that compute rows.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, Var

from jmask._base.array_types import automatically, explicit_sharding, has_8_bits, spec_of
from jmask._base.jaxprs import bound, inlined, interpret, origins
from jmask._base.types import (
    ArraysFunction,
    Gradient,
    Gradients,
    OptState,
    PyTree,
    PyTreeDef,
    Table,
    TensorLike,
)
from jmask._kernels.rows import ids_after_reading
from jmask._lazy.lattice import Kind, NotRowLocal, Replicated, RowWise
from jmask._lazy.psum_over_shards import axes_of_rows, with_sums_over
from jmask._lazy.row_locality import classify
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

# --- a call of `update`, and its leaves ---------------------------------------------------


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
    uncoalesced: Gradient = None


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

    @property
    def gradients(self) -> list[Leaf]:
        """The leaves of the gradient."""
        return self.leaves[: self.trees[0].num_leaves]

    def has_rows(self) -> bool:
        """Decide whether `inner` is to run on rows; on whole arrays any `inner` is exact."""
        return any(leaf.table is not None for leaf in self.gradients)

    def signature(self) -> Hashable | None:
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

    def update(
        self,
        on_rows: ArraysFunction | None = None,
        unordered: Mapping[int, int] | None = None,
    ) -> tuple[Gradients, OptState]:
        """Return updates and state.

        Args:
            on_rows: the same program as `run_flat` for rows, if there are any.
            unordered: for each output that is written to rows it does not depend on, the leaf
                that has these rows.
        """
        unordered = unordered or {}
        rows = []
        for leaf in self.leaves:
            if leaf.kind == "gradient":
                rows.append(stored_values(leaf.value))
            elif leaf.table is None:
                rows.append(leaf.value)
            else:
                at = RowsAt.of(leaf.value, self.leaves[leaf.table].value)
                rows.append(at.read(leaf.value))
        for i in set(unordered.values()):
            # GPUs would read them once more, for another result and after the write: from a
            # copy of the table, where that is stacked (jaxlib 0.12).
            rows[i] = lax.optimization_barrier(rows[i])
        outputs = (on_rows or self.run_flat())(*rows)
        results: list[Gradient] = []
        for i, (leaf, old, new) in enumerate(zip(self.leaves, rows, outputs, strict=False)):
            gradient = None if leaf.table is None else self.leaves[leaf.table].value
            if gradient is not None and not gradient.nse:
                new = new[:0]  # the program had a row in the place of none
            if leaf.kind == "gradient":
                new = unchanged_where_masked(new, leaf.valid)
            else:
                new = keep_valid(new, old, leaf.valid)
            if i in unordered and type(gradient) is RowSparse:
                # XLA knows where to write only after it has read these rows.
                ids = ids_after_reading(gradient.row_ids(), rows[unordered[i]])
                gradient = RowSparse.from_rows(
                    ids, gradient.values, gradient.shape, coalesced=gradient.coalesced
                )
            if gradient is None:
                results.append(new)
            elif leaf.kind == "gradient":
                results.append(gradient.with_values(new))
            else:
                results.append(RowsAt.of(leaf.value, gradient).write(leaf.value, new))
        gradient_tree, state_tree, *_ = self.trees
        count = gradient_tree.num_leaves
        return gradient_tree.unflatten(results[:count]), state_tree.unflatten(results[count:])


def shape_of_leaf(x: TensorLike) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf, and whether the dtype is weak."""
    shape = shape_of(x)
    weak = not isinstance(x, RowSparse | StoredTable) and jax.typeof(x).weak_type
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=weak)


# --- its proof ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ProvedUpdate:
    """`inner.update` on rows.

    Attributes:
        call: what it was traced for.
        traced: as `inner` is written; of gradients, state, parameters and arrays among the
            extra arguments, flat. Its results are updates and state.
        program: the same with its calls in line.
        kinds: what is known of each of its variables.
        unordered: see `_unordered`.
    """

    call: LazyCall
    traced: ClosedJaxpr
    program: ClosedJaxpr
    kinds: dict[Var, Kind]
    unordered: Mapping[int, int]

    def update(self) -> tuple[Gradients, OptState]:
        """Return updates and state."""
        return self.call.update(self._run, self.unordered)

    def _run(self, *inputs: jax.Array) -> Sequence[jax.Array]:
        axes = {i: axes_of_rows(leaf.value) for i, leaf in enumerate(self.call.gradients)}
        sharded = {table: names for table, names in axes.items() if names}
        avals = self.traced.in_avals
        arrays = [  # a table without lookups has a row here
            x if jnp.shape(x) == aval.shape else jnp.zeros(aval.shape, aval.dtype)
            for x, aval in zip(inputs, avals, strict=True)
        ]
        if sharded:
            return with_sums_over(sharded, self.program, self.kinds, *arrays)
        # Types that say where an array is were not known when the program was traced.
        if all(jax.typeof(x) == aval for x, aval in zip(arrays, avals, strict=True)):
            return jax.core.eval_jaxpr(self.traced.jaxpr, self.traced.consts, *arrays)
        sharding = explicit_sharding(*arrays)
        if sharding is None:
            return interpret(self.program.jaxpr, self.program.consts, arrays, bound)
        # It was traced for no mesh. Updates and state lie where gradients and state did.
        specs = [spec_of(x) for x in arrays[: len(self.traced.out_avals)]]
        return automatically(self.call.run_flat(), *arrays, like=sharding, spec=specs)


def proved(call: LazyCall, known: set[Hashable], *, same_dtypes: bool = False) -> ProvedUpdate:
    """Return the update of a call; refuse it unless it is exact on the touched rows.

    Args:
        known: signatures that were proved; added to.
        same_dtypes: whether numbers of the state that belong to no row must keep their dtype.
            (Rows do: they are stored in the dtype of their table.)

    Raises:
        NotRowLocalError: with the first operation that mixes or counts rows.
        TypeError: from `inner`, or by `same_dtypes`.
    """
    run, signature = call.run_flat(), call.signature()
    dense = None
    if signature is None or signature not in known:
        dense = jax.make_jaxpr(run)(*call.shapes())
        if same_dtypes:
            _check_dtypes(call, dense)
    try:
        traced = jax.make_jaxpr(run)(*call.shapes_of_rows())
    except (TypeError, ValueError) as error:
        (reason, *_) = str(error).splitlines() or [type(error).__name__]
        raise NotRowLocalError(f"it runs on whole tables and not on rows ({reason})") from error
    program = inlined(traced)
    inputs = [  # untouched rows of a gradient are 0
        Replicated()
        if leaf.table is None
        else RowWise(leaf.table, 0, off_support=0 if leaf.kind == "gradient" else None)
        for leaf in call.leaves
    ]
    outputs, kinds = classify(program if dense is None else inlined(dense), program, inputs)
    if dense is not None:
        avals = zip(dense.out_avals, traced.out_avals, strict=True)
        for leaf, kind, (x, y) in zip(call.leaves, outputs, avals, strict=False):
            why = _why_not(leaf.table, kind)
            if why is None and leaf.table is None and x.shape != y.shape:
                why = "what it returns has a shape that depends on the number of rows"
            if why is not None:
                raise NotRowLocalError(why)
        if signature is not None:
            known.add(signature)
    return ProvedUpdate(call, traced, program, kinds, _unordered(call, program))


def _check_dtypes(call: LazyCall, dense: ClosedJaxpr) -> None:
    for leaf, new in zip(call.leaves, dense.out_avals, strict=False):
        old = shape_of_leaf(leaf.value)
        if leaf.kind == "state" and leaf.table is None and old.dtype != new.dtype:
            raise TypeError(f"update makes a state of {new.dtype} of one of {old.dtype}")


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


def _why_not(table: int | None, kind: Kind) -> str | None:
    """Say why an output is not what it must be: rows of its table, or shared."""
    if isinstance(kind, NotRowLocal):
        return kind.why
    if isinstance(kind, Replicated):
        by_position = table is not None and 0 not in kind.uniform
        return "it treats rows by their position" if by_position else None
    stays = (kind.table, kind.axis, kind.merged) == (table, 0, (1, 1))
    return None if stays else "it moves rows elsewhere"
