"""Methods and operators that are functions of other modules, by name.

Operations are built on the types, so the types cannot import them:

    __mul__ = method("numpy", "multiply")        x * y  is  jmask.numpy.multiply(x, y)
"""

from typing import Any


def method(module: str, name: str, reflected: bool = False) -> Any:
    """A method that is a function of another module of jmask, imported when first called."""

    def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
        from importlib import import_module

        function = getattr(import_module(f"jmask.{module}"), name)
        if kwargs.get("out", self) is None:
            del kwargs["out"]  # NumPy's functions pass it to methods: np.sum(x)
        if reflected:
            return function(args[0], self, **kwargs)
        return function(self, *args, **kwargs)

    bound.__name__ = name
    public = "numpy" if module.startswith("_masked") else module.lstrip("_")
    bound.__doc__ = f"See `jmask.{public}.{name}`."
    return bound


def one_or_several(values: tuple[Any, ...]) -> Any:
    """The arguments of `x.reshape(2, 3)` and of `x.reshape((2, 3))`."""
    return values[0] if len(values) == 1 else values


class TensorMethods:
    """What `MaskedTensor` and `RowSparse` can both do; see the functions named."""

    __slots__ = ()

    # NumPy and JAX arrays must leave binary operations to the reflected methods here.
    __array_ufunc__ = None
    __array_priority__ = 1000

    __hash__ = None  # type: ignore[assignment]

    # --- operators: the functions of jmask.numpy ----------------------------------------

    __add__ = method("numpy", "add")
    __radd__ = method("numpy", "add", reflected=True)
    __sub__ = method("numpy", "subtract")
    __rsub__ = method("numpy", "subtract", reflected=True)
    __mul__ = method("numpy", "multiply")
    __rmul__ = method("numpy", "multiply", reflected=True)
    __truediv__ = method("numpy", "true_divide")
    __rtruediv__ = method("numpy", "true_divide", reflected=True)
    __floordiv__ = method("numpy", "floor_divide")
    __rfloordiv__ = method("numpy", "floor_divide", reflected=True)
    __mod__ = method("numpy", "remainder")
    __rmod__ = method("numpy", "remainder", reflected=True)
    __pow__ = method("numpy", "power")
    __rpow__ = method("numpy", "power", reflected=True)
    __matmul__ = method("numpy", "matmul")
    __rmatmul__ = method("numpy", "matmul", reflected=True)
    __and__ = method("numpy", "bitwise_and")
    __rand__ = method("numpy", "bitwise_and", reflected=True)
    __or__ = method("numpy", "bitwise_or")
    __ror__ = method("numpy", "bitwise_or", reflected=True)
    __xor__ = method("numpy", "bitwise_xor")
    __rxor__ = method("numpy", "bitwise_xor", reflected=True)
    __lshift__ = method("numpy", "left_shift")
    __rlshift__ = method("numpy", "left_shift", reflected=True)
    __rshift__ = method("numpy", "right_shift")
    __rrshift__ = method("numpy", "right_shift", reflected=True)
    __neg__ = method("numpy", "negative")
    __pos__ = method("numpy", "positive")
    __abs__ = method("numpy", "abs")
    __invert__ = method("numpy", "bitwise_not")
    __eq__ = method("numpy", "equal")
    __ne__ = method("numpy", "not_equal")
    __lt__ = method("numpy", "less")
    __le__ = method("numpy", "less_equal")
    __gt__ = method("numpy", "greater")
    __ge__ = method("numpy", "greater_equal")

    # --- elementwise --------------------------------------------------------------------

    clip = method("numpy", "clip")
    conj = method("numpy", "conj")
    conjugate = method("numpy", "conj")
    imag = property(method("numpy", "imag"))
    real = property(method("numpy", "real"))
    round = method("numpy", "round")

    # --- shapes -------------------------------------------------------------------------

    copy = method("_masked_shape", "copy")
    flatten = method("_masked_shape", "ravel")
    ravel = method("_masked_shape", "ravel")
    squeeze = method("_masked_shape", "squeeze")
    swapaxes = method("_masked_shape", "swapaxes")
    take = method("_masked_shape", "take")

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """See `jmask.numpy.reshape`; the sizes as a tuple or one by one."""
        from jmask._masked_shape import reshape

        return reshape(self, one_or_several(shape), **kwargs)

    def transpose(self, *axes: Any) -> Any:
        """See `jmask.numpy.transpose`; the axes as a tuple or one by one."""
        from jmask._masked_shape import transpose

        return transpose(self, one_or_several(axes) if axes else None)

    T = property(method("_masked_shape", "transpose"))
    mT = property(method("_masked_shape", "matrix_transpose"))  # noqa: N815

    # --- reductions ---------------------------------------------------------------------

    all = method("numpy", "all")
    any = method("numpy", "any")
    argmax = method("numpy", "argmax")
    argmin = method("numpy", "argmin")
    cumprod = method("numpy", "cumprod")
    cumsum = method("numpy", "cumsum")
    max = method("numpy", "max")
    mean = method("numpy", "mean")
    min = method("numpy", "min")
    prod = method("numpy", "prod")
    std = method("numpy", "std")
    sum = method("numpy", "sum")
    var = method("numpy", "var")
