"""`lazy(inner)`: any row-local optax transformation, at the cost of the rows touched.

    gradient  RowSparse(ids, g)            ids coalesced first
    rows of   the parameter and of every state array with one row per table row: gathered
    update    inner.update(g, state rows, parameter rows)      all other leaves as they are
    result    RowSparse(ids, updates); state rows scattered back; other rows not touched

Semantics are masked: a row that is not in the gradient keeps its parameter and its state
bit for bit, as in torch's SparseAdam and MXNet's `lazy_update=True`. On the rows that are
in it the result is that of `inner` on the dense gradient, which is proved for `inner` when
it is first traced (see `_row_locality`); an `inner` for which it cannot be is refused.

Which state arrays hold rows is found without knowing `inner`: its `init` is evaluated for
its shapes alone, once as is and once with more rows in each table, and the arrays that
grew by as many rows belong to that table.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmask._parameters import check_parameters, check_gradient
from jmask._row_locality import (
    Kind,
    Mixed,
    PerRow,
    Shared,
    classify,
    same_arithmetic,
)
from jmask._row_sparse import RowSparse, is_row_sparse
from jmask._rows import gather_rows, set_rows

_REFUSED = "jmask.lazy cannot wrap this optax transformation: "
_ADVICE = (
    " Chain jmask.densify() before it to apply it to the dense gradient, keep it outside "
    "for the dense parameters with optax.partition, or use an optimizer that treats every "
    "row by itself."
)

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
        >>> tx = jmask.lazy(optax.adam(0.1))
        >>> params = {"table": jnp.ones((4, 2))}
        >>> state = tx.init(params)
        >>> grads = {"table": jmask.RowSparse([2], jnp.ones((1, 2)), (4, 2))}
        >>> updates, state = tx.update(grads, state, params)
        >>> optax.apply_updates(params, updates)["table"].round(3)
        Array([[1. , 1. ],
               [1. , 1. ],
               [0.9, 0.9],
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
        leaves, structure = jax.tree.flatten(updates, is_leaf=is_row_sparse)
        leaves = [_without_masked(leaf) for leaf in leaves]
        updates = jax.tree.unflatten(structure, leaves)
        tables = [leaf for leaf in leaves if isinstance(leaf, RowSparse)]
        if params is not None:
            check_parameters(params)
            check_gradient(updates, params)
        if not tables:
            return inner.update(updates, state, params, **extra_args)
        _check_extra_args(extra_args)

        lifted = _Lifted.of(inner, updates, state, params)
        key = lifted.key()
        if key not in verified:
            lifted.check_row_local(extra_args)
            verified.add(key)
        return lifted.update(extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class _Lifted:
    """One call of `update`: its arguments as flat leaves, and which of them hold rows.

    Attributes:
        gradients: leaves of the gradient, `RowSparse` ones coalesced.
        state, params: leaves; `params` is empty if there are none.
        state_tables: for each state leaf the position in `gradients` of the table whose
            rows it holds, or None.
    """

    inner: optax.GradientTransformationExtraArgs
    gradients: list[Any]
    state: list[Any]
    params: list[Any]
    structures: tuple[Any, Any, Any]
    state_tables: list[int | None]

    @classmethod
    def of(cls, inner: Any, updates: Any, state: Any, params: Any) -> "_Lifted":
        gradients, gradient_tree = jax.tree.flatten(updates, is_leaf=is_row_sparse)
        gradients = [g.coalesce() if is_row_sparse(g) else g for g in gradients]
        state_leaves, state_tree = jax.tree.flatten(state)
        param_leaves, param_tree = jax.tree.flatten(params)
        shapes = jax.tree.unflatten(gradient_tree, gradients) if params is None else params
        tables = _tables_of_state(inner, shapes, gradients, state_leaves, state_tree)
        structures = (gradient_tree, state_tree, param_tree)
        return cls(inner, gradients, state_leaves, param_leaves, structures, tables)

    def key(self) -> Any:
        """What the proof of row-locality depends on: structures, shapes and dtypes."""
        leaves = (self.gradients, self.state, self.params)
        return (self.structures, *(tuple(map(_signature, part)) for part in leaves))

    def param_table(self, position: int) -> int | None:
        return position if is_row_sparse(self.gradients[position]) else None

    def run(
        self, gradients: list[Any], state: list[Any], params: list[Any], extra: dict
    ) -> tuple[list[Any], list[Any]]:
        """`inner.update` on flat leaves; its updates and state as flat leaves."""
        gradient_tree, state_tree, param_tree = self.structures
        updates, new_state = self.inner.update(
            jax.tree.unflatten(gradient_tree, gradients),
            jax.tree.unflatten(state_tree, state),
            jax.tree.unflatten(param_tree, params),
            **extra,
        )
        _check_structure("updates", updates, gradient_tree)
        _check_structure("state", new_state, state_tree)
        return jax.tree.leaves(updates), jax.tree.leaves(new_state)

    def update(self, extra: dict) -> tuple[Any, Any]:
        """The lazy update."""
        rows = [g.values if is_row_sparse(g) else g for g in self.gradients]
        state = [
            self.rows_of(table, x)
            for table, x in zip(self.state_tables, self.state, strict=True)
        ]
        params = [
            self.rows_of(self.param_table(i), x) for i, x in enumerate(self.params)
        ]
        updates, new_state = self.run(rows, state, params, extra)
        updates = [
            g._with_values(u) if is_row_sparse(g) else u
            for g, u in zip(self.gradients, updates, strict=True)
        ]
        new_state = [
            self.with_rows(table, old, new)
            for table, old, new in zip(
                self.state_tables, self.state, new_state, strict=True
            )
        ]
        gradient_tree, state_tree, _ = self.structures
        return (
            jax.tree.unflatten(gradient_tree, updates),
            jax.tree.unflatten(state_tree, new_state),
        )

    def rows_of(self, table: int | None, x: Any) -> Any:
        if table is None:
            return x
        return gather_rows(x, self.gradients[table]._ids(), coalesced=True)

    def with_rows(self, table: int | None, old: Any, new: Any) -> Any:
        if table is None:
            return new
        return set_rows(old, self.gradients[table]._ids(), new, coalesced=True)

    def check_row_local(self, extra: dict) -> None:
        """Refuse `inner` unless its update on the touched rows is exact on them."""
        shape = jax.ShapeDtypeStruct
        state = [shape(x.shape, x.dtype) for x in map(jnp.asarray, self.state)]
        params = [shape(x.shape, x.dtype) for x in map(jnp.asarray, self.params)]
        dense = [
            shape(g.shape, g.dtype) for g in self.gradients
        ]
        kinds: list[Kind] = [
            PerRow(i, 0, rest=g.dtype.type(0)) if is_row_sparse(g) else Shared()
            for i, g in enumerate(self.gradients)
        ]
        kinds += [Shared() if t is None else PerRow(t, 0) for t in self.state_tables]
        kinds += [
            Shared() if self.param_table(i) is None else PerRow(i, 0)
            for i in range(len(params))
        ]
        run = lambda g, s, p: self.run(g, s, p, extra)
        program = jax.make_jaxpr(run)(dense, state, params)
        outputs = classify(program, kinds)
        tables = [self.param_table(i) for i in range(len(dense))] + self.state_tables
        for table, kind in zip(tables, outputs, strict=True):
            why = _why_not(table, kind)
            if why is not None:
                raise ValueError(_REFUSED + why + "." + _ADVICE)

        few_rows = jax.make_jaxpr(run)(
            [g.values if is_row_sparse(g) else g for g in self.gradients],
            [self.few(t, x) for t, x in zip(self.state_tables, self.state, strict=True)],
            [self.few(self.param_table(i), x) for i, x in enumerate(self.params)],
        )
        why = same_arithmetic(program.jaxpr, few_rows.jaxpr)
        if why is not None:
            raise ValueError(_REFUSED + why + "." + _ADVICE)

    def few(self, table: int | None, x: Any) -> Any:
        """The shape of the rows of `x` that the update runs on."""
        if table is None:
            return x
        rows = self.gradients[table].values.shape[0]
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)


def _why_not(table: int | None, kind: Kind) -> str | None:
    if isinstance(kind, Mixed):
        return kind.why
    if table is None:
        return None if isinstance(kind, Shared) else "part of its state is one row per row"
    if isinstance(kind, Shared):
        return None if 0 in kind.uniform else "it treats rows by their position"
    same = (kind.table, kind.axis) == (table, 0)
    return None if same else "it moves rows"


def _tables_of_state(
    inner: Any, params: Any, gradients: list[Any], state: list[Any], structure: Any
) -> list[int | None]:
    """For each state leaf, which table's rows it holds, from how it grows with them."""
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in jax.tree.leaves(params, is_leaf=is_row_sparse)
    ]
    # Distinct numbers of extra rows, none of them a sum or multiple of others, so that a
    # state array that grows by one of them has one row for each row of that table.
    table_positions = [i for i, g in enumerate(gradients) if is_row_sparse(g)]
    base = len(table_positions) + 1
    extra = {position: base + k for k, position in enumerate(table_positions)}
    grown = [
        jax.ShapeDtypeStruct((x.shape[0] + extra[i], *x.shape[1:]), x.dtype)
        if i in extra
        else x
        for i, x in enumerate(shapes)
    ]
    tree = jax.tree.structure(params, is_leaf=is_row_sparse)
    usual = jax.eval_shape(inner.init, jax.tree.unflatten(tree, shapes))
    larger = jax.eval_shape(inner.init, jax.tree.unflatten(tree, grown))
    _check_state(usual, state, structure)
    owners = {growth: position for position, growth in extra.items()}
    return [
        _owner(x.shape, y.shape, owners)
        for x, y in zip(jax.tree.leaves(usual), jax.tree.leaves(larger), strict=True)
    ]


