"""Values of a gradient program: arrays, and two kinds of symbolic ones.

`RowSum` is the cotangent of a table while it is a sum of row updates. No parts means zero,
so the zeros that automatic differentiation scatters into are never made. Inside a scan
the running sum is carried in; there `carry` names the carry that the parts are to be
added to, and only additions may touch it.

    RowSum(parts=())                    zeros(V, D)
    RowSum(parts=((ids, rows),))        zeros(V, D).at[ids].add(rows)
    RowSum(..., carry=c)                c + zeros(V, D).at[ids].add(rows)

`Filled` is an array all of whose entries are one scalar, kept symbolic so that a product
with it (the scaling of a loss) is recognised as a product with a scalar.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jmask._base.array_types import is_known
from jmask._base.fallback import LARGE
from jmask._base.row_ids import id_dtype
from jmask._base.shardings import varying_alike
from jmask._base.types import ArrayFunction, DType, Shape, Value
from jmask._kernels import tuning
from jmask._kernels.coalesce import coalesce_rows
from jmask._kernels.gathered_rows import gathered, joined, scaled
from jmask._kernels.rows import split_rows
from jmask._kernels.update_rows import add_to_rows
from jmask._tensors.row_sparse import RowSparse

IdsAndRows = tuple[jax.Array, jax.Array]
"""Canonical ids (n,) and the rows to be added there (n, *row)."""

# Rows from which an array that is sliced with fixed bounds counts as a table, whose gradient is
# worth storing by rows: a stack of eight weights of layers is sliced so too, and its users
# expect an array. A judgement, not a measurement.
_MANY = 1000
_refused: contextvars.ContextVar[set[object]] = contextvars.ContextVar("refused")


@contextlib.contextmanager
def trial() -> Iterator[set[object]]:
    """Context of a trial trace: yields the set of scan carries that it refuses.

    A carry is refused where it meets something other than the addition of rows. Trials
    nest, and an inner one may refuse a carry of the scan around it.
    """
    outer = _refused.get(None)
    refused: set[object] = set()
    token = _refused.set(refused)
    try:
        yield refused
    finally:
        _refused.reset(token)
        if outer is not None:
            outer |= refused


def refuse(carry: object | None) -> None:
    """Note that `carry`, if it is one, cannot stay symbolic."""
    if carry is not None:
        _refused.get().add(carry)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["parts"],
    meta_fields=["shape", "dtype", "looked_up", "carry", "leading", "width"],
)
@dataclasses.dataclass(frozen=True)
class RowSum:
    """A sum of row updates of an array of the given shape and dtype.

    It is a tree of its ids and rows, so that the body of a loop or a branch may return it.

    Attributes:
        parts: pairs of canonical ids (n,) and rows (n, *shape[leading:]).
        looked_up: some part comes from a lookup. Otherwise the rows come from slices with
            fixed bounds (`weights[:10]`), whose gradient stays an ordinary dense array
            unless a lookup of the same table joins it, or they are few of a large table.
        carry: the scan carry this is to be added to, by identity, or None.
        leading: how many dimensions the ids number, in row-major order: 1 of (V, *row), 2 of
            stacked tables (M, V, *row).
        width: of packed tables, how many entries of a line a row has; `leading` is 2 then.
    """

    shape: Shape
    dtype: DType
    parts: tuple[IdsAndRows, ...] = ()
    looked_up: bool = False
    carry: object | None = None
    leading: int = 1
    width: int | None = None

    @property
    def count(self) -> int:
        """The number of rows, which is the id of padding."""
        if self.width:
            return math.prod(self.shape) // self.width
        return math.prod(self.shape[: self.leading])

    @property
    def row(self) -> Shape:
        return (self.width,) if self.width else self.shape[self.leading :]

    @property
    def fineness(self) -> tuple[int, int]:
        """Order sums of one array by the size of their rows, small ones last."""
        return self.leading, -(self.width or 0)

    @property
    def is_zero(self) -> bool:
        return not self.parts and self.carry is None

    @property
    def nse(self) -> int:
        return sum(ids.shape[0] for ids, _ in self.parts)

    @property
    def is_rows(self) -> bool:
        """True if a gradient that ends as this sum is a `RowSparse`, and no array."""
        if self.looked_up or not self.parts:  # however many rows, which may not be known
            return self.looked_up
        size = math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
        return size >= LARGE and self.count >= max(_MANY, 8 * self.nse)

    def covers(self, share: float) -> bool:
        """Decide whether it has this share of as many rows as the array has, or more."""
        return is_known(self.nse, self.count) and self.nse >= share * self.count

    def plus(self, other: "RowSum") -> "RowSum":
        """Add the rows of an array of the same shape."""
        looked_up = self.looked_up or other.looked_up
        if not other.parts:
            return dataclasses.replace(self, looked_up=looked_up)
        like = max(self, other, key=lambda x: x.fineness) if self.parts else other
        parts = list(self.refined(like).parts)
        places = {id(ids): i for i, (ids, _) in enumerate(parts)}
        for ids, rows in other.refined(like).parts:
            i = places.get(id(ids))
            if i is None:
                parts.append((ids, rows))
            else:  # what was looked up in `t + f(t)`
                parts[i] = ids, lax.add(*varying_alike(parts[i][1], rows))
        result = dataclasses.replace(self, parts=tuple(parts), looked_up=looked_up)
        return dataclasses.replace(result, leading=like.leading, width=like.width)

    def refined(self, like: "RowSum") -> "RowSum":
        """Split each row into several, which are rows of `like`."""
        if like.fineness == self.fineness:
            return self
        each = like.count // max(self.count, 1)
        return self.split(each, like.leading, self.shape, like.width)

    def split(
        self, each: int, leading: int, shape: Shape, width: int | None = None
    ) -> "RowSum":
        """Return an array of another shape, of which `each` rows are one of this."""
        finer = dataclasses.replace(self, shape=shape, leading=leading, width=width, parts=())
        rows = self.in_few_parts().parts
        parts = tuple(split_rows(*x, each, finer.count, finer.row) for x in rows)
        return dataclasses.replace(finer, parts=parts)

    def scaled(self, function: ArrayFunction) -> "RowSum":
        """Multiply every entry by the same number, as the function does with an array."""
        return self.map_rows(lambda rows: scaled(rows, function))

    def map_rows(
        self, function: ArrayFunction, shape: Shape | None = None, dtype: DType | None = None
    ) -> "RowSum":
        """Apply a linear function to all rows, which may change shape and dtype as said.

        A carry cannot be changed along: that would have to happen outside the scan.
        """
        refuse(self.carry)
        parts = tuple((ids, function(rows)) for ids, rows in self.in_few_parts().parts)
        shape = self.shape if shape is None else shape
        dtype = self.dtype if dtype is None else dtype
        return dataclasses.replace(self, parts=parts, shape=shape, dtype=dtype)

    def in_few_parts(self) -> "RowSum":
        """Return the same sum, in one part if there are many: each is one more equation.

        Rows of equal ids are summed if there are more than twice as many as the table has.
        """
        if len(self.parts) <= tuning.GRADIENT_PARTS:
            return self
        ids, rows = self.joined()
        if is_known(self.nse, self.count) and self.nse > 2 * self.count:
            ids, rows = coalesce_rows(ids, rows, self.count)
        return dataclasses.replace(self, parts=((ids, rows),))

    def joined(self) -> IdsAndRows:
        """Return all parts as one; rows that are known as gathered stay so where it pays."""
        ids = [ids for ids, _ in self.parts]
        return jnp.concatenate(ids), joined([rows for _, rows in self.parts])

    def map_sums(self, function: ArrayFunction, dtype: DType | None = None) -> "RowSum":
        """Apply a function that is 0 at 0, linear or not, to every entry of the sum.

        Equal ids are summed first.
        """
        if not self.parts:
            return self.map_rows(function, dtype=dtype)
        summed = coalesce_rows(*self.concatenated(), self.count)
        return dataclasses.replace(self, parts=(summed,)).map_rows(function, dtype=dtype)

    def broadcast(self, shape: Shape, dimensions: Sequence[int]) -> "RowSum | None":
        """Broadcast the rows, as `lax.broadcast_in_dim` does.

        None if that repeats or moves a dimension that the ids number.
        """
        leading = self.leading
        if shape == self.shape:
            return self
        in_place = tuple(dimensions[:leading]) == tuple(range(leading)) and not self.width
        if not in_place or shape[:leading] != self.shape[:leading]:
            return None
        along_rows = [0, *(d - leading + 1 for d in dimensions[leading:])]
        return self.map_rows(
            lambda x: lax.broadcast_in_dim(x, (*x.shape[:1], *shape[leading:]), along_rows),
            shape=shape,
        )

    def concatenated(self, capacity: int | None = None) -> IdsAndRows:
        """Return all parts as one, padded to `capacity` entries."""
        rows = self.count
        ids = [ids for ids, _ in self.parts]
        values = [values for _, values in self.parts]
        missing = 0 if capacity is None else capacity - self.nse
        if missing or not self.parts:
            ids.append(jnp.full((missing,), rows, id_dtype(rows)))
            values.append(jnp.zeros((missing, *self.row), self.dtype))
        if len(ids) == 1:
            return ids[0], values[0]
        return jnp.concatenate(ids), jnp.concatenate(values)

    def added_to(self, dense: jax.Array) -> jax.Array:
        if self.leading > 1 and self.parts:
            dense = dense.reshape(self.count, *self.row)
        for ids, rows in self.parts:
            dense = add_to_rows(dense, ids, gathered(rows))
        return dense.reshape(self.shape)

    def todense(self) -> jax.Array:
        """Return the dense array; for a carry, a placeholder in a trial that is dropped."""
        refuse(self.carry)
        return self.added_to(jnp.zeros(self.shape, self.dtype))

    def to_row_sparse(self) -> RowSparse:
        """Return the parts as one `RowSparse`."""
        ids, values = self.joined() if self.parts else self.concatenated()
        return RowSparse.from_rows(
            ids,
            values,
            self.shape,
            coalesced=False,
            leading=self.leading,
            width=self.width,
        )


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["shape"]
)
@dataclasses.dataclass(frozen=True)
class Filled:
    """An array of the given shape, every entry of which is the scalar `value`."""

    shape: Shape
    value: jax.Array

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    def todense(self) -> jax.Array:
        return jnp.full(self.shape, self.value)


def is_symbolic(x: object) -> bool:
    """Decide whether `x` stands for an array."""
    return isinstance(x, RowSum | Filled)


def dense(x: Value) -> Value:
    """Return a symbolic value as an array, anything else as it is."""
    return x.todense() if is_symbolic(x) else x


def _is_literal(x: object) -> bool:
    # Values that are traced or computed are never looked at.
    return isinstance(x, bool | int | float | complex | np.generic | np.ndarray)


def is_literal_zero(x: object) -> bool:
    return _is_literal(x) and not np.any(x)


def is_not_finite(x: object) -> bool:
    """Decide whether a literal is infinite or nan, which makes nan of zeros."""
    return _is_literal(x) and not np.all(np.isfinite(x))


def as_scalar(x: Value) -> ArrayLike | None:
    """Return the scalar that `x` is everywhere, if that is known without looking at values."""
    if isinstance(x, Filled):
        return x.value
    is_scalar = not isinstance(x, RowSum) and np.ndim(x) == 0
    return x if is_scalar and not is_not_finite(x) else None
