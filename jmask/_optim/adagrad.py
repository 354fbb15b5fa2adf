r"""Adagrad as torch computes it; with `eps_root`, as MXNet and optax do.

    g' = clip(rescale_grad * g) + weight_decay * w
    s <- s + g'**2                         where s = initial_accumulator_value at first
    w <- w - lr / (1 + (t - 1) * lr_decay) * g' / (sqrt(s + eps_root) + eps)

With `decay_mode="decoupled"` the decay is not in g'; w <- w - rate * weight_decay * w besides.
`rowwise_adagrad` keeps one s for each row, the sum of the means of g'**2 over the row.

t counts the steps, from 1. In the first step from s = 0, w moves by lr * sign(g).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jmask._base.array_types import as_float
from jmask._base.types import PyTree, Scalar
from jmask._optim import hyperparameters as hyper
from jmask._optim.row_rule import RowRule, Slot, optimizer
from jmask._updates.eager import sharing_programs


class AdagradState(NamedTuple):
    """State of `adagrad` and `rowwise_adagrad`: steps done, and the sum of squares."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    sum_of_squares: PyTree


@sharing_programs
@hyper.naming_hyperparameters
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
        clip_gradient: clip each entry of the rescaled gradient to [-c, c].
        rescale_grad: factor on the gradient, before clipping.
        maximize: move along the gradient instead of against it.
        lazy_update: only rows in a row-sparse gradient decay and move; otherwise all rows
            do, as with a dense gradient.
        decay_mode: what the decay is added to, "l2" or "decoupled": the gradient,
            or the step.
        state_dtype: dtype of the state arrays; the parameter's by default. The
            arithmetic is in float32 at least.

    Returns:
        An optax transformation.

    Raises:
        ValueError: for a hyperparameter out of range, naming it and its value.
        TypeError: for one that is no number, or a flag that is neither True nor False.

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
    common = hyper.Common.among(locals())
    return _adagrad(common, lr_decay, initial_accumulator_value, eps, eps_root, per_row=False)


@sharing_programs
@hyper.naming_hyperparameters
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
        ValueError: for a hyperparameter out of range, naming it and its value.
        TypeError: for one that is no number, or a flag that is neither True nor False.

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
    common = hyper.Common.among(locals())
    return _adagrad(common, lr_decay, initial_accumulator_value, eps, eps_root, per_row=True)


def _adagrad(
    common: hyper.Common,
    lr_decay: Scalar,
    initial_accumulator_value: Scalar,
    eps: Scalar,
    eps_root: Scalar,
    *,
    per_row: bool,
) -> optax.GradientTransformationExtraArgs:
    hyper.check_number("lr_decay", lr_decay, hyper.NOT_NEGATIVE)
    hyper.check_denominator(
        eps=eps, eps_root=eps_root, initial_accumulator_value=initial_accumulator_value
    )

    def scalars(count):
        lr = common.rate(count)
        return (lr if hyper.is_zero(lr_decay) else lr / (1 + as_float(count) * lr_decay),)

    def rule(grad, param, total, lr):
        grad = common.decayed(common.clipped(common.rescaled(grad)), param)
        square = grad * grad
        total = total + (hyper.row_mean(square) if per_row else square)
        step = -lr * grad / (jnp.sqrt(total + eps_root) + eps)
        return common.with_decoupled_decay(step, param, lr), total

    return optimizer(
        RowRule(
            slots={"sum_of_squares": Slot(initial_accumulator_value, per_row)},
            scalars=scalars,
            rule=rule,
            needs_param=common.decays,
            state_dtype=common.state_dtype,
        ),
        AdagradState,
        common.lazy_update,
    )
