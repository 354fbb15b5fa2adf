"""Define optimizers as row rules: arithmetic on a gradient, a parameter and slots, row by row.

    rule(grad, param, *slots, *scalars) -> (step, *slots)        param becomes param + step

`slots` are arrays of the parameter's shape kept from step to step (momentum, sums of
squares), or with one entry for each row; `scalars` change with the step count alone. The same
rule serves dense parameters and, lifted by `lazy`, the touched rows of a table:

    RowRule(slots={"momentum": Slot(0.0)},
            scalars=lambda count: (),
            rule=lambda g, p, m: (-(0.9 * m + g), 0.9 * m + g))

A rule computes in float32 at least: 16-bit entries are widened before it. Complex entries are
pairs of real numbers for it, as in torch: a slot of complex64 holds what two of float32 would.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from jmask._base.array_types import (
    complex_dtype,
    is_complex,
    joint_dtype,
    real_dtype,
    sharding_of_rows,
    wide,
)
from jmask._base.types import Gradient, Gradients, OptState, Params, Table
from jmask._deferred.step import without_rows
from jmask._kernels.update_rows import RowUpdate, updated
from jmask._lazy.lazy import lazy, on_every_table
from jmask._lazy.one_pass import OnePassTransformation
from jmask._tables.stored_table import RowsAt, is_stored_table, shape_of
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import is_row_sparse
from jmask._updates.apply import (
    Fit,
    apply_updates,
    dense_parameters,
    densify,
    noticing_dense_tables,
)
from jmask._updates.checks import (
    check_parameters,
    check_structure,
    is_gradient_leaf,
    with_wide_rows,
)
from jmask._updates.eager import compiled_outside_jit
from jmask._updates.row_update import update_rows
from jmask._updates.state_rows import check_made_by, check_state_type


@dataclasses.dataclass(frozen=True)
class Slot:
    """An array of the state.

    Attributes:
        initial: its value before the first step; the parameter's, in float32 at least, if None.
        per_row: whether it has one entry for each row: (V, 1) for a parameter (V, D). It is
            (M, V, 1) for (M, V, D), which may be a stack of M tables as well as one table of
            rows (V, D); their entries are all the same then.
        dtype: of the array; the rule's, or the parameter's, if None.
    """

    initial: Any
    per_row: bool = False
    dtype: DTypeLike | None = None


@dataclasses.dataclass(frozen=True)
class RowRule:
    """An optimizer's arithmetic.

    Attributes:
        slots: by name in the state.
        scalars: count of steps done (int32 scalar) -> the scalars of the rule.
        rule: (grad, param, *slots, *scalars) -> (step, *slots); elementwise unless a slot is
            per row, and then it may reduce over the axes of a row.
        needs_param: whether `param` is used; otherwise it may be None.
        state_dtype: dtype of the slots; the parameter's if None.
        linear: whether the step is linear in the gradient, without slots and parameter: then
            rows with equal indices may be added one at a time.
    """

    slots: Mapping[str, Slot]
    scalars: Callable[[jax.Array], tuple[Any, ...]]
    rule: Callable[..., tuple[Any, ...]]
    needs_param: bool
    state_dtype: DTypeLike | None = None
    linear: bool = False

    def initial_slot(self, slot: Slot, param: Table) -> jax.Array:
        """Return a slot before the first step."""
        like = shape_of(param)
        shape, dtype = like.shape, slot.dtype or self.state_dtype or like.dtype
        if slot.per_row:
            shape = shape if len(shape) < 2 else (*shape[:-1], 1)
            dtype = real_dtype(dtype)
        elif is_complex(like):
            dtype = complex_dtype(dtype)
        if slot.initial is None:  # not the parameter itself, which may be donated beside it
            return jax.tree.map(lambda x: jnp.array(x, wide(dtype)), param)
        if is_stored_table(param):
            return param.full(shape[1:], slot.initial, dtype)
        if not slot.per_row:
            return jnp.full_like(param, slot.initial, dtype)
        return jnp.full(shape, slot.initial, dtype, device=sharding_of_rows(param))

    def on_entries(self, entries: Sequence[Any], scalars: Sequence[Any]) -> tuple[Any, ...]:
        """Run the rule on grad, param and slots, in float32 at least; None is passed on.

        With 64-bit numbers enabled the scalars may be wider.
        """
        entries = [_wide(x) for x in entries]
        if any(map(is_complex, entries)):
            return self._on_pairs(entries, scalars)
        floating = [
            x for x in entries if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        dtype = joint_dtype(*floating) if floating else None
        scalars = [
            x.astype(dtype) if isinstance(x, jax.Array) and x.dtype != jnp.int32 else x
            for x in scalars  # but counts, which no floating dtype holds all of
        ]
        return self.rule(*entries, *scalars)

    def _on_pairs(self, entries: Sequence[Any], scalars: Sequence[Any]) -> tuple[Any, ...]:
        """Run the rule on the real and the imaginary parts, as on a row twice as long."""
        grad, param, *slots = entries
        grad = grad if param is None else grad.astype(joint_dtype(grad, param))
        entries = [grad, param, *slots]
        # An elementwise rule sees the parts in turn. A rule per row needs both together: its
        # mean is over 2 D numbers.
        if self.one_pass():
            parts = [
                self.on_entries([None if x is None else part(x) for x in entries], scalars)
                for part in (jnp.real, jnp.imag)
            ]
            return tuple(map(lax.complex, *parts))

        def joined(x: Gradient) -> Gradient:
            parts = [x.real, x.imag] if is_complex(x) else [x]
            shape = (*(x.shape or (1,)), 1)
            return jnp.concatenate([part.reshape(shape) for part in parts], axis=-1)

        new = self.on_entries([None if x is None else joined(x) for x in entries], scalars)
        return tuple(
            lax.complex(*jnp.split(x, 2, axis=-1)).reshape(grad.shape)
            if is_complex(old)
            else x.reshape(old.shape)
            for x, old in zip(new, (grad, *slots), strict=True)
        )

    def one_pass(self) -> bool:
        """Decide whether entries of parameter and slots correspond one to one."""
        return not any(slot.per_row for slot in self.slots.values())


def changing_scalars(scalars: Sequence[Any]) -> tuple[list[jax.Array], Callable[..., Any]]:
    """Return the arrays among scalars, and a function of them that returns all scalars."""
    fixed = [None if isinstance(x, jax.Array) else x for x in scalars]

    def all_scalars(changing: Sequence[Any]) -> tuple[Any, ...]:
        arrays = iter(changing)
        return tuple(next(arrays) if x is None else x for x in fixed)

    return [x for x in scalars if isinstance(x, jax.Array)], all_scalars


def optimizer(
    rule: RowRule, state_type: type, lazy_update: bool
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation that follows a rule.

    The state is a named tuple of `count` and the slots, in the rule's order. It is the same
    with and without `lazy_update`, so a run can switch.
    """
    dense = dense_optimizer(rule, state_type)
    if lazy_update:
        lifted = OnePassTransformation(*lazy(dense))
        lifted.rule = rule
        on_rows = functools.partial(_apply_gradients, rule, lifted)
        step = on_every_table(lifted.init, lifted.update, on_rows, applies=True)
        lifted.apply_gradients = noticing_dense_tables(compiled_outside_jit(step))
        return lifted
    return densified(dense)


