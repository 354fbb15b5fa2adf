r"""The named optimizers: row rules with the numerics of MXNet, torch, FBGEMM and optax.

Each rule stands below its formula, in which g is the gradient after `rescale_grad`, clipping
and "l2" decay, w the parameter, and t the number of the step, from 1. With
`decay_mode="decoupled"` w <- w - lr * weight_decay * w besides.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jmask._base.array_types import as_float
from jmask._base.types import PyTree, Scalar
from jmask._base.validation import check_flag
from jmask._optim.row_rule import (
    Common,
    Slot,
    check_denominator,
    check_numbers,
    is_zero,
    mean_of_row,
)

# --- stochastic gradient descent ----------------------------------------------------------
#
#     m <- mu * m - lr * g,    w <- w + m                    momentum: m contains the rate
#     m as above,              w <- w + mu * m - lr * g      Nesterov
#
# With lr = 1, mu = 0.5 and g = 1 in two steps, w moves by -1 and then by -1.5.


class SgdState(NamedTuple):
    """State of `sgd` without momentum: the number of steps done."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax


class MomentumState(NamedTuple):
    """State of `sgd` with momentum; the buffer contains the learning rate."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    momentum: PyTree


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: Scalar = 0.0,
    nesterov: bool = False,
    weight_decay: Scalar = 0.0,
    clip_gradient: Scalar | None = None,
    rescale_grad: Scalar = 1.0,
    lazy_update: bool = True,
    decay_mode: str = "l2",
    state_dtype: DTypeLike | None = None,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Stochastic gradient descent for dense and row-sparse gradients.

    Args:
        learning_rate: a positive number, an array, or an optax schedule.
        momentum: decay of the momentum buffer, in [0, 1).
        nesterov: look ahead by one momentum step; needs momentum.
        weight_decay: L2 penalty, added to the gradient after clipping.
        clip_gradient: clip each entry of the rescaled gradient to [-c, c].
        rescale_grad: factor on the gradient, before clipping.
        lazy_update: only rows in a row-sparse gradient decay and move; otherwise all rows
            do, as with a dense gradient.
        decay_mode: what the decay is added to, "l2" or "decoupled": the gradient, which is
            averaged or rescaled then, or the step (AdamW).
        state_dtype: dtype of the state arrays; the parameter's by default. The
            arithmetic is in float32 at least.
        maximize: move along the gradient instead of against it.

    Returns:
        An optax transformation.

    Raises:
        ValueError: for a hyperparameter out of range, naming it and its value.
        TypeError: for one that is no number, or a flag that is neither True nor False.

    References:
        Polyak, "Some methods of speeding up the convergence of iteration methods", 1964;
        MXNet 1.9, `mx.optimizer.SGD`. The momentum buffer contains the learning rate,
        which differs from torch and optax when the rate changes during the run.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx, table = jmask.sgd(0.5), jnp.ones((3, 1))
        >>> grads = jmask.RowSparse([2], jnp.ones((1, 1)), (3, 1))
        >>> updates, state = tx.update(grads, tx.init(table), table)
        >>> jmask.apply_updates(table, updates).ravel()
        Array([1. , 1. , 0.5], dtype=float32)
    """
    incoming = clip_gradient, rescale_grad, maximize
    common = Common(learning_rate, weight_decay, decay_mode, incoming, lazy_update, state_dtype)
    check_flag("nesterov", nesterov)
    check_numbers(momentum=momentum)
    if nesterov and is_zero(momentum):
        raise ValueError(f"`nesterov` needs a positive `momentum`, got {momentum}.")

    def plain(g, w, lr):
        return (-(lr * g),)

    def rule(g, w, m, lr):
        m = momentum * m - lr * g
        return (momentum * m - lr * g if nesterov else m), m

    if is_zero(momentum):
        return common.optimizer(SgdState, {}, plain)
    return common.optimizer(MomentumState, {"momentum": Slot(0.0)}, rule)


# --- Adagrad ------------------------------------------------------------------------------
#
#     s <- s + g**2                       row-wise: the mean of g**2 over the row
#     w <- w - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s + eps_root) + eps)
#
# s = initial_accumulator_value at first. In the first step from s = 0, w moves by lr * sign(g).


