"""Hyperparameters of the named optimizers: their ranges, and what is common to all rules.

A hyperparameter may be a number of Python or NumPy, checked immediately, or a scalar array
of JAX, possibly traced (`optax.inject_hyperparams`), whose value is not looked at.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jmask._base.array_types import as_float
from jmask._base.types import Scalar
from jmask._base.validation import check_flag, checked_choice, shown

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


def check_numbers(**values: Scalar) -> None:
    """Refuse hyperparameters that are no numbers, or out of their range."""
    for name, value in values.items():
        if not _is_number(value):
            is_rate = name == "learning_rate"
            schedule = ", or a schedule (a function of the step count)" * is_rate
            raise TypeError(f"`{name}` must be a number{schedule}, got {shown(value)}.")
        words, holds = _RANGES[name]
        # A JAX array may be traced, or not be there yet.
        if isinstance(value, int | float | np.number | np.ndarray) and not holds(value):
            raise ValueError(f"`{name}` must be {words}, got {value}.")


def check_learning_rate(value: optax.ScalarOrSchedule) -> None:
    """Refuse what is neither a schedule nor a positive number."""
    if not callable(value):
        check_numbers(learning_rate=value)


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


def is_zero(value: object) -> bool:
    """Decide whether a hyperparameter is known to be 0, so that its term can be left out."""
    return isinstance(value, int | float) and value == 0


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
        check_numbers(weight_decay=self.weight_decay, rescale_grad=self.rescale_grad)
        checked_choice(self.decay_mode, "decay_mode", ("l2", "decoupled"))
        if self.clip_gradient is not None:
            check_numbers(clip_gradient=self.clip_gradient)

    @property
    def decays(self) -> bool:
        """Decide whether there is weight decay, which needs the parameters."""
        return not is_zero(self.weight_decay)

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

    def gradient(self, grad: jax.Array, param: jax.Array, clips_last: bool) -> jax.Array:
        """Return the gradient rescaled, clipped, and with "l2" decay, in one of two orders."""
        bound = self.clip_gradient
        clip = lambda x: x if bound is None else jnp.clip(x, -bound, bound)
        grad = -grad if self.maximize else grad
        if not (isinstance(self.rescale_grad, int | float) and self.rescale_grad == 1):
            grad = grad * self.rescale_grad
        grad = grad if clips_last else clip(grad)
        if self.decays and self.decay_mode == "l2":  # that of (weight_decay / 2) * |param|**2
            grad = grad + self.weight_decay * param
        return clip(grad) if clips_last else grad

    def step(self, step: jax.Array, param: jax.Array, lr: Scalar) -> jax.Array:
        """Return the step, with "decoupled" decay."""
        is_decoupled = self.decays and self.decay_mode == "decoupled"
        return step - lr * self.weight_decay * param if is_decoupled else step
