"""Reduce the valid entries of a tensor: arguments, storages, and four primitive reductions.

    x = MaskedTensor([[1, --, 3], [--, --, --]])        sum(x, axis=1) = [4, --]

| input                 | reduces                     | where there is no entry           |
|-----------------------|-----------------------------|-----------------------------------|
| `MaskedTensor`        | its valid entries           | masked                            |
| array with `where=`   | the entries there           | `empty`: sum 0, max -inf, mean nan|
| array                 | all entries, as `jax.numpy` | as `jax.numpy`                    |
| RowSparse, BCOO, BCSR | all entries, zeros included |                                   |

A reduction is a formula of a `MaskedTensor`, in functions that keep masks and storages: the
mean is the sum divided by the count. Only `reduced` sees how entries are laid out: it reduces
slices of the stored values, or segments of them where some sparse axes are kept. Where all
reduced axes are stored densely, say the columns of a RowSparse, results keep the storage.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmask._base import row_ids
from jmask._base.array_types import joint_dtype, trailing, wide
from jmask._base.types import (
    Argument,
    Arrays,
    Axis,
    DType,
    Function,
    Numbers,
    Scalar,
    Shape,
    Storage,
    Tensor,
    TensorLike,
)
from jmask._kernels.rows import add_rows
from jmask._ops.lift import adopted, bound_to, dense, entrywise, filled, refuse_output
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    as_tensor,
    checked_mask,
    common_shape,
    is_tensor,
    joined,
    with_values_of,
)
from jmask._tensors.storage import (
    as_dense,
    coordinates,
    is_sparse,
    sampled,
    sparse_sizes,
    stored_values,
    with_stored_values,
)

# --- a reduction of every storage --------------------------------------------------------

ZEROS_CHANGE_NOTHING = "zeros change nothing"
Values = TypeVar("Values", jax.Array, MaskedTensor)


class Reduction(Protocol):
    """A reduction with the arguments of JAX's; a masked tensor has masked results."""

    @overload
    def __call__(self, a: MaskedTensor, /, *args: Argument, **k: Argument) -> MaskedTensor: ...
    @overload
    def __call__(self, a: Numbers, /, *args: Argument, **k: Argument) -> jax.Array: ...
    @overload
    def __call__(self, a: TensorLike, /, *args: Argument, **k: Argument) -> Tensor: ...