class AdagradState(NamedTuple):
    """State of `adagrad` and `rowwise_adagrad`: steps done, and the sum of squares."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    sum_of_squares: PyTree


def adagrad(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    lr_decay: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    initial_accumulator_value: Scalar = 0.0,
    eps: Scalar = 1e-10,
    eps_root: Scalar = 0.0,
    clip_gradient: Scalar | None = None,
    rescale_grad: Scalar = 1.0,
    maximize: bool = False,
    lazy_update: bool = True,
    decay_mode: str = "l2",
    state_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad for dense and row-sparse gradients, with the numerics of torch's Adagrad.

    Args:
        learning_rate: a positive number, an array, or an optax schedule.
        lr_decay: the rate is divided by 1 + (t - 1) * lr_decay in step t.
        weight_decay: L2 penalty, added to the gradient after clipping.
        initial_accumulator_value: the sum of squares before the first step.
        eps: added to the root of the sum. It may be 0 where the sum starts above 0 (GloVe:
            `eps=0, initial_accumulator_value=1`), or `eps_root` is positive.
        eps_root: added under the root: `eps=0, eps_root=1e-7` is the form of MXNet, and
            with `initial_accumulator_value=0.1` it is optax's.
        clip_gradient, rescale_grad, maximize, lazy_update, decay_mode, state_dtype: as of
            `sgd`.

    Returns:
        An optax transformation.

    Raises:
        ValueError, TypeError: as `sgd`.

    References:
        Duchi, Hazan and Singer, "Adaptive Subgradient Methods", 2011;
        `torch.optim.Adagrad`; MXNet 1.9, `mx.optimizer.AdaGrad`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx, table = jmask.adagrad(0.1), jnp.ones((3, 1))
        >>> grads = jmask.RowSparse([2], jnp.ones((1, 1)), (3, 1))
        >>> updates, state = tx.update(grads, tx.init(table), table)
        >>> jmask.apply_updates(table, updates).ravel().round(4)
        Array([1. , 1. , 0.9], dtype=float32)
    """
    incoming = clip_gradient, rescale_grad, maximize
    common = Common(learning_rate, weight_decay, decay_mode, incoming, lazy_update, state_dtype)
    initial = initial_accumulator_value
    return _adagrad(common, lr_decay, initial, eps, eps_root, per_row=False)


def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    lr_decay: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    initial_accumulator_value: Scalar = 0.0,
    eps: Scalar = 1e-10,
    eps_root: Scalar = 0.0,
    clip_gradient: Scalar | None = None,
    rescale_grad: Scalar = 1.0,
    maximize: bool = False,
    lazy_update: bool = True,
    decay_mode: str = "l2",
    state_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad with one accumulator for each row: a single number of state per row.

    Args:
        learning_rate, lr_decay, weight_decay, initial_accumulator_value, eps, eps_root,
            clip_gradient, rescale_grad, maximize, lazy_update, decay_mode, state_dtype: as
            of `adagrad`. `eps=1e-8` is FBGEMM's default, `eps=0, eps_root=1e-5` MXNet's.

    Returns:
        An optax transformation; its state is (V, 1) for a table (V, D), and (M, V, 1) for
        stacked tables (M, V, D). It is (V, F, 1) for a table of rows (F, D) too, the
        accumulator of a row F times. For parameters of one dimension it is `adagrad`.

    Raises:
        ValueError, TypeError: as `sgd`.

    References:
        Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep
        Learning Recommendation Models", 2022; FBGEMM, `EXACT_ROWWISE_ADAGRAD`; MXNet 1.9,
        `GroupAdaGrad`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx, table = jmask.rowwise_adagrad(0.1), jnp.ones((3, 2))
        >>> grads = jmask.RowSparse([2], jnp.array([[1., 7.]]), (3, 2))
        >>> _, state = jmask.apply_gradients(tx, grads, tx.init(table), table)
        >>> state.sum_of_squares.ravel()
        Array([ 0.,  0., 25.], dtype=float32)
    """
    incoming = clip_gradient, rescale_grad, maximize
    common = Common(learning_rate, weight_decay, decay_mode, incoming, lazy_update, state_dtype)
    initial = initial_accumulator_value
    return _adagrad(common, lr_decay, initial, eps, eps_root, per_row=True)


def _adagrad(
    common: Common,
    lr_decay: Scalar,
    initial: Scalar,
    eps: Scalar,
    eps_root: Scalar,
    per_row: bool,
) -> optax.GradientTransformationExtraArgs:
    check_numbers(lr_decay=lr_decay)
    check_denominator(eps=eps, eps_root=eps_root, initial_accumulator_value=initial)

    def decayed(count, lr):
        return (lr if is_zero(lr_decay) else lr / (1 + as_float(count) * lr_decay),)

    def rule(g, w, s, lr):
        s = s + (mean_of_row(g * g) if per_row else g * g)
        return -lr * g / (jnp.sqrt(s + eps_root) + eps), s

    slots = {"sum_of_squares": Slot(initial, per_row)}
    return common.optimizer(AdagradState, slots, rule, scalars=decayed)


# --- FTRL-proximal ------------------------------------------------------------------------
#
#     n' = n + g**2
#     z  <- z + g - (sqrt(n') - sqrt(n)) / lr * w
#     w  <- (sign(z) * l1 - z) / ((beta + sqrt(n')) / lr + weight_decay)   where |z| > l1
#           0                                                              elsewhere
#
# With l1 = 1, a coordinate whose gradients sum to 0.9 has w = 0.


class FtrlState(NamedTuple):
    """State of `ftrl`: steps done, the shifted sum of gradients, the sum of squares."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    z: PyTree
    n: PyTree


