import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmask._base.array_types import trailing
from jmask._kernels.rows import add_rows, gather_rows


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[], meta_fields=["axes", "keepdims"]
)
@dataclasses.dataclass(frozen=True)
class BySlices:
    """Groups that are the slices of an array along `axes`; results keep these if `keepdims`."""

    axes: tuple[int, ...]
    keepdims: bool

    def sum(self, x: jax.Array) -> jax.Array:
        return jnp.sum(x, self.axes, dtype=x.dtype, keepdims=self.keepdims)

    def prod(self, x: jax.Array) -> jax.Array:
        return jnp.prod(x, self.axes, dtype=x.dtype, keepdims=self.keepdims)

    def max(self, x: jax.Array) -> jax.Array:
        return jnp.max(x, self.axes, keepdims=self.keepdims, initial=least(x.dtype))

    def min(self, x: jax.Array) -> jax.Array:
        return jnp.min(x, self.axes, keepdims=self.keepdims, initial=greatest(x.dtype))

    def any(self, x: jax.Array) -> jax.Array:
        return jnp.any(x, self.axes, keepdims=self.keepdims)

    def spread(self, result: jax.Array) -> jax.Array:
        """Return for each entry the result of its group, where it broadcasts to the entries."""
        return result if self.keepdims else jnp.expand_dims(result, self.axes)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["ids"], meta_fields=["number", "axes"]
)
@dataclasses.dataclass(frozen=True)
class BySegments:
    """Groups that are the rows of an array with equal `ids`; results are (number, *row).

    Attributes:
        ids (n,): the group of each row; `number` where it is in none.
        number: how many groups there are. At least one row is in results, as they are gathered
            by `ids` also where there is no group.
        axes: of the rows, reduced first.
    """

    ids: jax.Array
    number: int
    axes: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

    def _rows(self, x: jax.Array, name: str) -> jax.Array:
        return getattr(BySlices(self.axes, False), name)(x) if self.axes else x

    def sum(self, x: jax.Array) -> jax.Array:
        x = self._rows(x, "sum")
        zeros = jnp.zeros((max(self.number, 1), *x.shape[1:]), x.dtype)
        return add_rows(zeros, self.ids, x)

    def max(self, x: jax.Array) -> jax.Array:
        return jax.ops.segment_max(self._rows(x, "max"), self.ids, max(self.number, 1))

    def min(self, x: jax.Array) -> jax.Array:
        return jax.ops.segment_min(self._rows(x, "min"), self.ids, max(self.number, 1))

    def any(self, x: jax.Array) -> jax.Array:
        return self.max(x.astype(jnp.uint8)) > 0

    def prod(self, x: jax.Array) -> jax.Array:
        """Scan over sorted segments: a scatter of products has no derivative at 0."""
        x = self._rows(x, "prod")
        if x.shape[0] == 0:
            return jnp.ones((max(self.number, 1), *x.shape[1:]), x.dtype)
        order = jnp.argsort(self.ids, stable=True)
        segments, x = BySegments(self.ids[order], self.number), x[order]
        changes = segments.ids[1:] != segments.ids[:-1]
        true = jnp.ones((1,), bool)
        starts = trailing(jnp.concatenate([true, changes]), x.ndim)
        ends = trailing(jnp.concatenate([changes, true]), x.ndim)
        _, running = lax.associative_scan(_join, (starts, x))
        product = segments.sum(jnp.where(ends, running, 0))
        is_empty = segments.sum(jnp.ones_like(segments.ids)) == 0
        return jnp.where(trailing(is_empty, product.ndim), 1, product)

    def spread(self, result: jax.Array) -> jax.Array:
        """Return for each entry the result of its group, where it broadcasts to the entries."""
        rows = gather_rows(result, self.ids)
        return jnp.expand_dims(rows, self.axes) if self.axes else rows


def least(dtype: DTypeLike) -> ArrayLike:
    """Return the number that changes no maximum over `dtype`."""
    return _limits(dtype)[0]


def greatest(dtype: DTypeLike) -> ArrayLike:
    """Return the number that changes no minimum over `dtype`."""
    return _limits(dtype)[1]


def _limits(dtype: DTypeLike) -> tuple[ArrayLike, ArrayLike]:
    if jnp.issubdtype(dtype, jnp.bool_):
        return False, True
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf, dtype), np.asarray(np.inf, dtype)
    limits = jnp.iinfo(dtype)
    return np.asarray(limits.min, dtype), np.asarray(limits.max, dtype)


def _join(
    left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    starts_left, product = left
    starts, x = right
    # Not where(starts, x, product * x): x may be inf, and its derivative 0 * inf.
    return starts_left | starts, jnp.where(starts, 1, product) * x
