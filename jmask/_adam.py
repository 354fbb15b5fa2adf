r"""Adam as torch's SparseAdam and MXNet compute it.

    g' = clip(rescale_grad * g + weight_decay * w)
    m <- m + (1 - b1) * (g' - m)
    v <- v + (1 - b2) * (g'**2 - v)
    w <- w - lr * sqrt(1 - b2**t) / (1 - b1**t) * m / (sqrt(v + eps_root) + eps)

t counts the steps, from 1; it advances for an empty gradient too. `eps` is added to
sqrt(v) before the bias of v is corrected, which is where SparseAdam and MXNet differ from
Adam in optax and torch. In the first step m / sqrt(v) is sign(g) * (1 - b1) / sqrt(1 - b2)
and w moves by lr * sign(g) (for eps = 0).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmask import _hyperparameters as hyper
from jmask._row_rule import RowRule, optimizer


class AdamState(NamedTuple):
    """State of `adam`: steps done, and the moving averages of gradient and square."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    mu: Any
    nu: Any


def adam(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    weight_decay: Any = 0.0,
    clip_gradient: Any = None,
    rescale_grad: Any = 1.0,
    maximize: bool = False,
    lazy_update: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Adam for dense and row-sparse gradients, with the numerics of torch's SparseAdam.

    Args:
        learning_rate: a positive number, an array, or an optax schedule.
        b1, b2: decay of the averages of the gradient and of its square, in [0, 1).
        eps: added to the root of the average square.
        eps_root: added under the root.
        weight_decay: L2 penalty, added to the gradient before clipping (as in MXNet).
        clip_gradient: clip each entry of the gradient to [-c, c].
        rescale_grad: factor on the gradient, before clipping.
        maximize: move along the gradient instead of against it.
        lazy_update: only rows in a row-sparse gradient decay and move; otherwise all rows
            do, as with a dense gradient.

    Returns:
        An optax transformation.

    Raises:
        ValueError: for a hyperparameter out of range, naming it and its value.

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
    hyper.check_common(learning_rate, weight_decay, clip_gradient, rescale_grad)
    hyper.check_fraction("b1", b1)
    hyper.check_fraction("b2", b2)
    hyper.check_epsilons(eps, eps_root)

    def scalars(count):
        step = optax.safe_increment(count)
        correction = jnp.sqrt(hyper.bias_correction(b2, step))
        lr = hyper.rate(learning_rate, count)
        return (lr * (correction / hyper.bias_correction(b1, step)),)

    def rule(grad, param, mu, nu, lr):
        grad = hyper.rescaled(grad, rescale_grad, maximize)
        grad = hyper.clipped(hyper.decayed(grad, param, weight_decay), clip_gradient)
        mu = mu + (1 - b1) * (grad - mu)
        nu = nu + (1 - b2) * (grad * grad - nu)
        return -lr * mu / (jnp.sqrt(nu + eps_root) + eps), mu, nu

    return optimizer(
        RowRule(
            slots={"mu": 0.0, "nu": 0.0},
            scalars=scalars,
            rule=rule,
            needs_param=not hyper.is_zero(weight_decay),
        ),
        AdamState,
        lazy_update,
    )
