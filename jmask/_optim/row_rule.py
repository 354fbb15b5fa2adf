"""Make optax transformations of row rules: arithmetic on a gradient, a parameter and slots.

    rule(grad, param, *slots, *scalars) -> (step, *slots)        param becomes param + step

`slots` are arrays of the parameter's shape kept from step to step (momentum, sums of
squares), or with one entry for each row; `scalars` change with the step count alone. The same
rule serves dense parameters and, lifted by `lazy`, the touched rows of a table:

    RowRule(MomentumState,
            slots={"momentum": Slot(0.0)},
            rule=lambda g, p, m: (-(0.9 * m + g), 0.9 * m + g))

A rule computes in float32 at least: 16-bit entries are widened before it. Complex entries are
pairs of real numbers for it, as in torch: a slot of complex64 holds what two of float32 would.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from jmask._base.array_types import complex_dtype, is_complex, joint_dtype, real_dtype, wide
from jmask._base.shardings import sharding_of_rows
from jmask._base.types import Table
from jmask._base.validation import check_flag
from jmask._lazy.lazy import densified, lazy
from jmask._lazy.row_local import RowWise
from jmask._optim.hyperparameters import check_state_dtype
from jmask._tables.rows_at import shape_of


class Slot(NamedTuple):
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
        state_type: a named tuple of `count` and the slots, in their order.
        slots: by name in the state.
        rule: (grad, param, *slots, *scalars) -> (step, *slots); elementwise unless a slot is
            per row, and then it may reduce over the axes of a row.
        scalars: count of steps done (int32 scalar) -> the scalars of the rule.
        needs_param: whether `param` is used; otherwise it may be None.
        state_dtype: dtype of the slots; the parameter's if None.
    """

    state_type: type
    slots: Mapping[str, Slot]
    rule: Callable[..., tuple[Any, ...]]
    scalars: Callable[[jax.Array], tuple[Any, ...]] = lambda count: ()
    needs_param: bool = False
    state_dtype: DTypeLike | None = None


class RuledTransformation(RowWise):
    """A transformation of arrays that follows a rule."""

    rule: RowRule


def optimizer(rule: RowRule, lazy_update: bool) -> optax.GradientTransformationExtraArgs:
    """Return the transformation that follows a rule, on the rows of a gradient or on all.

    Its state is the same with and without `lazy_update`, so a run can switch.
    """
    check_flag("lazy_update", lazy_update)
    check_state_dtype(rule.state_dtype)
    return (lazy if lazy_update else densified)(dense_optimizer(rule))


def dense_optimizer(rule: RowRule) -> RuledTransformation:
    """Return the transformation that follows a rule on arrays."""

    def init(params):
        slots = [
            jax.tree.map(functools.partial(_initial, rule, x), params)
            for x in rule.slots.values()
        ]
        return rule.state_type(jnp.zeros((), jnp.int32), *slots)

    def update(updates, state, params=None, **extra_args):
        if params is None and rule.needs_param:
            raise ValueError("`params` must be given to update(): the step depends on them.")
        gradients, tree = jax.tree.flatten(updates)
        given = [None] * len(gradients) if params is None else tree.flatten_up_to(params)
        slots = [tree.flatten_up_to(slot) for slot in state[1:]]
        scalars = rule.scalars(state.count)
        results = [_step(rule, x, scalars) for x in zip(gradients, given, *slots, strict=True)]
        steps, *new = (tree.unflatten([x[i] for x in results]) for i in range(1 + len(slots)))
        return steps, rule.state_type(optax.safe_increment(state.count), *new)

    transformation = RuledTransformation(init, update)
    transformation.rule = rule
    return transformation


def changing_scalars(scalars: Sequence[Any]) -> tuple[list[jax.Array], Callable[..., Any]]:
    """Return the arrays among scalars, and a function of them that returns all scalars."""
    fixed = [None if isinstance(x, jax.Array) else x for x in scalars]

    def all_scalars(changing: Sequence[Any]) -> tuple[Any, ...]:
        arrays = iter(changing)
        return tuple(next(arrays) if x is None else x for x in fixed)

    return [x for x in scalars if isinstance(x, jax.Array)], all_scalars


def _initial(rule: RowRule, slot: Slot, param: Table) -> jax.Array:
    """Return a slot before the first step."""
    like = shape_of(param)
    shape, dtype = like.shape, slot.dtype or rule.state_dtype or like.dtype
    if slot.per_row:
        shape = shape if len(shape) < 2 else (*shape[:-1], 1)
        dtype = real_dtype(dtype)
    elif is_complex(like):
        dtype = complex_dtype(dtype)
    if slot.initial is None:  # not the parameter itself, which may be donated beside it
        return jax.tree.map(lambda x: jnp.array(x, wide(dtype)), param)
    if not slot.per_row:
        return jnp.full_like(param, slot.initial, dtype)
    return jnp.full(shape, slot.initial, dtype, device=sharding_of_rows(param))


def _step(rule: RowRule, entries: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
    """Return the step, in float32 at least, and the new slots, of grad, param and slots.

    The step is rounded where it is added. With 64-bit numbers enabled scalars may be wider.
    """
    grad: Any
    param: Any
    grad, param, *slots = (x if x is None else jnp.asarray(x, wide(x.dtype)) for x in entries)
    are_pairs = any(map(is_complex, (grad, param, *slots)))
    if are_pairs and param is not None:
        grad = grad.astype(joint_dtype(grad, param))
    old = [grad, *slots]
    if are_pairs:
        grad, param, *slots = map(_pairs, (grad, param, *slots))
    floats = [x for x in (grad, param, *slots) if x is not None and _is_float(x)]
    dtype = joint_dtype(*floats) if floats else None
    # But for counts, which no floating dtype holds all of.
    scalars = [x.astype(dtype) if _is_array(x) and x.dtype != jnp.int32 else x for x in scalars]
    new = rule.rule(grad, param, *slots, *scalars)
    if are_pairs:
        new = tuple(map(_unpaired, new, old))
    step, *new_slots = new
    return [step, *(x.astype(y.dtype) for x, y in zip(new_slots, entries[2:], strict=True))]


def _is_array(x: object) -> bool:
    return isinstance(x, jax.Array)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _pairs(x: Any) -> Any:
    """Return complex numbers (n, *row) as (n, *row, 2), and numbers of rows as (n, ..., 1)."""
    if x is None:
        return None
    shape = (*(x.shape or (1,)), 1)
    parts = [x.real, x.imag] if is_complex(x) else [x]
    return jnp.concatenate([part.reshape(shape) for part in parts], axis=-1)


def _unpaired(x: jax.Array, old: jax.Array) -> jax.Array:
    x = lax.complex(*jnp.split(x, 2, axis=-1)) if is_complex(old) else x
    return x.reshape(old.shape)