def ftrl(
    learning_rate: optax.ScalarOrSchedule = 0.1,
    l1: Scalar = 0.01,
    beta: Scalar = 1.0,
    weight_decay: Scalar = 0.0,
    clip_gradient: Scalar | None = None,
    rescale_grad: Scalar = 1.0,
    maximize: bool = False,
    lazy_update: bool = True,
    state_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """FTRL-proximal for dense and row-sparse gradients, with the numerics of MXNet's Ftrl.

    The usual choice for linear models on billions of features: most weights are exactly 0.

    Args:
        learning_rate: a positive number, an array, or an optax schedule; never 0, as where a
            warm-up begins: the formula divides by it, and rows become nan.
        l1: the threshold; larger gives more zeros.
        beta: smooths the rate of a coordinate's first steps.
        weight_decay: strength of the L2 term.
        clip_gradient, rescale_grad, maximize, lazy_update, state_dtype: as of `sgd`.

    Returns:
        An optax transformation.

    Raises:
        ValueError, TypeError: as `sgd`.

    References:
        McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013; MXNet 1.9,
        `mx.optimizer.Ftrl`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx, table = jmask.ftrl(0.1, l1=1.0), jnp.zeros((3, 1))
        >>> grads = jmask.RowSparse([1, 2], jnp.array([[0.9], [3.0]]), (3, 1))
        >>> jmask.apply_gradients(tx, grads, tx.init(table), table)[0].ravel()
        Array([ 0.  ,  0.  , -0.05], dtype=float32)
    """
    check_numbers(l1=l1, beta=beta, weight_decay=weight_decay)
    incoming = clip_gradient, rescale_grad, maximize
    common = Common(learning_rate, 0.0, "l2", incoming, lazy_update, state_dtype)

    def rule(g, w, z, n, lr):
        total = n + g * g
        root = jnp.sqrt(total)
        z = z + g - (root - jnp.sqrt(n)) * w / lr
        # Where nothing has come yet the denominator may be zero, and so is z. Conditions are
        # such that nan, of a gradient or a rate, stays nan: |nan| > l1 would be a zero row.
        scale = (beta + root) / lr + weight_decay
        scale = jnp.where(scale == 0, 1, scale)
        new = jnp.where(jnp.abs(z) <= l1, 0, (jnp.sign(z) * l1 - z) / scale)
        return new - w, z, total

    slots = {"z": Slot(0.0), "n": Slot(0.0)}
    return common.optimizer(FtrlState, slots, rule, needs_param=True)
