r"""Adagrad as torch computes it; with `eps_root`, as MXNet and optax do.

    g' = clip(rescale_grad * g) + weight_decay * w
    s <- s + g'**2                         where s = initial_accumulator_value at first
    w <- w - lr / (1 + (t - 1) * lr_decay) * g' / (sqrt(s + eps_root) + eps)

t counts the steps, from 1. In the first step from s = 0, w moves by lr * sign(g).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmask import _hyperparameters as hyper
from jmask._row_rule import RowRule, optimizer


class AdagradState(NamedTuple):
    """State of `adagrad`: steps done, and the sum of the squared gradients."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    sum_of_squares: Any


def adagrad(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    lr_decay: Any = 0.0,
    weight_decay: Any = 0.0,
    initial_accumulator_value: Any = 0.0,
    eps: Any = 1e-10,
    eps_root: Any = 0.0,
    clip_gradient: Any = None,
    rescale_grad: Any = 1.0,
    maximize: bool = False,
    lazy_update: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad for dense and row-sparse gradients, with the numerics of torch's Adagrad.

    Args:
        learning_rate: a positive number, an array, or an optax schedule.
        lr_decay: the rate is divided by 1 + (t - 1) * lr_decay in step t.
        weight_decay: L2 penalty, added to the gradient after clipping.
        initial_accumulator_value: the sum of squares before the first step.
        eps: added to the root of the sum.
        eps_root: added under the root: `eps=0, eps_root=1e-7` is the form of MXNet, and
            with `initial_accumulator_value=0.1` that of optax.
        clip_gradient: clip each entry of the rescaled gradient to [-c, c].
        rescale_grad: factor on the gradient, before clipping.
        maximize: move along the gradient instead of against it.
        lazy_update: only rows in a row-sparse gradient decay and move; otherwise all rows
            do, as with a dense gradient.

    Returns:
        An optax transformation.

    Raises:
        ValueError: for a hyperparameter out of range, naming it and its value.

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
    hyper.check_common(learning_rate, weight_decay, clip_gradient, rescale_grad)
    hyper.check_not_negative("lr_decay", lr_decay)
    hyper.check_not_negative("initial_accumulator_value", initial_accumulator_value)
    hyper.check_epsilons(eps, eps_root)

    def scalars(count):
        lr = hyper.rate(learning_rate, count)
        return (lr if hyper.is_zero(lr_decay) else lr / (1 + count * lr_decay),)

    def rule(grad, param, total, lr):
        grad = hyper.rescaled(grad, rescale_grad, maximize)
        grad = hyper.decayed(hyper.clipped(grad, clip_gradient), param, weight_decay)
        total = total + grad * grad
        return -lr * grad / (jnp.sqrt(total + eps_root) + eps), total

    return optimizer(
        RowRule(
            slots={"sum_of_squares": initial_accumulator_value},
            scalars=scalars,
            rule=rule,
            needs_param=not hyper.is_zero(weight_decay),
        ),
        AdagradState,
        lazy_update,
    )
