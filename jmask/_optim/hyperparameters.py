"""Hyperparameters of the named optimizers: their ranges, schedules, and shared arithmetic.

A hyperparameter may be a number of Python or NumPy, checked immediately, or a scalar array
of JAX, possibly traced (`optax.inject_hyperparams`), whose value is not looked at.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from jmask._base.array_types import as_float
from jmask._base.types import Scalar
from jmask._base.validation import check_flag, checked_choice, shown


class Range(NamedTuple):
    """The numbers that a hyperparameter may be: in words, and as a predicate."""

    words: str
    holds: Callable[[float], bool]


POSITIVE = Range("positive and finite", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Range("non-negative and finite", lambda x: 0 <= x < math.inf)
FRACTION = Range("in [0, 1)", lambda x: 0 <= x < 1)
FINITE = Range("finite", math.isfinite)

RANGES = {
    "learning_rate": POSITIVE,
    "rescale_grad": FINITE,
    "clip_gradient": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "lr_decay": NOT_NEGATIVE,
    "momentum": FRACTION,
    "b1": FRACTION,
    "b2": FRACTION,
    "eps": NOT_NEGATIVE,
    "eps_root": NOT_NEGATIVE,
    "initial_accumulator_value": NOT_NEGATIVE,
    "l1": NOT_NEGATIVE,
    "beta": NOT_NEGATIVE,
}


def check_numbers(**values: Scalar) -> None:
    """Refuse hyperparameters that are no numbers, or out of their range."""
    for name, value in values.items():
        check_number(name, value, RANGES[name])


def check_number(name: str, value: Scalar, within: Range | None = None) -> None:
    """Refuse what is neither a number in a range nor a scalar array, which may be traced."""
    if not _is_number(value):
        raise TypeError(f"`{name}` must be a number, got {shown(value)}.")
    if within is not None and _is_known(value) and not within.holds(value):
        raise ValueError(f"`{name}` must be {within.words}, got {value}.")


def check_learning_rate(value: optax.ScalarOrSchedule) -> None:
    """Refuse what is neither a schedule nor a positive number."""
    if callable(value):
        return
    if not _is_number(value):
        raise TypeError(
            "`learning_rate` must be a number, or a schedule (a function of the step count), "
            f"got {shown(value)}."
        )
    check_numbers(learning_rate=value)


def check_state_dtype(state_dtype: DTypeLike | None, name: str = "state_dtype") -> None:
    """Refuse what is no floating dtype; None passes."""
    try:
        fits = state_dtype is None or jnp.issubdtype(jnp.dtype(state_dtype), jnp.floating)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise TypeError(
            f"`{name}` must be a floating dtype, such as jnp.float32, got {state_dtype!r}."
        )


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


@dataclasses.dataclass(frozen=True, eq=False)
class Common:
    """The hyperparameters of all named optimizers, checked; `jmask.sgd` says what each is."""

    learning_rate: optax.ScalarOrSchedule
    weight_decay: Scalar
    clip_gradient: Scalar | None
    rescale_grad: Scalar
    maximize: bool
    decay_mode: str = "l2"

    def __post_init__(self) -> None:
        check_flag("maximize", self.maximize)
        check_learning_rate(self.learning_rate)
        check_numbers(weight_decay=self.weight_decay)
        checked_choice(self.decay_mode, "decay_mode", ("l2", "decoupled"))
        if self.clip_gradient is not None:
            check_numbers(clip_gradient=self.clip_gradient)
        check_numbers(rescale_grad=self.rescale_grad)

    @property
    def decays(self) -> bool:
        """Decide whether there is weight decay, which needs the parameters."""
        return not is_zero(self.weight_decay)

    @property
    def is_decoupled(self) -> bool:
        return self.decays and self.decay_mode == "decoupled"

    def rate(self, count: jax.Array) -> ArrayLike:
        """Return the learning rate of step `count` (from 0)."""
        if not callable(self.learning_rate):
            return self.learning_rate
        value = self.learning_rate(count)
        if not _is_number(value):
            raise TypeError(
                f"`learning_rate` is a schedule that returned {shown(value)} for a step count: "
                "it must return a number."
            )
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.integer):
            return as_float(value)
        return value

    def rescaled(self, gradient: jax.Array) -> jax.Array:
        """Return the gradient times `rescale_grad`, its sign turned to maximize."""
        gradient = -gradient if self.maximize else gradient
        if isinstance(self.rescale_grad, int | float) and self.rescale_grad == 1:
            return gradient
        return gradient * self.rescale_grad

    def clipped(self, gradient: jax.Array) -> jax.Array:
        """Clip the gradient to [-bound, bound] entry by entry; None does not clip."""
        bound = self.clip_gradient
        return gradient if bound is None else jnp.clip(gradient, -bound, bound)

    def decayed(self, gradient: jax.Array, param: jax.Array) -> jax.Array:
        """Return, with "l2", the gradient of the loss plus (weight_decay / 2) * |param|**2."""
        if not self.decays or self.is_decoupled:
            return gradient
        return gradient + self.weight_decay * param

    def with_decoupled_decay(self, step: jax.Array, param: jax.Array, lr: Scalar) -> jax.Array:
        """Return, with "decoupled", the step minus lr * weight_decay * param."""
        return step - lr * self.weight_decay * param if self.is_decoupled else step


def _is_known(value: object) -> TypeGuard[float]:
    """Decide whether a number can be read without waiting for a device: Python's or NumPy's."""
    return isinstance(value, int | float | np.number | np.ndarray)


def _is_number(value: object) -> bool:
    if not isinstance(value, jax.Array | np.ndarray | np.number):
        return isinstance(value, int | float) and not isinstance(value, bool)
    is_real = not jnp.issubdtype(value.dtype, jnp.complexfloating)
    return is_real and value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.number)


def is_zero(value: object) -> bool:
    """Decide whether a hyperparameter is known to be 0, so that its term can be left out."""
    return isinstance(value, int | float) and value == 0


def bias_correction(decay: Scalar, step: jax.Array) -> jax.Array:
    """Return 1 - decay**step, without the cancellation that costs float32 its digits.

    For decay = 0.999 and step = 1, `1 - decay**step` in float32 is off by 3e-5.
    """
    if is_zero(decay):
        return jnp.asarray(1.0)  # takes on precision, as the other does
    is_known = isinstance(decay, int | float)
    log_decay = math.log(decay) if is_known else jnp.log(decay)
    return -jnp.expm1(as_float(step) * log_decay)


def row_mean(x: jax.Array) -> jax.Array:
    """Return the mean over every row of axis 0: (n, *row) -> (n, 1, ..., 1)."""
    return jnp.mean(x, axis=tuple(range(1, x.ndim)), keepdims=True) if x.ndim > 1 else x
