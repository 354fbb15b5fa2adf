"""Hyperparameters of the named optimizers: checks, schedules, and shared arithmetic.

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
from jmask._base.types import Options, Scalar
from jmask._base.validation import check_flag, checked_choice, naming_arguments, shown

# What weight decay is added to: the gradient, so that an adaptive optimizer rescales it, or
# the step, so that a row shrinks by the same factor whatever its gradients.
DECAY_MODES = ("l2", "decoupled")


# The names that torch, Keras, MXNet and optax give these arguments.
naming_hyperparameters = naming_arguments(
    lr="write `learning_rate`",
    betas="write `b1` and `b2`",
    beta1="write `b1`",
    beta2="write `b2`",
    beta_1="write `b1`",
    beta_2="write `b2`",
    epsilon="write `eps`",
    wd="write `weight_decay`",
    mask="parameters that are not to decay take an optimizer without `weight_decay`, by "
    "optax.partition, or jmask.adamw with this mask",
    mu_dtype="write `state_dtype`",
    accumulator_dtype="write `state_dtype`",
)


class Range(NamedTuple):
    """The numbers that a hyperparameter may be: in words, and as a predicate."""

    words: str
    holds: Callable[[float], bool]


POSITIVE = Range("positive and finite", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Range("non-negative and finite", lambda x: 0 <= x < math.inf)
FRACTION = Range("in [0, 1)", lambda x: 0 <= x < 1)
FINITE = Range("finite", math.isfinite)


def check_number(name: str, value: Scalar, within: Range | None = None) -> None:
    """Refuse what is neither a number in a range nor a scalar array, which may be traced."""
    if not _is_number(value):
        raise TypeError(f"`{name}` must be a number, got {shown(value)}.")
    if within is not None and is_known(value) and not within.holds(value):
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
    check_number("learning_rate", value, POSITIVE)


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


def is_known(value: object) -> TypeGuard[float]:
    """Decide whether a number can be read without waiting for a device: Python's or NumPy's."""
    return isinstance(value, int | float | np.number | np.ndarray)


def _is_number(value: object) -> bool:
    if not isinstance(value, jax.Array | np.ndarray | np.number):
        return isinstance(value, int | float) and not isinstance(value, bool)
    is_real = not jnp.issubdtype(value.dtype, jnp.complexfloating)
    return is_real and value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.number)


def check_denominator(**terms: Scalar) -> None:
    """Refuse negative terms, and all of them zero: a zero gradient would divide 0 by 0."""
    for name, value in terms.items():
        check_number(name, value, NOT_NEGATIVE)
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
    lazy_update: bool
    state_dtype: DTypeLike | None
    decay_mode: str = "l2"

    @classmethod
    def among(cls, arguments: Options) -> "Common":
        """Return those among the arguments of an optimizer."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: arguments[name] for name in names if name in arguments})

    def __post_init__(self) -> None:
        check_flag("maximize", self.maximize)
        check_flag("lazy_update", self.lazy_update)
        check_learning_rate(self.learning_rate)
        check_number("weight_decay", self.weight_decay, NOT_NEGATIVE)
        checked_choice(self.decay_mode, "decay_mode", DECAY_MODES)
        if self.clip_gradient is not None:
            check_number("clip_gradient", self.clip_gradient, POSITIVE)
        check_number("rescale_grad", self.rescale_grad, FINITE)
        check_state_dtype(self.state_dtype)

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
        if self.maximize:
            gradient = -gradient
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


def is_zero(value: object) -> bool:
    """Decide whether a hyperparameter is known to be 0, so that its term can be left out."""
    return isinstance(value, int | float) and value == 0


def bias_correction(decay: Scalar, step: jax.Array) -> jax.Array:
    """Return 1 - decay**step, without the cancellation that costs float32 its digits.

    For decay = 0.999 and step = 1, `1 - decay**step` in float32 is off by 3e-5.
    """
    if is_zero(decay):
        return jnp.asarray(1.0)  # takes on precision, as the other does
    known = isinstance(decay, int | float)
    log_decay = math.log(decay) if known else jnp.log(decay)
    return -jnp.expm1(as_float(step) * log_decay)


def row_mean(x: jax.Array) -> jax.Array:
    """Return the mean over every row of axis 0: (n, *row) -> (n, 1, ..., 1)."""
    return jnp.mean(x, axis=tuple(range(1, x.ndim)), keepdims=True) if x.ndim > 1 else x
