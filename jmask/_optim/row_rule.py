"""Make optax transformations of row rules: arithmetic on a gradient, a parameter and slots.

    rule(grad, param, *slots, *scalars) -> (step, *slots)        param becomes param + step

`slots` are arrays of the parameter's shape kept from step to step (momentum, sums of
squares), or with one entry for each row; `scalars` change with the step count alone. The same
rule serves dense parameters and, lifted by `lazy`, the touched rows of a table:

    lazy(row_rule(MomentumState, {"momentum": Slot(0.0)},
                  lambda g, p, m: (-(0.9 * m + g), 0.9 * m + g)))

A rule computes in float32 at least: 16-bit entries are widened before it. Complex entries are
pairs of real numbers for it, as in torch: a slot of complex64 holds what two of float32 would.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmask._base.array_types import (
    as_float,
    complex_dtype,
    is_complex,
    joint_dtype,
    real_dtype,
    wide,
)
from jmask._base.shardings import sharding_of_rows
from jmask._base.types import Argument, PyTree, PyTreeDef, Scalar
from jmask._base.validation import check_flag, checked_choice, checked_dtype, shown
from jmask._lazy.checks import is_gradient_leaf, with_whole_rows
from jmask._lazy.lazy import densified, lazy
from jmask._lazy.row_local import RowWise
from jmask._tables.rows_at import shape_of
from jmask._tensors.row_sparse import is_row_sparse

Results = tuple[Argument, ...]

# --- hyperparameters ----------------------------------------------------------------------
#
# A hyperparameter may be a number of Python or NumPy, checked immediately, or a scalar array
# of JAX, possibly traced (`optax.inject_hyperparams`), whose value is not looked at.

_KNOWN = int | float | np.number | np.ndarray

_POSITIVE = "positive and finite", lambda x: 0 < x < math.inf
_NOT_NEGATIVE = "non-negative and finite", lambda x: 0 <= x < math.inf
_FRACTION = "in [0, 1)", lambda x: 0 <= x < 1
_RANGES = {
    **dict.fromkeys(("learning_rate", "clip_gradient", "max_norm"), _POSITIVE),
    **dict.fromkeys(("weight_decay", "lr_decay", "l1", "beta"), _NOT_NEGATIVE),
    **dict.fromkeys(("eps", "eps_root", "initial_accumulator_value"), _NOT_NEGATIVE),
    **dict.fromkeys(("momentum", "b1", "b2", "decay"), _FRACTION),
    "rescale_grad": ("finite", math.isfinite),
    "ord": ("at least 1", lambda x: x >= 1),
}


def check_numbers(**values: Scalar | optax.ScalarOrSchedule) -> None:
    """Refuse hyperparameters that are no numbers, or out of range; a rate may be a schedule."""
    for name, value in values.items():
        is_rate = name == "learning_rate"
        if is_rate and callable(value):
            continue
        if not _is_number(value):
            schedule = ", or a schedule (a function of the step count)" * is_rate
            raise TypeError(f"`{name}` must be a number{schedule}, got {shown(value)}.")
        words, holds = _RANGES[name]
        # A JAX array may be traced, or not be there yet.
        if isinstance(value, _KNOWN) and not holds(value):
            raise ValueError(f"`{name}` must be {words}, got {value}.")


def check_denominator(**terms: Scalar) -> None:
    """Refuse negative terms, and all of them zero: a zero gradient would divide 0 by 0."""
    check_numbers(**terms)
    if all(map(is_zero, terms.values())):
        *names, last = (f"`{name}`" for name in terms)
        *values, end = map(str, terms.values())
        raise ValueError(
            f"one of {', '.join(names)} and {last} must be positive, or a gradient of zero "
            f"divides 0 by 0: got {', '.join(values)} and {end}."
        )


def _is_number(value: object) -> bool:
    if not isinstance(value, jax.Array | np.ndarray | np.number):
        return isinstance(value, int | float) and not isinstance(value, bool)
    is_real = not jnp.issubdtype(value.dtype, jnp.complexfloating)
    return is_real and value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.number)


def in_floats(value: Argument) -> Argument:
    """Return the value; an integer of NumPy or JAX as a float, since unsigned ones wrap."""
    if not jnp.issubdtype(getattr(value, "dtype", float), jnp.integer):
        return value
    return as_float(value) if isinstance(value, jax.Array) else float(value)


def is_zero(value: object) -> bool:
    """Decide whether a hyperparameter is known to be 0, so that its term can be left out."""
    return isinstance(value, _KNOWN) and bool(value == 0)


# --- rules --------------------------------------------------------------------------------


class Slot(NamedTuple):
    """An array of the state."""

    # Its value before the first step; the parameter's, in float32 at least, if None.
    initial: Scalar | None
    # Whether it has one entry for each row: (V, 1) for a parameter (V, D), and (M, V, 1) for
    # (M, V, D), since M may number tables. In one table of rows (V, D) the V entries of a row
    # are equal.
    per_row: bool = False
    dtype: DTypeLike | None = None  # of the array; the rule's, or the parameter's, if None


class RowRule(RowWise):
    """A transformation of arrays that follows a rule; see `row_rule`."""

    slots: Mapping[str, Slot]
    rule: Callable[..., Results]
    scalars: Callable[[jax.Array], Results]


def row_rule(
    state_type: type,
    slots: Mapping[str, Slot],
    rule: Callable[..., Results],
    scalars: Callable[[jax.Array], Results] = lambda count: (),
    *,
    needs_param: bool = False,
    state_dtype: DTypeLike | None = None,
) -> RowRule:
    """Return the transformation that follows a rule.

    Args:
        state_type: a named tuple of the count of steps and the slots.
        slots: by name, in the order of `state_type`.
        rule: elementwise, unless a slot is per row: then it may reduce over the axes of a row.
        scalars: count of steps done (int32 scalar) -> the scalars of the rule.
        needs_param: whether the rule reads the parameter; otherwise it may be None.
        state_dtype: dtype of the slots; the parameter's if None.
    """

    def init(params):
        def initial(slot: Slot, param: jax.Array) -> jax.Array:
            like = shape_of(param)
            dtype = slot.dtype or state_dtype or like.dtype
            if slot.initial is None:  # not the parameter itself: both may be donated
                return jnp.array(param, wide(dtype))
            if slot.per_row:
                shape = like.shape if len(like.shape) < 2 else (*like.shape[:-1], 1)
                placed = sharding_of_rows(param)
                return jnp.full(shape, slot.initial, real_dtype(dtype), device=placed)
            dtype = complex_dtype(dtype) if is_complex(like) else dtype
            return jnp.full_like(param, slot.initial, dtype)

        arrays = [jax.tree.map(functools.partial(initial, x), params) for x in slots.values()]
        return state_type(jnp.zeros((), jnp.int32), *arrays)

    def update(updates, state, params=None, **extra_args):
        if params is None and needs_param:
            raise ValueError("`params` must be given to update(): the step depends on them.")
        tree: PyTreeDef
        gradients, tree = jax.tree.flatten(updates)
        given = [None] * len(gradients) if params is None else tree.flatten_up_to(params)
        old = [tree.flatten_up_to(slot) for slot in state[1:]]
        now = scalars(state.count)
        results = [_step(rule, x, now) for x in zip(gradients, given, *old, strict=True)]
        steps, *new = (tree.unflatten([x[i] for x in results]) for i in range(1 + len(old)))
        return steps, state_type(optax.safe_increment(state.count), *new)

    transformation = RowRule(init, update)
    transformation.slots, transformation.rule, transformation.scalars = slots, rule, scalars
    return transformation


def watching(
    init: optax.TransformInitFn, new_state: Callable[..., PyTree]
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation that passes updates on and keeps `new_state` of them.

    Lines of packed tables come to it whole: where a row of one moves by zero, all that is kept
    of the line stays true.
    """

    def update(updates, state, params=None, **extra_args):
        return updates, new_state(updates, state, params, **extra_args)

    lifted = lazy(RowWise(init, update))

    def update_lines(updates, state, params=None, **extra_args):
        lines = with_whole_rows(updates, lines=True)
        new, state = lifted.update(lines, state, params, **extra_args)
        is_packed = lambda x: is_row_sparse(x) and x.width
        passed = lambda given, new: given if is_packed(given) else new
        return jax.tree.map(passed, updates, new, is_leaf=is_gradient_leaf), state

    return optax.GradientTransformationExtraArgs(lifted.init, update_lines)


