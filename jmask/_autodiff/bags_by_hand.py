"""Bags that are written by hand: rows that are looked up, weighted and summed.

    t[ids]                gather                 (b, k, D)     waits for its sum
    .astype(float32)      convert_element_type   (b, k, D)     still waits
    * weights[..., None]  mul                    (b, k, D)     with its weights
    .sum(1)               reduce_sum             (b, D)        a bag sum, with the tap of one

Many rows that nothing but a sum needs are never made, and neither is their gradient, which has
one row for each bag: it is as if `jmask.embedding_bag` had been called.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jmask._autodiff.lookups import Sums, Windows
from jmask._autodiff.views import Lookup, TableView, View
from jmask._base.array_types import wide
from jmask._base.forms import aval_of, parameter
from jmask._base.types import Argument
from jmask._kernels.gathered_rows import BagSum, bag_sum, has_many_rows, is_bag_sum


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class WaitingRows(View):
    """Rows (*ids, *row) of a table, times weights, that are looked up where they are needed."""

    table: TableView
    windows: Windows
    now: Callable[[], Argument]  # looks them up
    weights: Argument = None  # (*ids, 1, ..., 1) or None

    @property
    def is_wide(self) -> bool:
        """True if the rows have the dtype in which bags are summed."""
        return self.dtype == wide(self.table.dtype)

    def computed(
        self, eqn: JaxprEqn, args: Sequence[Argument], now: Callable[[], Argument]
    ) -> "WaitingRows | None":
        """Return the rows with a wider dtype or weights, or None for anything else."""
        batch, dtype = self.windows.batch, aval_of(eqn.outvars[0]).dtype
        wider = dataclasses.replace(self, dtype=dtype, now=now)
        if eqn.primitive.name == "convert_element_type":
            return wider if wider.is_wide else None
        (weights,) = (x for x in args if x is not self)
        one_each = (*batch, *(1,) * (self.ndim - len(batch)))
        are_weights = not isinstance(weights, View) and np.shape(weights) == one_each
        if self.weights is not None or not self.is_wide or not are_weights:
            return None
        if not is_bag_sum(self.table.array, weights, None, 1):  # they are sharded by their type
            return None
        return dataclasses.replace(wider, weights=weights)

    def summed(self, eqn: JaxprEqn) -> Lookup | None:
        """Return the sum over the last dimensions of the ids, or None if it is another one."""
        table, windows, weights = self.table, self.windows, self.weights
        axes, batch = sorted(parameter(eqn, "axes")), windows.batch
        if not self.is_wide or axes != list(range(len(batch) - len(axes), len(batch))):
            return None
        aval, count = aval_of(eqn.outvars[0]), math.prod(batch)
        bags = math.prod(batch[: -len(axes)])

        def bag(x: Argument) -> Argument:
            return None if x is None else x.reshape(bags, count // bags)

        def call() -> BagSum:
            return BagSum(table.array, bag(windows.ids()), None, bag(weights), bags, 0)

        def result() -> jax.Array:
            # A lookup reads the last row beyond the end, where it is not told to fill.
            reads = dataclasses.replace(windows, clips=windows.fill is None)
            arrays = table.array, bag(reads.ids()), None, bag(weights)
            return bag_sum(*arrays, bags, windows.fill or 0).reshape(aval.shape)

        return Sums(table, bags, count, aval, call).lookup(result)


def waiting(
    x: View, indices: Argument, windows: Windows, now: Callable[[], Argument]
) -> WaitingRows | None:
    """Return rows that wait for their sum, or None if they are few, or no rows of a table.

    Args:
        indices: of the rows, (*ids, 1).
    """
    if not isinstance(x, TableView) or x.width or not windows.are_rows():
        return None
    call = BagSum(x.array, indices, None, None, math.prod(windows.batch), 0)
    fills = windows.fill is None or windows.fill == 0 or np.isnan(windows.fill)
    if not (fills and is_bag_sum(x.array, indices, None, call.bags) and has_many_rows(call)):
        return None
    shape = (*windows.batch, *x.shape[1:])
    return WaitingRows(shape, x.dtype, lambda p: None, table=x, windows=windows, now=now)