def _owner(
    shape: tuple[int, ...], grown: tuple[int, ...], owners: dict[int, int]
) -> int | None:
    if shape == grown:
        return None
    if len(shape) == len(grown) and shape[1:] == grown[1:]:
        owner = owners.get(grown[0] - shape[0])
        if owner is not None:
            return owner
    raise ValueError(
        f"{_REFUSED}its state holds an array of shape {shape} that depends on the number "
        f"of rows of a table, but has not one entry for each of them.{_ADVICE}"
    )


def _check_state(expected: Any, leaves: list[Any], structure: Any) -> None:
    if jax.tree.structure(expected) != structure:
        raise ValueError(
            "`state` was not made by `init` of this transformation for these parameters: "
            f"expected {jax.tree.structure(expected)}, got {structure}."
        )
    for want, (path, have) in zip(
        jax.tree.leaves(expected),
        jax.tree.leaves_with_path(jax.tree.unflatten(structure, leaves)),
        strict=True,
    ):
        if want.shape != jnp.shape(have):
            raise ValueError(
                f"`state{jax.tree_util.keystr(path)}` has shape {jnp.shape(have)}, "
                f"expected {want.shape} for these parameters."
            )


def _check_structure(name: str, tree: Any, expected: Any) -> None:
    if jax.tree.structure(tree) != expected:
        raise ValueError(
            f"{_REFUSED}its {name} have another structure than those passed in: "
            f"{jax.tree.structure(tree)}, expected {expected}."
        )


