r"""Stochastic gradient descent, with momentum: the numerics of MXNet's SGD.

    g' = clip(rescale_grad * g) + weight_decay * w
    without momentum     w <- w - lr * g'
    with momentum mu     m <- mu * m - lr * g',    w <- w + m
    with nesterov        m as above,               w <- w + mu * m - lr * g'

With `decay_mode="decoupled"` the decay is not in g'; w <- w - lr * weight_decay * w besides.

With lr = 1, mu = 0.5 and g = 1 in two steps, w moves by -1 and then by -1.5.
"""

from typing import NamedTuple

import jax
import optax
from jax.typing import DTypeLike

from jmask._base.types import PyTree, Scalar
from jmask._base.validation import check_flag
from jmask._optim import hyperparameters as hyper
from jmask._optim.row_rule import RowRule, Slot, optimizer
from jmask._updates.eager import sharing_programs


class SgdState(NamedTuple):
    """State of `sgd` without momentum: the number of steps done."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax


class MomentumState(NamedTuple):
    """State of `sgd` with momentum; the buffer contains the learning rate."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    momentum: PyTree


@sharing_programs
@hyper.naming_hyperparameters
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
        decay_mode: what the decay is added to, "l2" or "decoupled": with momentum, whether
            it passes through the buffer.
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
    common = hyper.Common.among(locals())
    check_flag("nesterov", nesterov)
    hyper.check_number("momentum", momentum, hyper.FRACTION)
    has_momentum = not hyper.is_zero(momentum)
    if nesterov and not has_momentum:
        raise ValueError(f"`nesterov` needs a positive `momentum`, got {momentum}.")

    def scaled_gradient(grad, param, lr):
        return lr * common.decayed(common.clipped(common.rescaled(grad)), param)

    def plain(grad, param, lr):
        return (common.with_decoupled_decay(-scaled_gradient(grad, param, lr), param, lr),)

    def with_momentum(grad, param, buffer, lr):
        step = scaled_gradient(grad, param, lr)
        buffer = momentum * buffer - step
        step = momentum * buffer - step if nesterov else buffer
        return common.with_decoupled_decay(step, param, lr), buffer

    rule = RowRule(
        slots={"momentum": Slot(0.0)} if has_momentum else {},
        scalars=lambda count: (common.rate(count),),
        rule=with_momentum if has_momentum else plain,
        needs_param=common.decays,
        state_dtype=state_dtype,
        linear=not (has_momentum or common.decays) and clip_gradient is None,
    )
    return optimizer(rule, MomentumState if has_momentum else SgdState, lazy_update)
