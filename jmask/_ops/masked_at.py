"""`x.at[index].set(...)` and its relatives for masked tensors.

    x                          [1, --, 3]
    x.at[1].set(5)             [1,  5, 3]      a plain value makes entries valid
    x.at[:2].add(5)            [6, --, 3]      arithmetic leaves masked entries masked
    x.at[0].set(masked)        [--, --, 3]     a masked value masks

Where positions repeat and one of the values written there is masked, so is the result. A
masked index writes nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmask._ops.elementwise import elementwise
from jmask._ops.masked_index import getitem, has_masked, known_places, with_array
from jmask._ops.masked_moves import data_of, dense, masked_of
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.methods import install


class At:
    """What `x.at` is: indexing it gives the `Positions` to read or update."""

    __slots__ = ("x",)

    def __init__(self, x: MaskedTensor):
        self.x = x

    def __getitem__(self, index: Any) -> "Positions":
        return Positions(self.x, index)

    def __repr__(self) -> str:
        return f"At({self.x!r})"


class Positions:
    """`x.at[index]`; keyword arguments of the methods are those of `jax.Array.at`."""

    __slots__ = ("index", "x")

    def __init__(self, x: MaskedTensor, index: Any):
        self.x = dense(x, "at")
        self.index = with_array(index)

    def __repr__(self) -> str:
        return f"Positions({self.x!r}, {self.index!r})"

    def get(self, **kwargs: Any) -> MaskedTensor:
        """The entries; those out of range are masked with mode="fill" and no `fill_value`."""
        mode, fill = kwargs.get("mode"), kwargs.pop("fill_value", None)
        if mode is None and has_masked(self.index):
            return getitem(self.x, self.index)
        index, kwargs = self._places("fill", kwargs)
        data = self.x.storage.at[index].get(fill_value=fill, **kwargs)
        valid = self.x.valid.at[index].get(fill_value=fill is not None, **kwargs)
        return joined(data, valid)

    def set(self, values: Any, **kwargs: Any) -> MaskedTensor:
        """Entries replaced: by a masked tensor with its mask, by anything else as valid."""
        values = dense(values, "at")
        index, kwargs = self._places("drop", kwargs)
        data = self.x.storage.at[index].set(data_of(values), **kwargs)
        valid = self.x.valid.at[index].set(True, **kwargs)
        if isinstance(values, MaskedTensor):
            # Which of several values is written to one position is not defined, so the
            # mask must not depend on it.
            valid = valid.at[index].min(values.valid, **kwargs)
        return joined(data, valid)

    def add(self, values: Any, **kwargs: Any) -> MaskedTensor:
        """`values` added to the entries that are valid."""
        return self._combined("add", values, kwargs)

    def subtract(self, values: Any, **kwargs: Any) -> MaskedTensor:
        """`values` subtracted from the entries that are valid."""
        return self._combined("subtract", values, kwargs)

    def multiply(self, values: Any, **kwargs: Any) -> MaskedTensor:
        """The entries that are valid multiplied by `values`."""
        return self._combined("multiply", values, kwargs)

    mul = multiply

    def divide(self, values: Any, **kwargs: Any) -> MaskedTensor:
        """The entries that are valid divided by `values`."""
        return self._combined("divide", values, kwargs)

    def power(self, values: Any, **kwargs: Any) -> MaskedTensor:
        """The entries that are valid raised to the power of `values`."""
        return self._combined("power", values, kwargs)

    def min(self, values: Any, **kwargs: Any) -> MaskedTensor:
        """The smaller of each valid entry and `values`."""
        return self._combined("min", values, kwargs)

    def max(self, values: Any, **kwargs: Any) -> MaskedTensor:
        """The larger of each valid entry and `values`."""
        return self._combined("max", values, kwargs)

    def apply(self, func: Callable[[Any], Any], **kwargs: Any) -> MaskedTensor:
        """The elementwise `func` of the valid entries, once where positions repeat."""
        return self.set(elementwise(func)(self.get(**kwargs)), **kwargs)

    def _combined(self, name: str, values: Any, kwargs: dict) -> MaskedTensor:
        values = dense(values, "at")
        index, kwargs = self._places("drop", kwargs)
        # Ones wherever the result is masked: no nan from there can reach a derivative.
        target = self.x.valid.at[index].get(fill_value=False, mode=kwargs.get("mode"))
        data = _ones_where(~self.x.valid, self.x.storage).at[index]
        clean = _ones_where(~target | masked_of(values), jnp.asarray(data_of(values)))
        data = getattr(data, name)(clean, **kwargs)
        if not isinstance(values, MaskedTensor):
            return joined(data, self.x.valid)
        return joined(data, self.x.valid.at[index].min(values.valid, **kwargs))

    def _places(self, outside: str, kwargs: dict) -> tuple[Any, dict]:
        if not has_masked(self.index):
            return self.index, kwargs
        clip = kwargs.get("mode") == "clip"
        places = known_places(self.index, self.x.shape, clip=clip)
        return places, {**kwargs, "mode": outside}


def _ones_where(masked: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.where(masked, jnp.ones_like(values, shape=()), values)


install(masked_at=At)