def reduces(
    formula: Function,
    of_jax: Function | None = None,
    *,
    empty: Callable[[DType], Scalar] | float = 0,
    zeros: str | Function | None = None,
    like: Function | None = None,
    initial: Function | None = None,
    fill: float | None = None,
    one_axis: bool = False,
    arrays_too: bool = False,
) -> Reduction:
    """Lift a reduction, with the arguments of `of_jax`, or else of the formula.

    Args:
        formula: takes a `MaskedTensor`, `axis` as a tuple and its options by name; returns a
            `MaskedTensor`, in which reduced axes have size 1.
        of_jax: the function for arrays without `where=`; None: the formula serves them too.
        empty: the result of an array where no entry takes part, or a function of the dtype.
        zeros: the formula for an ordinary sparse tensor, whose entries that are not stored are
            zeros, or ZEROS_CHANGE_NOTHING. None: the tensor becomes dense.
        like: a function of JAX that has the dtype of the result. The formula gets at least 32
            bits, and its result is cast.
        initial: combines a result with the option `initial`, a number of the result's dtype;
            None: there is no such option.
        fill: for a formula with a result for each entry: what an array gets at an entry that
            takes no part, while others of its group do.
        one_axis: whether a tuple of axes is refused.
        arrays_too: whether the formula serves arrays too, with the arguments of `of_jax`.
    """
    signature = inspect.signature(of_jax or formula)
    parameters = signature.parameters
    first, name = next(iter(parameters)), (of_jax or formula).__name__
    more = inspect.signature(formula).parameters.keys() - parameters.keys()

    @functools.wraps(of_jax or formula)
    def lifted(*args: Argument, where: Argument = None, **kwargs: Argument) -> Argument:
        # --- arguments -------------------------------------------------------------------
        extra = {key: kwargs.pop(key) for key in more & kwargs.keys()}
        options = bound_to(signature, name, args, kwargs).arguments | extra
        x = as_tensor(adopted(options.pop(first)))
        where = options.pop("where", where)
        axis = options.pop("axis", parameters["axis"].default)
        axis = tuple(axis) if isinstance(axis, list) else axis
        axes = checked_axes(axis, len(x.shape))

        # --- storage ---------------------------------------------------------------------
        if is_sparse(x):
            fits = zeros is ZEROS_CHANGE_NOTHING or (zeros is not None and where is None)
            if any(x.shape[a] == 0 for a in axes):
                x = as_dense(x)
            elif not fits or getattr(x, "n_batch", False):
                x = dense(x, name, "it does not decompose into results of its stored values")
        if of_jax is not None and where is None and not (is_tensor(x) or arrays_too):
            return of_jax(x, axis=axis, **options)
        refuse_output(options)
        if one_axis and isinstance(axis, Sequence):
            raise TypeError(f"`axis` of {name} must be an int or None, got {axis!r}.")
        keepdims = options.pop("keepdims", False) if "keepdims" in parameters else True
        start = None if initial is None else options.pop("initial", None)
        is_masked, is_ordinary = isinstance(x, MaskedTensor), is_sparse(x)
        x = valid_entries(x, where)

        # --- result ----------------------------------------------------------------------
        dtype = None
        if like is not None:
            given = {k: options.pop(k) for k in _DTYPES if k in options}
            factors = getattr(options.get("b"), "dtype", x.dtype)  # of logsumexp
            dtype = result_dtype(like, joint_dtype(x.dtype, factors), **given)
            # `dtype=` casts the entries, not the result: as integers 0.5 + 0.5 is 0.
            is_asked = given.get("dtype") is not None
            x = x.astype(wide(dtype if is_asked else joint_dtype(x.dtype, dtype)))
        chosen = zeros if is_ordinary and callable(zeros) else formula
        result = chosen(x, axis=axes, **options)
        if not keepdims:  # the axes of several quantiles come first
            squeezed = [a + result.ndim - x.ndim for a in axes]
            shape = tuple(n for a, n in enumerate(result.shape) if a not in squeezed)
            along = stored_axes(result.storage, squeezed)
            parts = stored_values(result), result.valid
            values, valid = (jnp.squeeze(a, along) for a in parts)
            result = joined(with_stored_values(result.storage, values, shape), valid)
        if is_ordinary:
            result = filled(result)
        elif not is_masked:
            nothing = empty(result.dtype) if callable(empty) else empty
            if fill is not None:
                exists = x.valid.any(axes, keepdims=True)
                nothing = jnp.where(exists, fill, nothing).astype(result.dtype)
                result = jnp.where(result.valid, result.storage, nothing)
            else:
                result = result.to_tensor(nothing)
        if start is not None and initial is not None:
            result = initial(result, lax.convert_element_type(start, result.dtype))
        return result if dtype is None else on_values(lambda a: a.astype(dtype), result)

    return lifted


_DTYPES = ("dtype", "promote_integers")


def result_dtype(function: Function, operand: DTypeLike, **options: Argument) -> DType:
    """Return the dtype that a function of JAX, such as `jnp.sum`, gives for an operand's."""
    x64 = jax.config.read("jax_enable_x64")
    return _result_dtype(function, jnp.dtype(operand), x64, tuple(options.items()))


@functools.lru_cache(maxsize=256)  # or a small sum outside of jit takes 2.7 times as long
def _result_dtype(
    function: Function, operand: DType, x64: bool, options: tuple[tuple[str, Argument], ...]
) -> DType:
    function = functools.partial(function, **dict(options))
    return jax.eval_shape(function, jax.ShapeDtypeStruct((1,), operand)).dtype


def checked_axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return `axis` as ascending axes that are not negative."""
    if axis is None:
        return tuple(range(ndim))
    try:
        axes = [operator.index(a) for a in (axis if isinstance(axis, Sequence) else (axis,))]
    except TypeError:
        raise TypeError(
            f"`axis` must be an int, a tuple of ints or None, got {axis!r}."
        ) from None
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(f"`axis` {a} is out of bounds for a tensor of {ndim} dimensions.")
    axes = sorted(a % ndim for a in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"`axis` {axis} names an axis twice.")
    return tuple(axes)


def valid_entries(x: TensorLike, where: TensorLike | None) -> MaskedTensor:
    """Return a masked tensor of the entries of `x` where the booleans `where` are True."""
    x = x if isinstance(x, MaskedTensor) else MaskedTensor(x)
    if where is None:
        return x
    flags = checked_mask(where, "where")
    if common_shape([x.shape, flags.shape], "`x` and `where`") != x.shape:
        raise ValueError(
            f"`where` of shape {flags.shape} does not broadcast to `x` of shape {x.shape}."
        )
    return joined(x.storage, x.valid & sampled(as_dense(flags), x.storage))


def with_zeros(formula: Function, absorb: Callable[[jax.Array], jax.Array]) -> Function:
    """Return a formula of all entries: `absorb` adds a zero to the result of stored ones."""

    def lifted(x: MaskedTensor, axis: tuple[int, ...], **options: Argument) -> MaskedTensor:
        result = formula(x, axis=axis, **options)
        if is_sparse(result.storage):  # rows are stored whole: no zero is in their groups
            return result
        is_full = count_valid(x, axis).to_tensor(0) == math.prod(x.shape[a] for a in axis)
        return MaskedTensor(jnp.where(is_full, result.storage, absorb(result.storage)))

    return lifted


# --- slices and segments -----------------------------------------------------------------


def limit(dtype: DTypeLike, sign: int) -> Scalar:
    """Return the least (sign -1) or the greatest number (1) of `dtype`."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(sign > 0)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(sign * np.inf, dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"`x` has dtype {dtype}, and complex numbers have no order: use their absolute "
            "values or a part of them, jmask.numpy.abs(x), real(x) or imag(x)."
        )
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.max if sign > 0 else limits.min, dtype)


