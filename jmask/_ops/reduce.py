"""Reduce the valid entries of a tensor: arguments, storages, and four primitive reductions.

    x = MaskedTensor([[1, --, 3], [--, --, --]])        sum(x, axis=1) = [4, --]

| input                 | reduces                     | where there is no entry           |
|-----------------------|-----------------------------|-----------------------------------|
| `MaskedTensor`        | its valid entries           | masked                            |
| array with `where=`   | the entries there           | `empty`: sum 0, max -inf, mean nan|
| array                 | all entries, as `jax.numpy` | as `jax.numpy`                    |
| RowSparse, BCOO, BCSR | all entries, zeros included |                                   |

A reduction is a formula of a `MaskedTensor`, in functions that keep masks and storages: the
mean is the sum divided by the count. Only sum, product, maximum and minimum (`reduced`) see how
entries are laid out:

    slices      of the stored values, when all or none of the sparse axes are reduced
    segments    of a BCOO or BCSR of which some sparse axes are kept, say the rows

Results are dense; where all reduced axes are stored densely (the columns of a RowSparse) they
keep the storage. A group without entries holds the identity and is masked.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.sparse import BCOO, BCSR
from jax.typing import DTypeLike

from jmask._base.array_types import joint_dtype, trailing, wide
from jmask._base.types import (
    Argument,
    Axis,
    DType,
    Function,
    JvpArgs,
    Mask,
    Scalar,
    Tensor,
    TensorLike,
)
from jmask._base.validation import refuse_scipy
from jmask._kernels.rows import add_rows
from jmask._ops.lift import adopted, dense, entrywise, refuse_output
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    as_booleans,
    as_tensor,
    is_tensor,
    joined,
)
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import (
    as_dense,
    coordinates,
    is_sparse,
    sampled,
    stored_values,
    with_stored_values,
)

# --- a reduction of every storage --------------------------------------------------------

ZEROS_CHANGE_NOTHING = "zeros change nothing"


def reduces(
    formula: Function,
    of_jax: Function | None = None,
    *,
    empty: Callable[[DType], Scalar] | float = 0,
    zeros: str | Function | None = None,
    like: Function | None = None,
    initial: Function | None = None,
    absent: float | None = None,
    densely: bool = False,
    one_axis: bool = False,
    arrays_too: bool = False,
    extra: Sequence[str] = (),
) -> Function:
    """Lift a reduction: its arguments are those of `of_jax`, or else of the formula.

    Args:
        formula: takes a `MaskedTensor`, `axis` as a tuple, `keepdims` if the reduction has it,
            and its other options by name; returns a `MaskedTensor`.
        of_jax: the function for arrays without `where=`; None: the formula serves them too.
        empty: the result of an array where there is no entry, of a dtype.
        zeros: how entries that an ordinary sparse tensor does not store take part: not at
            all, or the formula that they need. None: the tensor becomes dense.
        like: a function of JAX with results of the same dtype: the formula gets at least 32
            bits, and its result is cast.
        initial: combines a result with the option `initial`.
        absent: of a formula with a result for each entry: that of an entry of an array that
            takes no part, while others of its group do.
        densely: whether the formula needs all entries in one array.
        one_axis: whether a tuple of axes is refused.
        arrays_too: whether the formula serves arrays too, with the arguments of `of_jax`.
        extra: names of more options of the formula.
    """
    signature = inspect.signature(of_jax or formula)
    first, *_ = signature.parameters
    name = (of_jax or formula).__name__

    @functools.wraps(of_jax or formula)
    def lifted(*args: Argument, where: Mask | None = None, **kwargs: Argument) -> Tensor:
        # --- arguments -------------------------------------------------------------------
        if where is not None and "where" in signature.parameters:
            kwargs["where"] = where
        more = {key: kwargs.pop(key) for key in extra if key in kwargs}
        bound = signature.bind(*args, **kwargs)
        options = bound.arguments
        x = options[first] = as_tensor(adopted(options[first]))
        where = options.get("where", where)
        if isinstance(options.get("axis"), list):
            options["axis"] = tuple(options["axis"])
        if of_jax is not None and where is None and not (is_tensor(x) or arrays_too):
            return of_jax(*bound.args, **bound.kwargs)
        refuse_output(options)
        axis = options.get("axis", signature.parameters["axis"].default)
        if one_axis and isinstance(axis, Sequence):
            raise TypeError(f"`axis` of {name} must be an int or None, got {axis!r}.")
        axes = checked_axes(axis, len(x.shape))
        options = {k: v for k, v in options.items() if k not in (first, "axis", "where")} | more
        if "keepdims" in signature.parameters:
            options["keepdims"] = bool(options.get("keepdims"))
        start = options.pop("initial", None)

        # --- storage ---------------------------------------------------------------------
        masked, plain = isinstance(x, MaskedTensor), is_sparse(x)
        if plain:
            fits = zeros is ZEROS_CHANGE_NOTHING or (zeros is not None and where is None)
            is_empty = any(x.shape[a] == 0 for a in axes)
            if is_empty or not fits or getattr(x, "n_batch", False):
                x = as_dense(x) if is_empty else dense(x, name, _NOT_DECOMPOSED)
                again = options if start is None else {**options, "initial": start}
                return lifted(x, axis=axis, where=where, **again)
        elif densely:
            x = dense(x, name, _NOT_DECOMPOSED)
        x = valid_entries(x, where)

        # --- result ----------------------------------------------------------------------
        rule = zeros if plain and callable(zeros) else formula
        dtype = None
        if like is not None:
            kinds = {k: options.pop(k) for k in ("dtype", "promote_integers") if k in options}
            dtype = result_dtype(like, x.dtype, **kinds)
            x = x.astype(wide(joint_dtype(x.dtype, dtype)))
        result = rule(x, axis=axes, **options)
        if dtype is not None:
            result = result.astype(dtype)
        if not masked and isinstance(result, MaskedTensor):
            nothing = empty(result.dtype) if callable(empty) else empty
            if absent is not None:
                exists = reduced(x.with_values(x.valid), axes, True, "max").valid
                left_out = jnp.where(exists, absent, nothing).astype(result.dtype)
                result = jnp.where(result.valid, result.storage, left_out)
            elif plain:
                result = without_mask(result)
            else:
                result = result.to_tensor(nothing)
        return result if start is None or initial is None else initial(result, start)

    return lifted


# Why a function makes a sparse tensor dense.
_NOT_DECOMPOSED = "it does not decompose into results of its stored values"


def result_dtype(function: Function, kind: DTypeLike, **options: Argument) -> DType:
    """Return the dtype that a function of JAX, such as `jnp.sum`, gives for a dtype."""
    x64 = jax.config.read("jax_enable_x64")
    return _result_dtype(function, jnp.dtype(kind), x64, tuple(options.items()))


@functools.lru_cache(maxsize=256)  # of functions of the table and dtypes, never of closures
def _result_dtype(
    function: Function, kind: DType, x64: bool, options: tuple[tuple[str, Argument], ...]
) -> DType:
    function = functools.partial(function, **dict(options))
    return jax.eval_shape(function, jax.ShapeDtypeStruct((1,), kind)).dtype


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


def valid_entries(x: TensorLike, where: Mask | None) -> MaskedTensor:
    """Return a masked tensor of the entries of `x` where the booleans `where` are True."""
    x = x if isinstance(x, MaskedTensor) else MaskedTensor(x)
    if where is None:
        return x
    refuse_scipy("where", where)
    masked = isinstance(where, MaskedTensor)
    where = where if masked else as_booleans(as_tensor(where))
    if masked or not jnp.issubdtype(where.dtype, jnp.bool_):
        kind = "a MaskedTensor" if masked else where.dtype
        raise TypeError(
            f"`where` must be a boolean array, True where an entry takes part, got {kind}."
        )
    try:
        fits = jnp.broadcast_shapes(where.shape, x.shape) == x.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`where` of shape {where.shape} does not broadcast to `x` of shape {x.shape}."
        )
    return joined(x.storage, x.valid & sampled(as_dense(where), x.storage))


def without_mask(x: MaskedTensor) -> Tensor:
    """Return the results of an ordinary sparse tensor, 0 where it stores nothing."""
    values = stored_values(x.storage)
    return with_stored_values(x.storage, jnp.where(x.valid, values, jnp.zeros_like(values)))


def with_zeros(
    formula: Function, absorb: Callable[[jax.Array, jax.Array], jax.Array]
) -> Function:
    """Return the formula of all entries of a sparse tensor, those that it does not store too.

    Args:
        absorb: takes results of stored entries, and where there are also zeros.
    """

    def of_all(x: MaskedTensor, axis: tuple[int, ...], **options: Argument) -> Tensor:
        result = formula(x, axis=axis, **options)
        if is_sparse(result.storage):  # rows are stored as a whole
            return without_mask(result)
        number = count(x, axis, bool(options.get("keepdims"))).to_tensor(0)
        return absorb(result.storage, number < math.prod(x.shape[a] for a in axis))

    return of_all


# --- slices and segments -----------------------------------------------------------------


def least(dtype: DTypeLike) -> Scalar:
    """Return the number that changes no maximum over `dtype`."""
    return _limits(dtype)[0]


def greatest(dtype: DTypeLike) -> Scalar:
    """Return the number that changes no minimum over `dtype`."""
    return _limits(dtype)[1]


def _limits(dtype: DTypeLike) -> tuple[Scalar, Scalar]:
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.zeros((), bool), jnp.ones((), bool)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(-np.inf, dtype), jnp.asarray(np.inf, dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"`x` has dtype {dtype}, and complex numbers have no order: use their absolute "
            "values or a part of them, jmask.numpy.abs(x), real(x) or imag(x)."
        )
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min, dtype), jnp.asarray(limits.max, dtype)


_IDENTITY: dict[str, Callable[[DType], Scalar]] = {
    "sum": lambda dtype: jnp.zeros((), dtype),
    "prod": lambda dtype: jnp.ones((), dtype),
    "max": least,
    "min": greatest,
}


def reduced(x: Tensor, axis: Sequence[int], keepdims: bool, kind: str) -> Tensor:
    """Return the sum, product, maximum or minimum of the valid entries, in their dtype.

    The derivative of a maximum is shared with entries of a group that are not valid and equal
    the identity: `extremum` has one that is not. An array is reduced as it is.
    """
    if not isinstance(x, MaskedTensor):
        return _slices(kind, x, tuple(axis), keepdims)
    storage, sparse = x.storage, sparse_dimensions(x.storage)
    identity = _IDENTITY[kind](x.dtype)
    values = jnp.where(x.valid, stored_values(storage), identity)
    shape = tuple(
        1 if a in axis else size for a, size in enumerate(x.shape) if keepdims or a not in axis
    )
    reduced_sparse = [a for a in range(sparse) if a in axis]
    kept = [a for a in range(sparse) if a not in axis]
    # Stored values have one axis in place of the sparse ones.
    inner = tuple(a - sparse + (sparse > 0) for a in axis if a >= sparse)
    along = ((0,) if reduced_sparse and not kept else ()) + inner
    result, exists = _slices(kind, values, along, False), x.valid.any(along)
    if kept and reduced_sparse:
        ids, number = _segments(storage, kept)
        some = max(number, 1)
        result = _segmented(kind, result, ids, some)[:number]
        exists = _any(exists, ids, some)[:number]
    elif kept:
        result, exists = (a.reshape(a.shape[:1] + shape[sparse:]) for a in (result, exists))
        return joined(with_stored_values(storage, result, shape), exists)
    return joined(result.reshape(shape), exists.reshape(shape))


def _slices(kind: str, values: jax.Array, axes: tuple[int, ...], keepdims: bool) -> jax.Array:
    function, dtype = getattr(jnp, kind), values.dtype
    if kind in ("sum", "prod"):
        return function(values, axes, dtype=dtype, keepdims=keepdims)
    return function(values, axes, keepdims=keepdims, initial=_IDENTITY[kind](dtype))


def _segmented(kind: str, values: jax.Array, ids: jax.Array, number: int) -> jax.Array:
    """Reduce the rows (n, *row) with equal ids; those that are not valid are the identity."""
    if kind == "sum":
        return add_rows(jnp.zeros((number, *values.shape[1:]), values.dtype), ids, values)
    if kind == "prod":
        return _product_of_segments(values, ids, number)
    return getattr(jax.ops, f"segment_{kind}")(values, ids, number)


def _any(valid: jax.Array, ids: jax.Array, number: int) -> jax.Array:
    return jax.ops.segment_max(valid.astype(jnp.uint8), ids, number) > 0


def _product_of_segments(values: jax.Array, ids: jax.Array, number: int) -> jax.Array:
    """Scan over sorted segments: a scatter of products has no derivative at 0."""
    if values.shape[0] == 0:
        return jnp.ones((number, *values.shape[1:]), values.dtype)
    order = jnp.argsort(ids, stable=True)
    ids, values = ids[order], values[order]
    changes = trailing(ids[1:] != ids[:-1], values.ndim)
    starts = jnp.pad(changes, [(1, 0), *[(0, 0)] * (values.ndim - 1)], constant_values=True)
    ends = jnp.roll(starts, -1, axis=0)
    _, running = lax.associative_scan(_product_since_start, (starts, values))
    product = _segmented("sum", jnp.where(ends, running, jnp.zeros_like(running)), ids, number)
    exists = _any(jnp.ones(ids.shape, bool), ids, number)
    return jnp.where(trailing(exists, product.ndim), product, jnp.ones_like(product))


def _product_since_start(
    left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    starts_left, product = left
    starts, x = right
    # Not where(starts, x, product * x): x may be inf, and its derivative 0 * inf.
    return starts_left | starts, jnp.where(starts, jnp.ones_like(product), product) * x


def sparse_dimensions(x: TensorLike) -> int:
    """Count the leading dimensions of `x` given by indices; 0 if it is dense."""
    if isinstance(x, RowSparse):
        return 1
    return int(x.n_sparse) if isinstance(x, BCOO | BCSR) else 0


def _segments(storage: Tensor, kept: Sequence[int]) -> tuple[jax.Array, int]:
    """Return for each stored value the row-major number of its place in the kept axes."""
    sizes = [storage.shape[axis] for axis in kept]
    refuse_large(math.prod(sizes), "kept")
    ids, where = jnp.zeros((), _integer()), coordinates(storage)
    for axis, size in zip(kept, sizes, strict=True):
        # Padding goes to some group: it is not valid, so that its entry is the identity.
        ids = ids * size + jnp.clip(where[axis], 0, max(size - 1, 0)).astype(_integer())
    return ids, math.prod(sizes)


def positions(x: MaskedTensor, axes: Sequence[int]) -> MaskedTensor:
    """Return for each entry its index in `axes`, flattened."""
    refuse_large(math.prod(x.shape[axis] for axis in axes), "reduced")
    sparse, shape = sparse_dimensions(x.storage), x.valid.shape
    index = jnp.zeros((), _integer())
    for axis in axes:
        if axis < sparse:
            along = trailing(coordinates(x.storage)[axis].astype(_integer()), len(shape))
        else:
            along = lax.broadcasted_iota(_integer(), shape, axis - sparse + (sparse > 0))
        index = index * x.shape[axis] + along
    values = jnp.broadcast_to(index, shape)
    return joined(with_stored_values(x.storage, values), x.valid)


def refuse_large(size: int, axes: str) -> None:
    """Raise ValueError if a flattened index in `size` entries does not fit its dtype."""
    if size > jnp.iinfo(_integer()).max:
        raise ValueError(
            f"the {axes} axes have {size} entries, more than {_integer()} can count: set "
            "jax_enable_x64."
        )


def _integer() -> DType:
    return jnp.dtype(jnp.result_type(int))


def count(
    x: MaskedTensor, axis: Sequence[int], keepdims: bool, holds: jax.Array | None = None
) -> MaskedTensor:
    """Count the valid entries of each group, or those of which `holds` is true."""
    ones = x.valid if holds is None else x.valid & holds
    storage = with_stored_values(x.storage, ones.astype(_integer()))
    return reduced(joined(storage, x.valid), axis, keepdims, "sum")


def on_values(function: Function, x: Tensor) -> Tensor:
    """Apply a function to an array, or to all stored values, also under the mask."""
    if not isinstance(x, MaskedTensor):
        return function(x)
    return joined(with_stored_values(x.storage, function(stored_values(x.storage))), x.valid)


def without_axes(x: MaskedTensor, axes: Sequence[int], keepdims: bool) -> MaskedTensor:
    """Drop reduced axes, of size 1, unless `keepdims`."""
    if keepdims or not axes:
        return x
    shape = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    if not is_sparse(x.storage):
        return joined(x.storage.reshape(shape), x.valid.reshape(shape))
    values = stored_values(x.storage)
    stored = (values.shape[0], *shape[sparse_dimensions(x.storage) :])
    storage = with_stored_values(x.storage, values.reshape(stored), shape)
    return joined(storage, x.valid.reshape(stored))


# --- extrema -----------------------------------------------------------------------------


@jax.custom_jvp
def _with_slope_of(value: jax.Array, like: jax.Array) -> jax.Array:
    return value


@_with_slope_of.defjvp
def _with_slope_of_jvp(primals: JvpArgs, tangents: JvpArgs) -> tuple[jax.Array, jax.Array]:
    # The function itself and not `primals[0]`, which the next derivative takes for a constant.
    return _with_slope_of(*primals), tangents[1]


def extremum(x: MaskedTensor, axis: Sequence[int], keepdims: bool, kind: str) -> MaskedTensor:
    """Return the maximum or minimum, with a derivative shared by valid entries equal to it."""
    result = reduced(on_values(lax.stop_gradient, x), axis, True, kind)
    if jnp.issubdtype(x.dtype, jnp.floating):
        # The mean of the ties is the result, but for rounding, and has the derivative wanted.
        # That of a maximum would be shared with equal fills.
        ties = stored_values(_ties(x, result).storage)
        number = count(x, axis, True, ties)
        number = on_values(lambda n: jnp.maximum(n, 1).astype(x.dtype), number)
        tied = _divide(joined(x.storage, x.valid & ties), number)
        mean = stored_values(reduced(tied, axis, True, "sum").storage)
        result = on_values(lambda value: _with_slope_of(value, mean), result)
    return without_axes(result, axis, keepdims)


def first_index(
    x: MaskedTensor, axis: Sequence[int], keepdims: bool, kind: str
) -> MaskedTensor:
    """Return where in `axis` the first valid entry is that equals the maximum or minimum."""
    x = on_values(lax.stop_gradient, x)
    ties = stored_values(_ties(x, reduced(x, axis, True, kind)).storage)
    places = positions(x, axis)
    first = reduced(joined(places.storage, x.valid & ties), axis, keepdims, "min")
    return on_values(lambda i: jnp.where(first.valid, i, jnp.zeros_like(i)), first)


_divide = entrywise(jnp.true_divide)
_ties = entrywise(lambda x, extremum: (x == extremum) | ((x != x) & (extremum != extremum)))
