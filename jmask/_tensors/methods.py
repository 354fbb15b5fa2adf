"""Methods and operators of tensors: the functions of `jmask.numpy`, by name.

    __mul__ = method("multiply")            in the class: x * y is jmask.numpy.multiply(x, y)

The functions are made of the classes, so the classes find them when they are called.
"""

import math
from types import ModuleType
from typing import TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

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

_T = TypeVar("_T")


def library() -> ModuleType:
    """Return jmask, whose functions of tensors are imported after these classes."""
    import jmask

    return jmask


def install(**functions: Function) -> None: ...


def call(name: str, *args: Argument, **kwargs: Argument) -> Tensor:
    """Return the result of the function of `jmask.numpy` of this name."""
    return getattr(library().numpy, name)(*args, **kwargs)


def method(name: str, reflected: bool = False) -> Function:
    """Return the method that is the function `name`; reflected, of (other, self)."""

    def bound(self: Tensor, *args: Argument, **kwargs: Argument) -> Tensor:
        if kwargs.get("out", self) is None:
            del kwargs["out"]  # NumPy's functions pass it to methods: np.sum(x)
        if reflected:
            return call(name, args[0], self, **kwargs)
        return call(name, self, *args, **kwargs)

    bound.__name__ = name
    bound.__doc__ = f"See `jmask.numpy.{name}`."
    return bound


def one_or_several(values: tuple[_T, ...]) -> _T | tuple[_T, ...]:
    """Return the arguments of `x.reshape(2, 3)` and of `x.reshape((2, 3))`."""
    return values[0] if len(values) == 1 else values


def is_comparable(x: object) -> bool:
    """Decide whether `==` compares entries with `x`; it is False for None and text."""
    return not (x is None or isinstance(x, str | bytes))


class TensorMethods:
    """Methods of both `MaskedTensor` and `RowSparse`; see the functions named."""

    __slots__ = ()

    __array_priority__ = 1000

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
        if how == "__call__" and not kwargs and hasattr(library().numpy, name):
            return call(name, *inputs)
        name = name if how == "__call__" else f"{name}.{how}"
        options = f" with {', '.join(map(repr, kwargs))}" if kwargs else ""
        raise TypeError(
            f"np.{name}{options} takes no {type(self).__name__}: use a function of "
            "jmask.numpy, or the dense array, `jmask.todense(x)`."
        )

    __hash__ = None  # type: ignore[assignment]

    # --- operators: the functions of jmask.numpy ----------------------------------------

    __add__ = method("add")
    __radd__ = method("add", reflected=True)
    __sub__ = method("subtract")
    __rsub__ = method("subtract", reflected=True)
    __mul__ = method("multiply")
    __rmul__ = method("multiply", reflected=True)
    __truediv__ = method("true_divide")
    __rtruediv__ = method("true_divide", reflected=True)
    __floordiv__ = method("floor_divide")
    __rfloordiv__ = method("floor_divide", reflected=True)
    __mod__ = method("remainder")
    __rmod__ = method("remainder", reflected=True)
    __pow__ = method("power")
    __rpow__ = method("power", reflected=True)
    __matmul__ = method("matmul")
    __rmatmul__ = method("matmul", reflected=True)
    __and__ = method("bitwise_and")
    __rand__ = method("bitwise_and", reflected=True)
    __or__ = method("bitwise_or")
    __ror__ = method("bitwise_or", reflected=True)
    __xor__ = method("bitwise_xor")
    __rxor__ = method("bitwise_xor", reflected=True)
    __lshift__ = method("left_shift")
    __rlshift__ = method("left_shift", reflected=True)
    __rshift__ = method("right_shift")
    __rrshift__ = method("right_shift", reflected=True)
    __neg__ = method("negative")
    __pos__ = method("positive")
    __abs__ = method("abs")
    __invert__ = method("bitwise_not")

    def __eq__(self, other: object) -> Tensor:
        return call("equal", self, other) if is_comparable(other) else NotImplemented

    def __ne__(self, other: object) -> Tensor:
        return call("not_equal", self, other) if is_comparable(other) else NotImplemented

    __lt__ = method("less")
    __le__ = method("less_equal")
    __gt__ = method("greater")
    __ge__ = method("greater_equal")

    def block_until_ready(self) -> Tensor:
        """Wait until the arrays are computed, and return the tensor."""
        return jax.block_until_ready(self)

    # --- elementwise --------------------------------------------------------------------

    clip = method("clip")
    conj = method("conj")
    conjugate = method("conj")
    imag = property(method("imag"))
    real = property(method("real"))
    round = method("round")

    # --- shapes -------------------------------------------------------------------------

    copy = method("copy")
    flatten = method("ravel")
    ravel = method("ravel")
    squeeze = method("squeeze")
    swapaxes = method("swapaxes")
    take = method("take")

    def reshape(self, *shape: int | Shape, **kwargs: Argument) -> Tensor:
        """See `jmask.numpy.reshape`; the sizes as a tuple or as separate arguments."""
        return call("reshape", self, one_or_several(shape), **kwargs)

    def transpose(self, *axes: int | Shape) -> Tensor:
        """See `jmask.numpy.transpose`; the axes as a tuple or as separate arguments."""
        return call("transpose", self, one_or_several(axes) if axes else None)

    T = property(method("transpose"))
    mT = property(method("matrix_transpose"))  # noqa: N815

    # --- reductions ---------------------------------------------------------------------

    all = method("all")
    any = method("any")
    argmax = method("argmax")
    argmin = method("argmin")
    cumprod = method("cumprod")
    cumsum = method("cumsum")
    max = method("max")
    mean = method("mean")
    min = method("min")
    prod = method("prod")
    std = method("std")
    sum = method("sum")
    var = method("var")


class MaskedMethods(TensorMethods):
    """Methods of `MaskedTensor`; see the functions named."""

    __slots__ = ()

    def __getitem__(self, index: IndexLike) -> Tensor:
        """See `jmask._ops.indexing.masked_getitem`."""
        return library()._ops.indexing.masked_getitem(self, index)

    @property
    def at(self) -> Tensor:
        """See `jmask._ops.indexing.At`."""
        return library()._ops.indexing.At(self)

    def __repr__(self) -> str:
        return library()._tensors.conversions.representation(self)

    argsort = method("argsort")
    compressed = method("compressed")
    count = method("count")
    diagonal = method("diagonal")
    dot = method("dot")
    median = method("median")
    nonzero = method("nonzero")
    ptp = method("ptp")
    repeat = method("repeat")
    sort = method("sort")
    trace = method("trace")

    # --- Python values ------------------------------------------------------------------

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
        if np.ndim(self):
            raise TypeError(
                f"a MaskedTensor of shape {np.shape(self)} is not one number to format as "
                f"{spec!r}: format an entry, or the array `x.to_tensor(fill_value)`."
            )
        number = self.item()
        return "--" if number is None else format(number, spec)


class RowSparseMethods(TensorMethods):
    """Methods of `RowSparse`; see the functions named."""

    __slots__ = ()

    def __getitem__(self, index: IndexLike) -> Tensor:
        """See `jmask._ops.indexing.row_getitem`."""
        return library()._ops.indexing.row_getitem(self, index)

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