least, greatest = (functools.partial(limit, sign=sign) for sign in (-1, 1))
_IDENTITY: dict[str, Callable[[DType], Scalar]] = {
    "sum": lambda dtype: jnp.zeros((), dtype),
    "prod": lambda dtype: jnp.ones((), dtype),
    "max": least,
    "min": greatest,
}


def reduced(x: Values, axis: Sequence[int], kind: str) -> Values:
    """Return the sum, product, maximum or minimum of the valid entries, in their dtype.

    Reduced axes have size 1. An array is reduced as it is. Where a maximum equals the identity,
    entries that are not valid get a share of its derivative: `extremum` has the right one.
    """
    if not isinstance(x, MaskedTensor):
        return _slices(kind, x, tuple(axis))
    storage, sparse = x.storage, len(sparse_sizes(x.storage))
    values = jnp.where(x.valid, stored_values(x), _IDENTITY[kind](x.dtype))
    shape = tuple(1 if a in axis else size for a, size in enumerate(x.shape))
    kept = [a for a in range(sparse) if a not in axis]
    along: Shape = stored_axes(storage, [a for a in axis if a >= sparse])
    along = (0, *along) if sparse and not kept else along
    result, exists = _slices(kind, values, along), x.valid.any(along, keepdims=True)
    if len(kept) == sparse > 0:
        return joined(with_stored_values(storage, result, shape), exists)
    if kept:
        ids, groups = flat_index(storage, kept).reshape(-1), math.prod(shape[:sparse])
        # Padding goes to some group: it is not valid, so that its entry is the identity.
        result = _segmented(kind, result, ids, max(groups, 1))[:groups]
        exists = jax.ops.segment_max(exists.astype(jnp.uint8), ids, max(groups, 1))[:groups] > 0
    return joined(result.reshape(shape), exists.reshape(shape))


def stored_axes(storage: Storage, axes: Sequence[int]) -> Shape:
    """Return the axes of stored values for axes of the tensor, none of them sparse."""
    sparse = len(sparse_sizes(storage))  # all these are the first axis of stored values
    return tuple(a - sparse + (sparse > 0) for a in axes)


