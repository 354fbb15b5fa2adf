r"""Adam as torch's SparseAdam and MXNet compute it, row-wise, and optax's AdamW.

        m <- m + (1 - b1) * (g - m)
        v <- v + (1 - b2) * (g**2 - v)                row-wise: the mean of g**2 over the row
        w <- w - lr * sqrt(1 - b2**t) / (1 - b1**t) * m / (sqrt(v + eps_root) + eps)

g is the gradient after `rescale_grad`, "l2" decay and clipping. t advances for an empty
gradient too. With `count="per_row"` it is a row's own, and counts the steps in which the row
had a gradient. `eps` is added to sqrt(v) before the bias of v is corrected, which is where
SparseAdam and MXNet differ from Adam in optax and torch. In the first step m / sqrt(v) is
sign(g) * (1 - b1) / sqrt(1 - b2) and w moves by lr * sign(g) (for eps = 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jmask._base.array_types import as_float
from jmask._base.types import PyTree, Scalar
from jmask._base.validation import check_flag, checked_choice, checked_dtype, shown
from jmask._lazy.lazy import densified, lazy
from jmask._optim.row_rule import (
    Common,
    Slot,
    check_denominator,
    check_numbers,
    in_floats,
    is_zero,
    mean_of_row,
)


class AdamState(NamedTuple):
    """State of `adam` and `rowwise_adam`: steps done, averages of gradient and square."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    mu: PyTree
    nu: PyTree


class RowCountAdamState(NamedTuple):
    """State with `count="per_row"`: also the steps of each row, int32, (V, 1) of (V, D)."""

    count: jax.Array  # type: ignore[assignment]
    mu: PyTree
    nu: PyTree
    row_count: PyTree


