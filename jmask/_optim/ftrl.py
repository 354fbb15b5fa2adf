r"""FTRL-proximal: rows whose evidence stays below a threshold are exactly zero.

    n' = n + g**2
    z  <- z + g - (sqrt(n') - sqrt(n)) / lr * w
    w  <- (sign(z) * l1 - z) / ((beta + sqrt(n')) / lr + weight_decay)   where |z| > l1
          0                                                              elsewhere

With l1 = 1, a coordinate whose gradients sum to 0.9 has w = 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jmask._base.types import PyTree, Scalar
from jmask._optim import hyperparameters as hyper
from jmask._optim.row_rule import RowRule, Slot, optimizer
from jmask._updates.eager import sharing_programs


class FtrlState(NamedTuple):
    """State of `ftrl`: steps done, the shifted sum of gradients, the sum of squares."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    z: PyTree
    n: PyTree


@sharing_programs
@hyper.naming_hyperparameters
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
        learning_rate: a positive number, an array, or an optax schedule.
        l1: the threshold; larger gives more zeros.
        beta: smooths the rate of a coordinate's first steps.
        weight_decay: strength of the L2 term.
        clip_gradient: clip each entry of the rescaled gradient to [-c, c].
        rescale_grad: factor on the gradient, before clipping.
        maximize: move along the gradient instead of against it.
        lazy_update: only rows in a row-sparse gradient move; otherwise all rows do.
        state_dtype: dtype of the state arrays; the parameter's by default. The
            arithmetic is in float32 at least.

    Returns:
        An optax transformation.

    Raises:
        ValueError: for a hyperparameter out of range, naming it and its value.
        TypeError: for one that is no number, or a flag that is neither True nor False.

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
    common = hyper.Common.among(locals())
    hyper.check_number("l1", l1, hyper.NOT_NEGATIVE)
    hyper.check_number("beta", beta, hyper.NOT_NEGATIVE)

    def rule(grad, param, z, n, lr):
        grad = common.clipped(common.rescaled(grad))
        total = n + grad * grad
        root = jnp.sqrt(total)
        z = z + grad - (root - jnp.sqrt(n)) * param / lr
        # Where nothing has come yet the denominator may be zero, and so is z. Conditions are
        # such that nan, of a gradient or a rate, stays nan: |nan| > l1 would be a zero row.
        scale = (beta + root) / lr + weight_decay
        scale = jnp.where(scale == 0, 1, scale)
        new = jnp.where(jnp.abs(z) <= l1, 0, (jnp.sign(z) * l1 - z) / scale)
        return new - param, z, total

    return optimizer(
        RowRule(
            slots={"z": Slot(0.0), "n": Slot(0.0)},
            scalars=lambda count: (common.rate(count),),
            rule=rule,
            needs_param=True,
            state_dtype=state_dtype,
        ),
        FtrlState,
        lazy_update,
    )