@dataclasses.dataclass(frozen=True, eq=False)
class Common:
    """The hyperparameters of all named optimizers, checked; `jmask.sgd` says what each is."""

    learning_rate: optax.ScalarOrSchedule
    weight_decay: Scalar
    decay_mode: str
    incoming: tuple[Scalar | None, Scalar, bool]  # clip_gradient, rescale_grad, maximize
    lazy_update: bool
    state_dtype: DTypeLike | None

    def __post_init__(self) -> None:
        bound, scale, maximize = self.incoming
        check_flag("maximize", maximize)
        check_flag("lazy_update", self.lazy_update)
        check_numbers(learning_rate=self.learning_rate)
        check_numbers(weight_decay=self.weight_decay, rescale_grad=scale)
        checked_choice("decay_mode", self.decay_mode, ("l2", "decoupled"))
        if bound is not None:
            check_numbers(clip_gradient=bound)
        if self.state_dtype is not None:
            checked_dtype("state_dtype", self.state_dtype, floating=True)

    def rate(self, count: jax.Array) -> ArrayLike:
        """Return the learning rate of step `count` (from 0)."""
        if not callable(self.learning_rate):
            return in_floats(self.learning_rate)
        value = self.learning_rate(count)
        if not _is_number(value):
            raise TypeError(
                f"`learning_rate` is a schedule that returned {shown(value)} for a step count: "
                "it must return a number."
            )
        return in_floats(value)

    def optimizer(
        self,
        state_type: type,
        slots: Mapping[str, Slot],
        rule: Callable[..., Results],
        *,
        scalars: Callable[[jax.Array, Argument], Results] = lambda count, lr: (lr,),
        clips_last: bool = False,
        needs_param: bool = False,
    ) -> optax.GradientTransformationExtraArgs:
        """Return a named optimizer, on the rows of a gradient or on all; its state is the same.

        Args:
            rule: (grad, param, *slots, lr, *scalars) -> (step, *slots). The gradient is
                rescaled, clipped and decayed; what is decoupled is added to the step.
            scalars: (count of steps done, lr) -> the rate that the rule gets, and more scalars.
            clips_last: whether the gradient is clipped after "l2" decay.
        """
        (bound, scale, maximize), decay = self.incoming, self.weight_decay
        decays = () if is_zero(decay) else (self.decay_mode,)
        bound = in_floats(bound)
        clip = lambda x: x if bound is None else jnp.clip(x, -bound, bound)

        def common_rule(grad, param, *others):
            grad = -grad if maximize else grad
            if not (isinstance(scale, int | float) and scale == 1):
                grad = grad * scale
            grad = grad if clips_last else clip(grad)
            if "l2" in decays:  # the gradient of (weight_decay / 2) * |param|**2
                grad = grad + decay * param
            grad = clip(grad) if clips_last else grad
            step, *new = rule(grad, param, *others)
            if "decoupled" in decays:
                step = step - others[len(slots)] * decay * param
            return step, *new

        tx = row_rule(
            state_type,
            slots,
            common_rule,
            lambda count: scalars(count, self.rate(count)),
            needs_param=needs_param or bool(decays),
            state_dtype=self.state_dtype,
        )
        return lazy(tx) if self.lazy_update else densified(tx)