def densified(
    dense: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return `dense` for row-sparse gradients, which become dense: all rows are updated."""
    to_dense = densify()

    def update(updates, state, params=None, **extra_args):
        updates, _ = to_dense.update(updates, to_dense.init(params), params)
        return dense.update(updates, state, params, **extra_args)

    update = compiled_outside_jit(on_every_table(dense.init, update, update))
    return optax.GradientTransformationExtraArgs(dense.init, update)


def _apply_gradients(
    rule: RowRule,
    lifted: optax.GradientTransformationExtraArgs,
    grads: Gradients,
    state: OptState,
    params: Params,
) -> tuple[Any, Any]:
    check_structure(grads, params)
    # A state of other shapes would broadcast, one of another dtype go on in it for ever.
    check_made_by(lifted.init, state, params)
    structure: Any
    leaves, structure = jax.tree.flatten(grads, is_leaf=is_gradient_leaf)
    if any(isinstance(leaf, MaskedTensor) for leaf in leaves):
        updates, state = lifted.update(grads, state, params)
        return apply_updates(params, updates), state
    leaves = with_wide_rows(leaves)
    columns = [structure.flatten_up_to(tree) for tree in (params, *state[1:])]
    scalars = rule.scalars(state.count)
    rows = updated(
        [
            _new_tables(rule, gradient, tables, scalars)
            for gradient, *tables in zip(leaves, *columns, strict=True)
        ]
    )
    params, *slots = (
        structure.unflatten([tables[i] for tables in rows]) for i in range(len(columns))
    )
    return params, type(state)(optax.safe_increment(state.count), *slots)


def _new_tables(
    rule: RowRule, gradient: Gradient, tables: list[Any], scalars: tuple[Any, ...]
) -> RowUpdate | list[Any]:
    """Return parameter and slots after one step, for `updated` to finish."""
    # `Update` functions are static parameters of a primitive, which JAX caches: closing over a
    # tracer would leak it. Python numbers are compiled in as constants.
    traced, all_scalars = changing_scalars(scalars)
    dtypes = _dtypes(tables)

    def new_entries(*entries: Any) -> list[Any]:
        param, *slots = entries[: len(dtypes)]
        grad, *traced = entries[len(dtypes) :]
        step, *slots = rule.on_entries((grad, param, *slots), all_scalars(traced))
        return _cast((_wide(param) + step, *slots), dtypes)

    def on_rows(at: RowsAt, tables: Sequence[Any], traced: Sequence[Any]) -> list[Any]:
        param, *slots = tables
        entries = (
            at.values,
            at.read(param) if rule.needs_param else None,
            *map(at.read, slots),
        )
        step, *rows = rule.on_entries(entries, all_scalars(traced))
        return [at.with_step(param, step), *map(at.write, slots, rows)]

    def linear_step(rows: jax.Array) -> jax.Array:
        return rule.on_entries((rows, None), scalars)[0]

    if not is_row_sparse(gradient):
        return new_entries(*tables, gradient, *traced)
    return update_rows(
        new_entries,
        tables,
        gradient,
        traced,
        is_elementwise=rule.one_pass(),
        on_rows=on_rows,
        linear=linear_step if rule.linear else None,
    )


def dense_optimizer(rule: RowRule, state_type: type) -> optax.GradientTransformationExtraArgs:
    """Return the transformation that follows a rule on arrays; its state as of `optimizer`."""

    def init(params):
        check_parameters(params)
        params = without_rows(dense_parameters(params))
        slots = [
            jax.tree.map(
                functools.partial(rule.initial_slot, slot), params, is_leaf=is_stored_table
            )
            for slot in rule.slots.values()
        ]
        return state_type(jnp.zeros((), jnp.int32), *slots)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None and rule.needs_param:
            raise ValueError("`params` must be given to update(): the step depends on them.")
        check_state_type(state, state_type)
        if params is not None:
            check_parameters(params)
            params = Fit.of(updates, params).params
            check_structure(updates, params)
            check_made_by(init, state, params)
        gradients, structure = jax.tree.flatten(updates)
        none = [None] * len(gradients)
        columns = [none if params is None else structure.flatten_up_to(params)]
        columns += [structure.flatten_up_to(slot) for slot in state[1:]]
        scalars = rule.scalars(state.count)
        results = []
        for leaves in zip(gradients, *columns, strict=True):
            step, *slots = rule.on_entries(leaves, scalars)
            # The step stays wide, to be rounded once.
            results.append((step, *_cast(slots, _dtypes(leaves[2:]))))
        steps, *slots = (
            structure.unflatten([result[i] for result in results])
            for i in range(1 + len(rule.slots))
        )
        return steps, state_type(optax.safe_increment(state.count), *slots)

    return optax.GradientTransformationExtraArgs(init, update)


def _wide(x: Gradient) -> Gradient:
    return None if x is None else jnp.asarray(x, wide(shape_of(x).dtype))


def _dtypes(old: Sequence[Any]) -> list[Any]:
    return [shape_of(x).dtype for x in old]


def _cast(new: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [x.astype(dtype) for x, dtype in zip(new, dtypes, strict=True)]
