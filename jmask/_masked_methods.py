"""The methods and operators of `MaskedTensor`: functions of other modules by name."""

from typing import Any


def _method(module: str, name: str, reflected: bool = False) -> Any:
    """A method that is a function of another module, imported when first called.

    Operations are built on this type, so they cannot be imported before it.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        from importlib import import_module

        function = getattr(import_module(f"jmask.{module}"), name)
        if reflected:
            return function(args[0], self, **kwargs)
        return function(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"See `jmask.{module.lstrip('_')}.{name}`."
    return method


class MaskedMethods:
    """What `MaskedTensor` can do, apart from what it is; see the functions named."""

    __slots__ = ()

    __hash__ = None  # type: ignore[assignment]

    # --- operators: the functions of jmask.numpy ----------------------------------------

    __add__ = _method("numpy", "add")
    __radd__ = _method("numpy", "add", reflected=True)
    __sub__ = _method("numpy", "subtract")
    __rsub__ = _method("numpy", "subtract", reflected=True)
    __mul__ = _method("numpy", "multiply")
    __rmul__ = _method("numpy", "multiply", reflected=True)
    __truediv__ = _method("numpy", "true_divide")
    __rtruediv__ = _method("numpy", "true_divide", reflected=True)
    __floordiv__ = _method("numpy", "floor_divide")
    __rfloordiv__ = _method("numpy", "floor_divide", reflected=True)
    __mod__ = _method("numpy", "remainder")
    __rmod__ = _method("numpy", "remainder", reflected=True)
    __pow__ = _method("numpy", "power")
    __rpow__ = _method("numpy", "power", reflected=True)
    __matmul__ = _method("numpy", "matmul")
    __rmatmul__ = _method("numpy", "matmul", reflected=True)
    __and__ = _method("numpy", "bitwise_and")
    __rand__ = _method("numpy", "bitwise_and", reflected=True)
    __or__ = _method("numpy", "bitwise_or")
    __ror__ = _method("numpy", "bitwise_or", reflected=True)
    __xor__ = _method("numpy", "bitwise_xor")
    __rxor__ = _method("numpy", "bitwise_xor", reflected=True)
    __lshift__ = _method("numpy", "left_shift")
    __rlshift__ = _method("numpy", "left_shift", reflected=True)
    __rshift__ = _method("numpy", "right_shift")
    __rrshift__ = _method("numpy", "right_shift", reflected=True)
    __neg__ = _method("numpy", "negative")
    __pos__ = _method("numpy", "positive")
    __abs__ = _method("numpy", "abs")
    __invert__ = _method("numpy", "bitwise_not")
    __eq__ = _method("numpy", "equal")
    __ne__ = _method("numpy", "not_equal")
    __lt__ = _method("numpy", "less")
    __le__ = _method("numpy", "less_equal")
    __gt__ = _method("numpy", "greater")
    __ge__ = _method("numpy", "greater_equal")

    # --- indexing -----------------------------------------------------------------------

    __getitem__ = _method("_masked_index", "getitem")

    @property
    def at(self) -> Any:
        """`x.at[index].set(...)`, as `jax.Array.at`; see `jmask._masked_at`."""
        from jmask._masked_at import At

        return At(self)  # type: ignore[arg-type]

    # --- shapes and selection -----------------------------------------------------------

    argsort = _method("_masked_shape", "argsort")
    copy = _method("_masked_shape", "copy")
    diagonal = _method("_masked_shape", "diagonal")
    flatten = _method("_masked_shape", "ravel")
    ravel = _method("_masked_shape", "ravel")
    repeat = _method("_masked_shape", "repeat")
    sort = _method("_masked_shape", "sort")
    squeeze = _method("_masked_shape", "squeeze")
    swapaxes = _method("_masked_shape", "swapaxes")
    take = _method("_masked_shape", "take")

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """See `jmask.numpy.reshape`; the sizes as a tuple or one by one."""
        from jmask._masked_shape import reshape

        return reshape(self, _one_or_several(shape), **kwargs)

    def transpose(self, *axes: Any) -> Any:
        """See `jmask.numpy.transpose`; the axes as a tuple or one by one."""
        from jmask._masked_shape import transpose

        return transpose(self, _one_or_several(axes) if axes else None)

    T = property(_method("_masked_shape", "transpose"))
    mT = property(_method("_masked_shape", "matrix_transpose"))  # noqa: N815

    # --- elementwise --------------------------------------------------------------------

    clip = _method("numpy", "clip")
    conj = _method("numpy", "conj")
    conjugate = _method("numpy", "conj")
    imag = property(_method("numpy", "imag"))
    real = property(_method("numpy", "real"))
    round = _method("numpy", "round")

    # --- over the valid entries ---------------------------------------------------------

    all = _method("numpy", "all")
    any = _method("numpy", "any")
    argmax = _method("numpy", "argmax")
    argmin = _method("numpy", "argmin")
    cumprod = _method("numpy", "cumprod")
    cumsum = _method("numpy", "cumsum")
    max = _method("numpy", "max")
    mean = _method("numpy", "mean")
    min = _method("numpy", "min")
    prod = _method("numpy", "prod")
    std = _method("numpy", "std")
    sum = _method("numpy", "sum")
    var = _method("numpy", "var")

    # --- Python values ------------------------------------------------------------------

    def item(self, *index: int) -> Any:
        """The single entry, or that at `index`, as a Python number; None if masked."""
        from jmask._masked_storage import to_numpy_ma

        array = to_numpy_ma(self)
        return None if array.mask.item(*index) else array.data.item(*index)

    def tolist(self) -> Any:
        """The entries as nested lists of Python numbers; None where masked."""
        from jmask._masked_storage import to_numpy_ma

        return to_numpy_ma(self).tolist()


def _one_or_several(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values