def mean_of_row(x: jax.Array) -> jax.Array:
    """Return the mean over every row of axis 0: (n, *row) -> (n, 1, ..., 1)."""
    return jnp.mean(x, axis=tuple(range(1, x.ndim)), keepdims=True) if x.ndim > 1 else x


def _step(
    rule: Callable[..., Results], entries: Sequence[Argument], scalars: Results
) -> list[jax.Array]:
    """Return the step, in float32 at least, and the new slots, of grad, param and slots.

    The step is rounded where it is added. With 64-bit numbers enabled scalars may be wider.
    """
    arrays: list[Argument]
    arrays = [x if x is None else jnp.asarray(x, wide(x.dtype)) for x in entries]
    are_pairs = any(map(is_complex, arrays))
    if are_pairs and arrays[1] is not None:
        arrays[0] = arrays[0].astype(joint_dtype(*arrays[:2]))
    old = [arrays[0], *arrays[2:]]
    if are_pairs:
        arrays = list(map(_pairs, arrays))
    floats = [x for x in arrays if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)]
    dtype = joint_dtype(*floats) if floats else None
    # But for counts, which no floating dtype holds all of.
    is_count = lambda x: not isinstance(x, jax.Array) or x.dtype == jnp.int32
    new = rule(*arrays, *(x if is_count(x) else x.astype(dtype) for x in scalars))
    step, *slots = map(_unpaired, new, old) if are_pairs else new
    return [step, *(x.astype(y.dtype) for x, y in zip(slots, entries[2:], strict=True))]


def _pairs(x: jax.Array | None) -> jax.Array | None:
    """Return complex numbers (n, *row) as (n, *row, 2), and numbers of rows as (n, ..., 1)."""
    if x is None:
        return None
    shape = (*(x.shape or (1,)), 1)
    parts = [x.real, x.imag] if is_complex(x) else [x]
    return jnp.concatenate([part.reshape(shape) for part in parts], axis=-1)


def _unpaired(x: jax.Array, old: jax.Array) -> jax.Array:
    x = lax.complex(*jnp.split(x, 2, axis=-1)) if is_complex(old) else x
    return x.reshape(old.shape)