def _slices(kind: str, values: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the sum, product, maximum or minimum along axes, which stay with size 1."""
    function, dtype = getattr(jnp, kind), values.dtype
    if kind in ("sum", "prod"):
        result: jax.Array = function(values, axes, dtype=dtype, keepdims=True)
        return result
    result = function(values, axes, initial=_IDENTITY[kind](dtype), keepdims=True)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return result
    # XLA for CPUs loses a nan among some thousands of float32 numbers (jaxlib 0.10 to 0.12).
    nan = _slices("sum", jnp.where(values != values, values, jnp.zeros((), dtype)), axes)
    return jnp.where(nan != 0, nan, result)


def _segmented(kind: str, values: jax.Array, ids: jax.Array, groups: int) -> jax.Array:
    """Reduce the rows (n, *row) with equal ids; those that are not valid are the identity."""
    if kind == "sum":
        return add_rows(jnp.zeros((groups, *values.shape[1:]), values.dtype), ids, values)
    if kind != "prod":
        return getattr(jax.ops, f"segment_{kind}")(values, ids, groups)
    # A scan over sorted segments: a scatter of products has no derivative at 0.
    product = jnp.ones((groups, *values.shape[1:]), values.dtype)
    if values.shape[0] == 0:
        return product
    order = jnp.argsort(ids, stable=True)
    ids, values = ids[order], values[order]
    differs = ids[1:] != ids[:-1]
    starts = trailing(jnp.append(True, differs), values.ndim)
    _, running = lax.associative_scan(_product_since_start, (starts, values))
    place = lax.iota(ids.dtype, ids.shape[0])
    ends = jnp.where(jnp.append(differs, True), ids, groups + place)
    return product.at[ends].set(running, mode="drop", unique_indices=True)


def _product_since_start(
    left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (starts_left, product), (starts, x) = left, right
    # Not where(starts, x, product * x): x may be inf, and its derivative 0 * inf.
    return starts_left | starts, jnp.where(starts, jnp.ones_like(product), product) * x


def flat_index(storage: Storage, axes: Sequence[int]) -> jax.Array:
    """Return for each stored value its index in `axes`, flattened."""
    integer, sizes = _integer(), [storage.shape[axis] for axis in axes]
    if math.prod(sizes) > jnp.iinfo(integer).max:
        raise ValueError(
            f"axes {tuple(axes)} have {math.prod(sizes)} entries, more than {integer} can "
            "count: set jax_enable_x64."
        )
    sparse, shape = len(sparse_sizes(storage)), stored_values(storage).shape

    def along(axis: int) -> jax.Array:
        if axis < sparse and is_sparse(storage):
            last = max(storage.shape[axis] - 1, 0)
            return trailing(jnp.clip(coordinates(storage)[axis], 0, last), len(shape))
        return lax.broadcasted_iota(integer, shape, stored_axes(storage, [axis])[0])

    return row_ids.numbered([along(axis) for axis in axes], sizes, integer)


def _integer() -> DType:
    return jnp.dtype(jnp.result_type(int))


def count_valid(
    x: MaskedTensor, axis: Sequence[int], holds: jax.Array | None = None
) -> MaskedTensor:
    """Count the valid entries of each group, where `holds` is True if it is given."""
    ones = x.valid if holds is None else x.valid & holds
    return reduced(with_values_of(x, ones.astype(_integer())), axis, "sum")


def on_values(function: Function, x: Values) -> Values:
    """Apply a function to an array, or to all stored values, also under the mask."""
    return with_values_of(x, function(stored_values(x)))


# --- extrema -----------------------------------------------------------------------------


@jax.custom_jvp
def _with_slope_of(value: jax.Array, like: jax.Array) -> jax.Array:
    """Return `value` with the derivative of `like`."""
    return value


@_with_slope_of.defjvp
def _with_slope_of_jvp(primals: Arrays, tangents: Arrays) -> tuple[jax.Array, jax.Array]:
    # The function itself and not `primals[0]`, which the next derivative takes for a constant.
    return _with_slope_of(*primals), tangents[1]


def extremum(x: MaskedTensor, axis: Sequence[int], kind: str) -> MaskedTensor:
    """Return the maximum or minimum, with a derivative shared by valid entries equal to it."""
    result = reduced(on_values(lax.stop_gradient, x), axis, kind)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return result
    # The mean of the ties equals the result up to rounding, and shares the derivative among
    # them. The derivative of `reduced` is also shared with fills that equal the result.
    ties = x.valid & _ties(x, axis, kind)
    counts = on_values(lambda n: jnp.maximum(n, 1).astype(x.dtype), count_valid(x, axis, ties))
    mean = stored_values(reduced(divide(joined(x.storage, ties), counts), axis, "sum"))
    return on_values(lambda value: _with_slope_of(value, mean), result)


def first_index(x: MaskedTensor, axis: Sequence[int], kind: str) -> MaskedTensor:
    """Return the index in `axis` of the first valid entry that is the maximum or minimum."""
    indices = jnp.broadcast_to(flat_index(x.storage, axis), x.valid.shape)
    ties = x.valid & _ties(x, axis, kind)
    first = reduced(joined(with_stored_values(x.storage, indices), ties), axis, "min")
    return on_values(lambda i: jnp.where(first.valid, i, jnp.zeros_like(i)), first)


def _ties(x: MaskedTensor, axis: Sequence[int], kind: str) -> jax.Array:
    """Find the stored values that equal the maximum or minimum."""
    # XLA may compute x once for the reduction and once for the comparison, and round it in two
    # ways (a product and a sum, or both in one instruction): behind a barrier it is one array.
    x = on_values(lambda a: lax.optimization_barrier(lax.stop_gradient(a)), x)
    return stored_values(_equals(x, reduced(x, axis, kind)))


divide = entrywise(jnp.true_divide)
_equals = entrywise(lambda x, extremum: (x == extremum) | ((x != x) & (extremum != extremum)))
