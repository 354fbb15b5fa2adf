"""Methods and operators of tensors: the functions of `jmask.numpy` of the same names.

    x * y        np.multiply(x, y), which NumPy hands to `__array_ufunc__`: jmask.numpy.multiply
    x.mean(0)    jmask.numpy.mean(x, 0)

These functions import the classes, so the classes look them up when they are called.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.typing import DTypeLike
from numpy.lib.mixins import NDArrayOperatorsMixin

from jmask._base.fallback import report_fallback
from jmask._base.types import (
    Argument,
    Function,
    HostArray,
    IndexLike,
    PyTree,
    Scalar,
    Shape,
    Shaped,
    Tensor,
    TensorLike,
)

if TYPE_CHECKING:
    from jmask._ops.selection import At
    from jmask._tensors.masked_tensor import MaskedTensor


def library() -> ModuleType:
    """Return jmask, whose functions of tensors are imported after these classes."""
    import jmask

    return jmask


def method(name: str) -> Function:
    """Return the method that is the function `name` of `jmask.numpy`."""

    def bound(self: Tensor, *args: Argument, **kwargs: Argument) -> Tensor:
        if kwargs.get("out", self) is None:
            del kwargs["out"]  # NumPy's functions pass it to methods: np.sum(x)
        return getattr(library().numpy, name)(self, *args, **kwargs)

    bound.__name__ = name
    bound.__doc__ = f"See `jmask.numpy.{name}`."
    return bound


def methods(names: str) -> list[Function]:
    return [method(name) for name in names.split()]


def is_comparable(x: object) -> bool:
    """Decide whether `==` compares entries with `x`; it is False for None and text."""
    return not (x is None or isinstance(x, str | bytes))


class TensorMethods(NDArrayOperatorsMixin):
    """Methods of both `MaskedTensor` and `RowSparse`; see the functions named."""

    __slots__ = ()

    __array_priority__ = 1000

    all, any, argmax, argmin, clip, copy = methods("all any argmax argmin clip copy")
    cumprod, cumsum, max, mean, min, prod = methods("cumprod cumsum max mean min prod")
    round, squeeze, std, sum, swapaxes = methods("round squeeze std sum swapaxes")
    take, var, conj = methods("take var conj")
    T, mT = map(property, methods("transpose matrix_transpose"))  # noqa: N815
    imag, real = map(property, methods("imag real"))
    conjugate, flatten, ravel = methods("conj ravel ravel")

    @property
    def ndim(self: Shaped) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self: Shaped) -> int:
        """The number of entries, stored and valid or not."""
        return math.prod(self.shape)

    def __array_ufunc__(
        self, ufunc: np.ufunc, how: str, *inputs: TensorLike, **kwargs: Argument
    ) -> Tensor:
        """Run functions of NumPy by those in `jmask.numpy`: `np.sqrt(x)`, `array * x`."""
        name = ufunc.__name__
        if any(out is self for out in kwargs.get("out", ())):  # x += y: x is the result now
            del kwargs["out"]
        if how == "__call__" and not kwargs and hasattr(library().numpy, name):
            return getattr(library().numpy, name)(*inputs)
        name = name if how == "__call__" else f"{name}.{how}"
        options = f" with {', '.join(map(repr, kwargs))}" if kwargs else ""
        raise TypeError(
            f"np.{name}{options} takes no {type(self).__name__}: use a function of "
            "jmask.numpy, or the dense array, `jmask.todense(x)`."
        )

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Argument:
        return np.equal(self, other) if is_comparable(other) else NotImplemented

    def __ne__(self, other: object) -> Argument:
        return np.not_equal(self, other) if is_comparable(other) else NotImplemented

    def block_until_ready(self) -> Tensor:
        """Wait until the arrays are computed, and return the tensor."""
        return jax.block_until_ready(self)

    def reshape(self, *shape: int | Shape, **kwargs: Argument) -> Tensor:
        """See `jmask.numpy.reshape`; the sizes as a tuple or as separate arguments."""
        sizes = shape[0] if len(shape) == 1 else shape
        return library().numpy.reshape(self, sizes, **kwargs)

    def transpose(self, *axes: int | Shape) -> Tensor:
        """See `jmask.numpy.transpose`; the axes as a tuple or as separate arguments."""
        return library().numpy.transpose(self, axes[0] if len(axes) == 1 else axes or None)


class MaskedMethods(TensorMethods):
    """Methods of `MaskedTensor`; see the functions named."""

    __slots__ = ()

    argsort, compressed, count, diagonal = methods("argsort compressed count diagonal")
    dot, median, nonzero, ptp = methods("dot median nonzero ptp")
    repeat, sort, trace = methods("repeat sort trace")

    def __getitem__(self, index: IndexLike) -> MaskedTensor:
        """See `jmask._ops.selection.masked_getitem`."""
        return library()._ops.selection.masked_getitem(self, index)

    @property
    def at(self) -> At:
        """See `jmask._ops.selection.At`."""
        return library()._ops.selection.At(self)

    def __repr__(self) -> str:
        return library()._tensors.conversions.representation(self)

    def item(self, *index: int) -> Scalar | None:
        """Return the single entry, or that at `index`, as a Python number; None if masked."""
        array = library().to_numpy_ma(self)
        return None if array.mask.item(*index) else array.data.item(*index)

    def tolist(self) -> PyTree:
        """Return the entries as nested lists of Python numbers; None where masked."""
        return library().to_numpy_ma(self).tolist()

    def __format__(self, spec: str) -> str:
        """Format the number that a scalar is; `--` if it is masked."""
        if not spec:
            return str(self)
        number = self.item()
        return "--" if number is None else format(number, spec)


class RowSparseMethods(TensorMethods):
    """Methods of `RowSparse`; see the functions named."""

    __slots__ = ()

    def __getitem__(self, index: IndexLike) -> Tensor:
        """See `jmask._ops.selection.row_getitem`."""
        return library()._ops.selection.row_getitem(self, index)

    def __len__(self: Shaped) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        raise TypeError(
            "a RowSparse has no truth value: use jmask.numpy.any(x) or jmask.numpy.all(x)."
        )

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> HostArray:
        if copy is False:
            raise ValueError("`copy`=False: a RowSparse has no dense array to share.")
        dense = library().cast_storage(self, "default")
        if isinstance(dense, jax.core.Tracer):
            raise TypeError(
                f"{self!r} is traced (under jit, vmap or grad) and no array: write x.todense() "
                "where one is meant."
            )
        dense = np.asarray(dense, dtype)
        report_fallback(
            f"{self!r} became a plain array by itself, at O(size) cost: write x.todense() "
            "where that is meant"
        )
        return dense
