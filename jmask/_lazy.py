"""`lazy(inner)`: any row-local optax transformation, at the cost of the rows touched.

    gradient  RowSparse(ids, g)            ids coalesced first
    rows of   the parameter and of every state array with one row per table row: gathered
    update    inner.update(g, state rows, parameter rows)      all other leaves as they are
    result    RowSparse(ids, updates); state rows scattered back; other rows not touched

Semantics are masked: a row that is not in the gradient keeps its parameter and its state
bit for bit, as in torch's SparseAdam and MXNet's `lazy_update=True`; with a `MaskedTensor`
gradient, on any storage, so does every entry that is masked. On the rows that are
in it the result is that of `inner` on the dense gradient, which is proved for `inner` when
it is first traced (see `_row_locality`); an `inner` for which it cannot be is refused.

Which state arrays hold rows is found from the shapes that `inner.init` gives them; see
`_state_rows`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmask._masked_gradient import (
    gradient_and_valid,
    is_gradient_leaf,
    keep_valid,
    unchanged_where_masked,
)
from jmask._parameters import check_gradient, check_parameters
from jmask._refusal import refusal
from jmask._row_kinds import Kind, Mixed, PerRow, Shared
from jmask._row_locality import classify
from jmask._row_sparse import is_row_sparse
from jmask._rows import gather_rows, set_rows
from jmask._same_arithmetic import difference
from jmask._state_rows import tables_of_state
from jmask._stored_table import distinct_rows, is_stored_table

# Transformations that hold gradients back to emit them in a later step, when a row held
# back need not be among the rows touched: its update would be lost.
_DEFERRING = (optax.MultiStepsState, optax.ApplyEvery)


def lazy(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Lift an optax transformation to row-sparse gradients, touching only their rows.

    `init` is that of `inner`, so the optimizer state has optax's standard layout: a run can
    switch between `inner` and `lazy(inner)` at any step, and checkpoints are the same.
    Leaves of the gradient that are not `RowSparse` are updated by `inner` as usual, in the
    same call, so that for example a global norm covers them all. With donated arguments
    under jit, tables and state are updated in place.

    Args:
        inner: a row-local transformation or chain: the result for a row may depend on that
            row of gradient, state and parameter, on scalars, and on sums over the gradient
            (global norm). Checked by analysis when first traced.

    Returns:
        A transformation whose updates are `RowSparse` where the gradient was. Apply them
        with `optax.apply_updates` or `jmask.apply_updates`.

    Raises:
        ValueError: from `update`, if `inner` is not row-local (LARS, LAMB, Adafactor, ...),
            naming the operation that mixes rows; or if a gradient does not fit its
            parameter or the state was not made by this `init`.
        TypeError: if a parameter is itself sparse, or complex.

    Example:
        >>> import jax.numpy as jnp, optax, jmask
        >>> tx = jmask.lazy(optax.sgd(0.5, momentum=0.9))
        >>> params = {"table": jnp.ones((4, 2))}
        >>> state = tx.init(params)
        >>> grads = {"table": jmask.RowSparse([2], jnp.ones((1, 2)), (4, 2))}
        >>> updates, state = tx.update(grads, state, params)
        >>> optax.apply_updates(params, updates)["table"]
        Array([[1. , 1. ],
               [1. , 1. ],
               [0.5, 0.5],
               [1. , 1. ]], dtype=float32)
    """
    inner = optax.with_extra_args_support(inner)
    verified: set[Any] = set()

    def init(params: optax.Params) -> optax.OptState:
        check_parameters(params)
        state = inner.init(params)
        _check_not_deferring(state)
        return state

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        _check_not_deferring(state)
        leaves = jax.tree.leaves(updates, is_leaf=is_gradient_leaf)
        if params is not None:
            check_parameters(params)
            check_gradient(updates, params)
        if not any(map(is_gradient_leaf, leaves)):
            return inner.update(updates, state, params, **extra_args)
        _check_extra_args(extra_args)

        call = _Call.of(inner, updates, state, params)
        signature = call.signature()
        if signature not in verified and call.has_rows():
            call.check_row_local(extra_args)
            verified.add(signature)
        return call.update(extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of one `update`, flat, and which of their leaves hold rows.

    Attributes:
        gradients: leaves of the gradient, arrays or coalesced `RowSparse`.
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
    ) -> "_Call":
        leaves, gradient_tree = jax.tree.flatten(updates, is_leaf=is_gradient_leaf)
        state_leaves, state_tree = jax.tree.flatten(state, is_leaf=is_stored_table)
        param_leaves, param_tree = jax.tree.flatten(params, is_leaf=is_stored_table)
        for i, param in enumerate(param_leaves):
            if is_stored_table(param):
                leaves[i] = distinct_rows(param, leaves[i])
        pairs = [gradient_and_valid(leaf) for leaf in leaves]
        gradients = [gradient for gradient, _ in pairs]
        has_state_rows = list(map(is_gradient_leaf, leaves))
        # Without parameters the gradient has their structure and shapes.
        like = gradients if params is None else param_leaves
        tables = [i if is_row_sparse(g) else None for i, g in enumerate(gradients)]
        owners = tables_of_state(inner, _shapes(like), has_state_rows, gradient_tree, state)
        return cls(
            inner,
            gradients,
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

    def signature(self) -> Any:
        """What row-locality depends on: structures, shapes and dtypes."""
        leaves = [*self.gradients, *self.state, *self.params]
        sizes = [g.nse for g in self.gradients if is_row_sparse(g)]
        return (
            self.trees,
            tuple(sizes),
            tuple((x.shape, x.dtype) for x in map(_shape, leaves)),
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
                raise refusal(f"update changes the structure of its {name}")
        return jax.tree.leaves(updates), jax.tree.leaves(new_state)

    def update(self, extra_args: dict[str, Any]) -> tuple[Any, Any]:
        """The lazy update."""
        rows = list(map(self._rows, self.state_tables, self.state))
        updates, new_state = self.run(
            [_values(g) for g in self.gradients],
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
        new_state = list(map(self._with_rows, self.state_tables, self.state, new_state))
        gradient_tree, state_tree, _ = self.trees
        return gradient_tree.unflatten(updates), state_tree.unflatten(new_state)

    def _rows(self, table: int | None, x: Any) -> Any:
        if table is None:
            return x
        if is_stored_table(x):
            return x.rows(self.gradients[table])
        return gather_rows(x, self.gradients[table].row_ids(), coalesced=True)

    def _with_rows(self, table: int | None, old: Any, new: Any) -> Any:
        if table is None:
            return new
        if is_stored_table(old):
            return old.set_rows(self.gradients[table], new)
        return set_rows(old, self.gradients[table].row_ids(), new, coalesced=True)

    def check_row_local(self, extra_args: dict[str, Any]) -> None:
        """Refuse `inner` unless its update on the touched rows is exact on them."""

        def run(gradients, state, params):
            return self.run(gradients, state, params, extra_args)

        dense = jax.make_jaxpr(run)(*map(_shapes, (self.gradients, self.state, self.params)))
        inputs: list[Kind] = [
            Shared() if table is None else PerRow(table, 0, rest=0)
            for table in self.gradient_tables
        ]
        inputs += [
            Shared() if table is None else PerRow(table, 0)
            for table in self.state_tables + self.param_tables
        ]
        outputs = zip(
            self.gradient_tables + self.state_tables, classify(dense, inputs), strict=True
        )
        reasons = [_why_not(table, kind) for table, kind in outputs]
        few_rows = jax.make_jaxpr(run)(
            list(map(self._shape_of_rows, self.gradient_tables, self.gradients)),
            list(map(self._shape_of_rows, self.state_tables, self.state)),
            list(map(self._shape_of_rows, self.param_tables, self.params)),
        )
        reasons.append(difference(dense.jaxpr, few_rows.jaxpr))
        for why in reasons:
            if why is not None:
                raise refusal(why)

    def _shape_of_rows(self, table: int | None, x: Any) -> Any:
        x = _shape(x)
        if table is None:
            return x
        # On no rows at all JAX leaves operations out.
        rows = max(self.gradients[table].nse, 1)
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    if is_stored_table(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(_values(x)))


def _shapes(leaves: list[Any]) -> list[jax.ShapeDtypeStruct]:
    return list(map(_shape, leaves))


def _values(x: Any) -> Any:
    return x.values if is_row_sparse(x) else x


def _why_not(table: int | None, kind: Kind) -> str | None:
    """Why an output is not what it must be: rows of its table, or shared."""
    if isinstance(kind, Mixed):
        return kind.why
    if isinstance(kind, Shared):
        by_position = table is not None and 0 not in kind.uniform
        return "it treats rows by their position" if by_position else None
    return None if (kind.table, kind.axis) == (table, 0) else "it moves rows elsewhere"


def _check_not_deferring(state: optax.OptState) -> None:
    def is_deferring(x: Any) -> bool:
        return isinstance(x, _DEFERRING)

    for node in jax.tree.leaves(state, is_leaf=is_deferring):
        if is_deferring(node):
            raise refusal(
                f"{type(node).__name__} holds gradients back for a later step, and a row "
                "that this later step does not touch would lose them",
                "Use jmask.multi_steps(...), or jmask.tree.add and one update.",
            )


def _check_extra_args(extra_args: dict[str, Any]) -> None:
    for name, value in extra_args.items():
        if any(map(is_gradient_leaf, jax.tree.leaves(value, is_leaf=is_gradient_leaf))):
            raise refusal(
                f"the extra argument `{name}` holds a row-sparse gradient, and what takes "
                "whole gradients (a line search) is not row-local"
            )