def _check_not_deferring(state: Any) -> None:
    is_deferring: Callable[[Any], bool] = lambda x: isinstance(x, _DEFERRING)
    for node in jax.tree.leaves(state, is_leaf=is_deferring):
        if is_deferring(node):
            raise ValueError(
                f"{_REFUSED}{type(node).__name__} holds gradients back for a later step, "
                "and a row that this later step does not touch would lose them. Add the "
                "row-sparse gradients of the microbatches instead, and update once."
            )


def _check_extra_args(extra_args: dict[str, Any]) -> None:
    for name, value in extra_args.items():
        if any(map(is_row_sparse, jax.tree.leaves(value, is_leaf=is_row_sparse))):
            raise ValueError(
                f"{_REFUSED}it takes a gradient as the extra argument `{name}`, and its use "
                f"of whole gradients (a line search) is not row-local.{_ADVICE}"
            )


def _without_masked(leaf: Any) -> Any:
    """`MaskedNode` for a gradient whose two leaves optax masked out one by one."""
    if is_row_sparse(leaf) and isinstance(leaf.values, optax.MaskedNode):
        return optax.MaskedNode()
    return leaf


def _signature(leaf: Any) -> Any:
    if is_row_sparse(leaf):
        return (leaf.shape, leaf.nse, leaf.dtype)
    leaf = jnp.asarray(leaf)
    return (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
