r"""Adam as torch's SparseAdam and MXNet compute it.

    g' = clip(rescale_grad * g + weight_decay * w)
    m <- m + (1 - b1) * (g' - m)
    v <- v + (1 - b2) * (g'**2 - v)
    w <- w - lr * sqrt(1 - b2**t) / (1 - b1**t) * m / (sqrt(v + eps_root) + eps)

With `decay_mode="decoupled"` the decay is not in g'; w <- w - lr * weight_decay * w besides.
`rowwise_adam` keeps one v for each row, the average of the mean of g'**2 over the row.

t counts the steps, from 1; it advances for an empty gradient too. `eps` is added to
sqrt(v) before the bias of v is corrected, which is where SparseAdam and MXNet differ from
Adam in optax and torch. In the first step m / sqrt(v) is sign(g) * (1 - b1) / sqrt(1 - b2)
and w moves by lr * sign(g) (for eps = 0).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmask._optim import hyperparameters as hyper
from jmask._optim.row_rule import RowRule, Slot, optimizer
from jmask._updates.eager import sharing_programs


class AdamState(NamedTuple):
    """State of `adam` and `rowwise_adam`: steps done, averages of gradient and square."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    mu: Any
    nu: Any


@sharing_programs
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
    decay_mode: str = "l2",
    state_dtype: Any = None,
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
        decay_mode: what the decay is added to, "l2" or "decoupled": the gradient, or
            the step (AdamW).
        state_dtype: dtype of the state arrays; that of the parameter by default. The
            arithmetic is in float32 at least.

    Returns:
        An optax transformation.

    Raises:
        ValueError: for a hyperparameter out of range, naming it and its value.
        TypeError: for one that is no number, or a flag that is neither True nor False.

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
    common = hyper.Common(
        learning_rate, weight_decay, clip_gradient, rescale_grad, maximize, lazy_update,
        decay_mode, state_dtype,
    )  # fmt: skip
    return _adam(common, b1, b2, eps, eps_root, per_row=False)


@sharing_programs
def rowwise_adam(
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
    decay_mode: str = "l2",
    state_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam with one second moment for each row: D + 1 numbers of state per row, not 2 D.

    Args:
        learning_rate, b1, b2, eps, eps_root, weight_decay, clip_gradient, rescale_grad,
            maximize, lazy_update, decay_mode, state_dtype: as of `adam`.

    Returns:
        An optax transformation; its state `nu` is (V, 1, ..., 1) for a table (V, *row). For
        parameters of one dimension it is `adam`.

    Raises:
        ValueError: for a hyperparameter out of range, naming it and its value.
        TypeError: for one that is no number, or a flag that is neither True nor False.

    References:
        FBGEMM, `PARTIAL_ROWWISE_ADAM`, which corrects the bias of `nu` before it adds eps.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.rowwise_adam(0.1)
        >>> tx.init(jnp.ones((3, 8))).nu.shape
        (3, 1)
    """
    common = hyper.Common(
        learning_rate, weight_decay, clip_gradient, rescale_grad, maximize, lazy_update,
        decay_mode, state_dtype,
    )  # fmt: skip
    return _adam(common, b1, b2, eps, eps_root, per_row=True)


def _adam(
    common: hyper.Common, b1: Any, b2: Any, eps: Any, eps_root: Any, *, per_row: bool
) -> optax.GradientTransformationExtraArgs:
    hyper.check_fraction("b1", b1)
    hyper.check_fraction("b2", b2)
    hyper.check_epsilons(eps, eps_root)

    def scalars(count):
        step = optax.safe_increment(count)
        correction = jnp.sqrt(hyper.bias_correction(b2, step))
        lr = common.rate(count)
        corrected = lr * (correction / hyper.bias_correction(b1, step))
        return (corrected, lr) if common.is_decoupled else (corrected,)

    def rule(grad, param, mu, nu, corrected, lr=None):
        grad = common.clipped(common.decayed(common.rescaled(grad), param))
        square = grad * grad
        mu = mu + (1 - b1) * (grad - mu)
        nu = nu + (1 - b2) * ((hyper.row_mean(square) if per_row else square) - nu)
        step = -corrected * mu / (jnp.sqrt(nu + eps_root) + eps)
        return common.with_decoupled_decay(step, param, lr), mu, nu

    return optimizer(
        RowRule(
            slots={"mu": Slot(0.0), "nu": Slot(0.0, per_row)},
            scalars=scalars,
            rule=rule,
            needs_param=common.decays,
            state_dtype=common.state_dtype,
        ),
        AdamState,
        common.lazy_update,
    )
