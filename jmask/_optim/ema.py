r"""Average parameters exponentially, the rows of a table at the cost of those that moved.

    a <- decay * a + (1 - decay) * p         in every step, p after the step

While a row is inactive its p is constant, and k such steps are one:

    a <- p + decay**k * (a - p)

So a row makes up for the steps since its last one when it moves next, or is read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmask._base.array_types import added
from jmask._base.types import PyTree, Scalar
from jmask._lazy.checks import Fit
from jmask._lazy.state_rows import only_state
from jmask._optim.row_rule import Slot, check_numbers, row_rule, watching


class EmaState(NamedTuple):
    """State of `ema`: steps done, averages, and the last step of each row, (V, 1) of (V, D)."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    average: PyTree
    last: PyTree


class Ema(optax.GradientTransformationExtraArgs):
    """A transformation, as `ema` returns it, and `average` to read what it keeps.

    Attributes:
        decay: a number in [0, 1).
    """

    decay: Scalar

    def average(self, opt_state: PyTree, params: PyTree) -> PyTree:
        """Return the averages of all parameters after the last step, at the cost of all rows.

        Args:
            opt_state: a state that holds this transformation's, as the state of a chain does.
            params: the parameters after the last step.

        Returns:
            A tree like `params`, in float32 at least.

        Raises:
            ValueError: if `opt_state` holds no state of `ema`, or several.

        Example:
            See `jmask.ema`.
        """
        count, average, last = only_state(EmaState, "opt_state", opt_state, "jmask.ema")

        def read(param: jax.Array, average: jax.Array, last: jax.Array) -> jax.Array:
            return _caught_up(self.decay, param.astype(average.dtype), average, count - last)

        fit = Fit.alone(params)
        return fit.as_given(jax.tree.map(read, fit.params, average, last))


def ema(decay: Scalar) -> Ema:
    """Keep exponential moving averages of the parameters, exact and at the cost of the rows.

    Last in a chain, it passes updates on and averages what the parameters become by them. A
    step reads and writes the rows of a row-sparse update alone: what the average of another
    row has become is computed when it is read. It is the average that
    `optax.incremental_update(params, average, 1 - decay)` gives at O(table) in each step, from
    the initial parameters on.

    Args:
        decay: in [0, 1); a number or a (traced) scalar. With 0.999 an average forgets half of
            what it was in some 700 steps.

    Returns:
        An optax transformation that needs `params`. Its `average(opt_state, params)` gives the
        averages of all parameters; its state holds D + 1 numbers for a row of D. The average of
        a 16-bit parameter is in float32. `jmask.deferred` refuses it; do not chain it
        behind one either: `catch_up` moves rows that it does not see.

    Raises:
        ValueError: if `decay` is out of range.
        TypeError: if it is no number.

    References:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jmask
        >>> ema = jmask.ema(0.5)
        >>> tx, table = optax.chain(jmask.sgd(1.0), ema), jnp.zeros(2)
        >>> state = tx.init(table)
        >>> for row in [0, 1, 1]:
        ...     grads = jmask.RowSparse([row], jnp.array([-4.0]), (2,))
        ...     table, state = jmask.apply_gradients(tx, grads, state, table)
        >>> print(table, ema.average(state, table))
        [4. 8.] [3.5 5. ]
    """
    check_numbers(decay=decay)

    def rule(new, param, average, last, count):
        average = _caught_up(decay, param, average, count - last)
        # A step moves the parameter once, after all steps that the row has missed.
        average = new + jnp.asarray(decay, new.dtype) * (average - new)
        return new, average, jnp.full_like(last, count + 1)

    slots = {"average": Slot(None), "last": Slot(0, per_row=True, dtype=jnp.int32)}
    averages = row_rule(EmaState, slots, rule, lambda count: (count,), needs_param=True)

    def new_state(updates, state, params=None, **extra_args):
        new = updates
        if params is not None:  # as they are stored: a parameter of 16 bits is rounded
            new = jax.tree.map(lambda p, u: added(p, u).astype(p.dtype), params, updates)
        return averages.update(new, state, params, **extra_args)[1]

    transformation = Ema(*watching(averages.init, new_state))
    transformation.decay = decay
    return transformation


def _caught_up(
    decay: Scalar, param: jax.Array, average: jax.Array, steps: jax.Array
) -> jax.Array:
    """Return the average after `steps` more steps in which the parameter did not change."""
    kept = jnp.power(jnp.asarray(decay, param.real.dtype), steps.astype(param.real.dtype))
    return param + kept * (average - param)