def adam(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    clip_gradient: Scalar | None = None,
    rescale_grad: Scalar = 1.0,
    maximize: bool = False,
    lazy_update: bool = True,
    decay_mode: str = "l2",
    state_dtype: DTypeLike | None = None,
    count: str = "steps",
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam for dense and row-sparse gradients, with the numerics of torch's SparseAdam.

    Args:
        learning_rate: a positive number, an array, or an optax schedule.
        b1, b2: decay of the averages of the gradient and of its square, in [0, 1).
        eps: added to the root of the average square.
        eps_root: added under the root.
        weight_decay: L2 penalty, added to the gradient before clipping (as in MXNet).
        clip_gradient, rescale_grad, maximize, lazy_update, decay_mode, state_dtype: as of
            `sgd`.
        count: what the bias is corrected by: "steps" of the optimizer, or "per_row", for each
            row the steps in which it had a gradient. Then the first step of a row moves it by
            lr * sign(g) whenever it comes, and not by up to 3.2 times that. Schedules follow
            the steps of the optimizer all the same.
        mu_dtype: dtype of the average of the gradient, as in optax; `state_dtype` by default.

    Returns:
        An optax transformation. Its state has `row_count` for `count="per_row"`, int32, of
        the shape that `nu` of `rowwise_adam` has.

    Raises:
        ValueError, TypeError: as `sgd`; for `count="per_row"` where all rows are updated.

    References:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015;
        `torch.optim.SparseAdam`; MXNet 1.9, `mx.optimizer.Adam`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx, table = jmask.adam(0.1), jnp.ones((3, 1))
        >>> grads = jmask.RowSparse([2], jnp.ones((1, 1)), (3, 1))
        >>> updates, state = tx.update(grads, tx.init(table), table)
        >>> jmask.apply_updates(table, updates).ravel().round(4)
        Array([1. , 1. , 0.9], dtype=float32)
    """
    incoming = clip_gradient, rescale_grad, maximize
    common = Common(learning_rate, weight_decay, decay_mode, incoming, lazy_update, state_dtype)
    return _adam(common, b1, b2, eps, eps_root, count, mu_dtype, per_row=False)


def rowwise_adam(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    clip_gradient: Scalar | None = None,
    rescale_grad: Scalar = 1.0,
    maximize: bool = False,
    lazy_update: bool = True,
    decay_mode: str = "l2",
    state_dtype: DTypeLike | None = None,
    count: str = "steps",
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam with one second moment for each row: D + 1 numbers of state per row, not 2 D.

    Args:
        learning_rate, b1, b2, eps, eps_root, weight_decay, clip_gradient, rescale_grad,
            maximize, lazy_update, decay_mode, state_dtype, count, mu_dtype: as of `adam`.

    Returns:
        An optax transformation; its state `nu` is (V, 1) for a table (V, D), and (M, V, 1)
        for stacked tables (M, V, D). It is (V, F, 1) for a table of rows (F, D) too, the
        moment of a row F times. For parameters of one dimension it is `adam`.

    Raises:
        ValueError, TypeError: as `sgd`; for `count="per_row"` where all rows are updated.

    References:
        FBGEMM, `PARTIAL_ROWWISE_ADAM`, which corrects the bias of `nu` before it adds eps.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.rowwise_adam(0.1)
        >>> tx.init(jnp.ones((3, 8))).nu.shape
        (3, 1)
    """
    incoming = clip_gradient, rescale_grad, maximize
    common = Common(learning_rate, weight_decay, decay_mode, incoming, lazy_update, state_dtype)
    return _adam(common, b1, b2, eps, eps_root, count, mu_dtype, per_row=True)


def _adam(
    common: Common,
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    eps_root: Scalar,
    count: str,
    mu_dtype: DTypeLike | None,
    per_row: bool,
) -> optax.GradientTransformationExtraArgs:
    _check_adam(b1, b2, eps, eps_root, mu_dtype)
    per_row_count = checked_choice("count", count, ("steps", "per_row")) == "per_row"
    if per_row_count and not common.lazy_update:
        raise ValueError(
            '`count` must be "steps" where `lazy_update` is False: then each row is updated in '
            "each step, and the counts are the same."
        )

    def corrected(steps, lr):
        # All that changes with the step is one scalar, if it can be: a scatter of three arrays
        # has room for two.
        return lr * (jnp.sqrt(_bias_correction(b2, steps)) / _bias_correction(b1, steps))

    def rule(g, w, m, v, lr, corrected):
        m = m + (1 - b1) * (g - m)
        v = v + (1 - b2) * ((mean_of_row(g * g) if per_row else g * g) - v)
        return -corrected * m / (jnp.sqrt(v + eps_root) + eps), m, v

    def rule_of_rows(g, w, m, v, row_count, lr):
        row_count = optax.safe_increment(row_count)
        return *rule(g, w, m, v, lr, jnp.asarray(corrected(row_count, lr), g.dtype)), row_count

    slots = {"mu": Slot(0.0, dtype=mu_dtype), "nu": Slot(0.0, per_row)}
    if per_row_count:
        slots["row_count"] = Slot(0, per_row=True, dtype=jnp.int32)
        return common.optimizer(RowCountAdamState, slots, rule_of_rows, clips_last=True)
    scalars = lambda count, lr: (lr, corrected(optax.safe_increment(count), lr))
    return common.optimizer(AdamState, slots, rule, scalars=scalars, clips_last=True)


def adamw(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    nesterov: bool = False,
    lazy_update: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """AdamW for dense and row-sparse gradients, with the numerics and the state of optax's.

    It is `jmask.lazy(optax.adamw(...))`, its hyperparameters checked. `jmask.adam` with
    `decay_mode="decoupled"` is AdamW on SparseAdam's step, which adds `eps` earlier.

    Args:
        learning_rate, b1, b2, eps_root, mu_dtype, lazy_update: as of `adam`.
        eps: added to the root of the average square, whose bias has been corrected.
        weight_decay: a parameter shrinks by learning_rate * weight_decay of it in each step
            that moves it.
        mask: a tree of booleans, like the parameters or a prefix of them, or a function of
            the parameters that returns one: which of them decay. All by default.
        nesterov: take Nesterov momentum (NAdamW).

    Returns:
        An optax transformation. A run can switch between it and `optax.adamw` at any step.

    Raises:
        ValueError, TypeError: as `sgd`; for a mask with other leaves than booleans.

    References:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; `optax.adamw`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.adamw(0.5, weight_decay=1.0, mask={"table": True, "bias": False})
        >>> params = {"table": jnp.ones((3, 1)), "bias": jnp.ones(1)}
        >>> rows = jmask.RowSparse([2], jnp.ones((1, 1)), (3, 1))
        >>> grads, state = {"table": rows, "bias": jnp.ones(1)}, tx.init(params)
        >>> params, state = jmask.apply_gradients(tx, grads, state, params)
        >>> print(params["table"].ravel().round(3), params["bias"].round(3))
        [1. 1. 0.] [0.5]
    """
    check_numbers(learning_rate=learning_rate)
    _check_adam(b1, b2, eps, eps_root, mu_dtype)
    if not callable(weight_decay):  # newer versions of optax take a schedule
        check_numbers(weight_decay=weight_decay)
    flags = () if callable(mask) else jax.tree.leaves(mask)
    if not all(isinstance(x, bool | np.bool_) for x in flags):
        raise TypeError(
            "`mask` must be a tree of booleans or a function that returns one, got "
            f"{shown(mask)}."
        )
    check_flag("nesterov", nesterov)
    check_flag("lazy_update", lazy_update)
    rate = in_floats(learning_rate)
    stock = optax.adamw(
        rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov=nesterov
    )

    def update(updates, state, params=None, **extra_args):
        # optax raises `b1`, a Python number, to an int32 count.
        with jax.numpy_dtype_promotion("standard"):
            return stock.update(updates, state, params, **extra_args)

    tx = optax.GradientTransformationExtraArgs(stock.init, update)
    return lazy(tx) if lazy_update else densified(tx)


def _check_adam(
    b1: Scalar, b2: Scalar, eps: Scalar, eps_root: Scalar, mu_dtype: DTypeLike | None
) -> None:
    check_numbers(b1=b1, b2=b2)
    check_denominator(eps=eps, eps_root=eps_root)
    if mu_dtype is not None:
        checked_dtype("mu_dtype", mu_dtype, floating=True)


def _bias_correction(decay: Scalar, step: jax.Array) -> jax.Array:
    """Return 1 - decay**step, without the cancellation that costs float32 its digits.

    For decay = 0.999 and step = 1, `1 - decay**step` in float32 is off by 3e-5.
    """
    if is_zero(decay):
        return jnp.asarray(1.0)  # takes on precision, as the other does
    is_known = isinstance(decay, int | float)
    log_decay = math.log(decay) if is_known else jnp.log(decay)
    return -jnp.expm1(as_float(step) * log_decay)
