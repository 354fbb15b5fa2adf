"""Elementwise functions on every storage, by one mechanism.

    elementwise(jnp.log)(x)         x masked:  log of the valid entries, masks kept
                                    x RowSparse: on the stored rows if log(0) were 0
                                    x array:   jnp.log(x)

**No nan under the mask.** A function is applied to `where(mask, x, safe)`: entries that do
not exist are replaced by a number at which the function and its derivatives are finite. So
no nan is computed, and the derivative of the selection sends exactly 0 to masked entries
whatever lies there, in forward and reverse mode and at every order. The number is found by
trying: the first candidate at which value, first and second derivative are finite.

**Masks** of operands intersect. An operand with sparse storage gives the result its
storage, and dense operands are sampled at the stored positions.

**Zero semantics.** Entries that an ordinary sparse tensor does not store are zeros:

    sin(x)       the storage of x: sin on the stored values
    x * 2 - y    RowSparse both: on the union of their rows
    x * d        at the positions of x; d is sampled there
    d + x        d with the rows of x added
    cos(x)       cos(0) is not 0: dense, with a warning

The function itself decides which it is (see `zero_semantics`). Equal positions are summed
before a function that is not affine, and kept apart by one that is.

**Arguments by name** are operands as those by position: arrays and tensors are, while Python
numbers, flags and None are options, the same for every entry.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR
from jax.typing import ArrayLike

from jmask._base.array_types import trailing
from jmask._base.fallback import report_fallback
from jmask._base.types import Argument, Function, Options, PyTreeDef, Shape, Tensor, TensorLike
from jmask._base.validation import refuse_scipy
from jmask._ops.zero_semantics import Operand, behaviour_at_zero, role, safe_numbers, varies
from jmask._tables.stored_table import add_to_dense
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    any_masked,
    common_shape,
    is_tensor,
    joined,
    read_at,
)
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import (
    SPARSE,
    Sparse,
    as_dense,
    compressed,
    is_sparse,
    is_stored,
    same_positions,
    sampled,
    stored_values,
    stype,
    summed,
    unique_positions,
    with_stored_values,
)

Operands = Sequence[TensorLike]


def elementwise(function: Function) -> Function:
    """Lift an elementwise JAX function to masked and sparse tensors.

    Args:
        function: takes one or more arrays that broadcast, by position or by name, and
            options; each entry of its result depends on that entry of the arrays alone.

    Returns:
        A function that takes `MaskedTensor`, `RowSparse`, BCOO, BCSR and arrays in place of
        arrays: masks intersect, plain operands broadcast, masked entries get no gradient.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([-1., 4.]), jnp.array([False, True]))
        >>> jmask.numpy.elementwise(lambda x: jnp.sqrt(x) + 1)(x)
        MaskedTensor([--, 3.0], dtype=float32)
    """

    @functools.wraps(function)
    def lifted(*args: Argument, **kwargs: Argument) -> Tensor:
        arguments = (*args, *kwargs.values())
        for x in arguments:
            refuse_scipy("x", x)
        if any_masked(*arguments):
            return _masked(*_call(function, args, kwargs))
        if any(isinstance(x, SPARSE) for x in arguments):
            return zero_semantics(*_call(function, args, kwargs))
        return function(*args, **kwargs)

    return lifted


@dataclasses.dataclass(frozen=True)
class _Arranged:
    """A function of its operands, the leaves of its arguments; equal ones are equal."""

    function: Function
    structure: PyTreeDef

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", "a function")

    def __call__(self, *operands: TensorLike, **options: Argument) -> Tensor:
        args, named = jax.tree.unflatten(self.structure, operands)
        return self.function(*args, **named, **options)


def _call(
    function: Function, args: Operands, kwargs: Options
) -> tuple[Function, Operands, Options]:
    """Return a function of operands, the operands, and its options by name."""
    # Of those by name, what may differ from entry to entry.
    arrays = (jax.Array, np.ndarray, list)
    named = {name: x for name, x in kwargs.items() if isinstance(x, arrays) or is_tensor(x)}
    options = {name: x for name, x in kwargs.items() if name not in named}
    if not named and all(x is not None for x in args):
        return function, args, options
    is_operand = lambda x: not (x is None or isinstance(x, tuple | dict))
    operands, structure = jax.tree.flatten((args, named), is_leaf=is_operand)
    return _Arranged(function, structure), operands, options


# --- masked semantics --------------------------------------------------------------------


def _masked(function: Function, operands: Operands, kwargs: Options) -> MaskedTensor:
    operands = [jnp.asarray(x) if varies(x) and not is_tensor(x) else x for x in operands]
    pattern = _pattern(operands)
    if pattern is None:
        operands = [_dense(x) for x in operands]
    else:
        operands = [_at_positions(x, pattern) for x in operands]
    # Operands made from one tensor share its mask, which is then not read twice.
    masks = {id(x.valid): x.valid for x in operands if isinstance(x, MaskedTensor)}
    valid = functools.reduce(operator.and_, masks.values())
    values = [x.storage if isinstance(x, MaskedTensor) else x for x in operands]
    result = _where_existing(function, values, valid, kwargs)
    shape = jnp.broadcast_shapes(result.shape, valid.shape)
    result, valid = jnp.broadcast_to(result, shape), jnp.broadcast_to(valid, shape)
    storage = result if pattern is None else with_stored_values(pattern, result)
    return joined(storage, valid)


def _where_existing(
    function: Function, values: Operands, exists: jax.Array, kwargs: Options
) -> jax.Array:
    """Apply the function with harmless numbers where entries do not exist."""
    kinds = tuple(x.dtype if varies(x) else x for x in values)
    values = [
        jnp.where(exists, x, number) if varies(x) else x
        for x, number in zip(values, safe_numbers(function, kinds, kwargs), strict=True)
    ]
    return function(*values, **kwargs)


def _pattern(operands: Operands) -> Tensor | None:
    """Return the sparse storage that the result takes its positions from, or None."""
    shape = common_shape([np.shape(x) for x in operands])
    for x in operands:
        if isinstance(x, MaskedTensor) and is_sparse(x.storage) and x.shape == shape:
            return x.storage
    return None


def _at_positions(x: TensorLike, pattern: Tensor) -> Tensor:
    """Return the operand as (masked) values at the stored positions of `pattern`."""
    if not is_tensor(x):
        return sampled(x, pattern) if jnp.ndim(x) else x
    masked = isinstance(x, MaskedTensor)
    otherwise = (
        f"a {'masked ' * masked}{x.stype if masked else stype(x)} operand of shape "
        f"{tuple(x.shape)} became dense, at O(size) cost: its storage differs from that of "
        "the other operand"
    )
    values, valid = read_at(x, pattern, otherwise)
    return joined(values, valid) if masked else values


def _dense(x: TensorLike) -> Tensor:
    """Return the operand on dense storage, for operands that are dense or larger."""
    if isinstance(x, MaskedTensor) and is_sparse(x.storage):
        report_fallback(
            f"a masked {stype(x.storage)} operand of shape {x.shape} became dense, at O(size) "
            "cost: it was broadcast to a larger shape"
        )
        return x.to_dense()
    return as_dense(x)


# --- zero semantics -----------------------------------------------------------------------


def zero_semantics(function: Function, operands: Operands, kwargs: Options) -> Tensor:
    """Apply an elementwise function to operands of which some are sparse, none masked."""
    operands = [x if is_sparse(x) or _is_number(x) else jnp.asarray(x) for x in operands]
    if any(isinstance(x, RowSparse) and x.leading > 1 for x in operands):
        return _stacked_tables(function, operands, kwargs)
    shape = common_shape(list(map(np.shape, operands)))
    sparse = [x for x in operands if is_sparse(x)]
    for x in sparse:
        if isinstance(x, RowSparse):
            x.check_single()
    if _one_layout(sparse, operands, shape):
        behaviour = behaviour_at_zero(function, list(map(role, operands)), kwargs)
        call = _Call(function, operands, kwargs, shape)
        if behaviour.keeps_zero():
            return call.on_positions(behaviour.affine)
        is_full = lambda x: not is_sparse(x) and jnp.ndim(x) > 0
        full = list(filter(is_full, operands))
        sizes = jnp.broadcast_shapes(*(x.shape for x in full))
        if behaviour.sums and sizes == shape and isinstance(sparse[0], RowSparse):
            rows = call.with_zeros(is_full).on_positions(affine=True)
            if isinstance(behaviour.value, Operand):
                return add_to_dense(full[0], rows)
            dense = call.with_zeros(is_sparse)
            return add_to_dense(function(*dense.operands, **kwargs), rows)
    name = getattr(function, "__name__", "a function")
    report_fallback(
        f"`{name}` made a sparse tensor of shape {tuple(sparse[0].shape)} dense, at "
        "O(size) cost: it does not keep zeros, or combines storages"
    )
    return function(*map(as_dense, operands), **kwargs)


def _stacked_tables(function: Function, operands: Operands, kwargs: Options) -> Tensor:
    """Apply the function to tensors (M, V, *row), some of which store rows of (M * V, *row)."""
    rows = [x for x in operands if isinstance(x, RowSparse)]
    finest = max(rows, key=lambda x: x.leading)
    flat = finest.flat().shape

    def flattened(x: TensorLike) -> Tensor:
        if not _is_number(x) and jnp.ndim(x) and x.shape != finest.shape:
            raise ValueError(
                f"{finest!r} of stacked tables takes numbers and tensors of its shape, got "
                f"shape {tuple(x.shape)}: broadcast that first, or use x.flat() or x.todense()."
            )
        if isinstance(x, RowSparse):
            return x.with_leading(finest.leading).flat()
        return x.reshape(flat) if not _is_number(x) and jnp.ndim(x) else x

    result = zero_semantics(function, list(map(flattened, operands)), kwargs)
    if isinstance(result, RowSparse):
        return result.stacked_as(finest)
    return result.reshape(finest.shape)


def _is_number(x: TensorLike) -> bool:
    # A Python number keeps its weak type, and one of NumPy is known under jit too.
    return not varies(x) or (isinstance(x, np.generic | np.ndarray) and x.ndim == 0)


def _one_layout(sparse: Sequence[Tensor], operands: Operands, shape: Shape) -> bool:
    """Decide whether the result can have the layout of the sparse operands."""
    if all(isinstance(x, RowSparse) for x in sparse):
        return all(len(x.shape) == len(shape) and x.shape[0] == shape[0] for x in sparse)
    if not all(isinstance(x, BCOO | BCSR) and x.shape == shape for x in sparse):
        return False
    if any(x.n_batch for x in sparse):
        return len(sparse) == 1 and all(is_sparse(x) or not jnp.ndim(x) for x in operands)
    return len({x.n_dense for x in sparse}) == 1


@dataclasses.dataclass(frozen=True)
class _Call:
    """A function with its operands, to be applied to stored values; `shape` is the result's."""

    function: Function
    operands: Operands
    kwargs: Options
    shape: Shape

    @property
    def sparse(self) -> list[Tensor]:
        return [x for x in self.operands if is_sparse(x)]

    def with_zeros(self, replaced: Callable[[Tensor], bool]) -> "_Call":
        """Return the call with zeros in place of some operands."""
        operands = [jnp.zeros((), x.dtype) if replaced(x) else x for x in self.operands]
        return dataclasses.replace(self, operands=operands)

    def on_positions(self, affine: bool) -> Tensor:
        """Return the result, which is zero where no operand stores a value."""
        sparse = self.sparse
        first, *others = sparse
        rows = isinstance(first, RowSparse)
        if affine and others and rows:
            return self._side_by_side(sparse)
        if affine and not others:
            values = self._apply(first, [stored_values(first)])
        else:
            if all(same_positions(first, x) for x in others):
                sparse = [unique_positions(x) for x in sparse]
            else:
                sparse = on_union_of_rows(sparse) if rows else _on_union_of_entries(sparse)
            first = sparse[0]
            values = self._guarded(first, list(map(stored_values, sparse)))
        if rows:
            values = jnp.broadcast_to(values, (*values.shape[:1], *self.shape[1:]))
        result = with_stored_values(first, values, self.shape)
        all_compressed = all(isinstance(x, BCSR) for x in self.sparse)
        return compressed(result) if all_compressed and isinstance(result, BCOO) else result

    def _side_by_side(self, sparse: list[RowSparse]) -> RowSparse:
        """Return the sum of what the rows of each operand add, not coalesced."""
        parts = []
        for i, x in enumerate(sparse):
            zeros = [jnp.zeros((), y.dtype) for y in sparse]
            part = self._apply(x, [*zeros[:i], x.values, *zeros[i + 1 :]])
            parts.append(jnp.broadcast_to(part, (x.nse, *self.shape[1:])))
        ids = jnp.concatenate([x.row_ids() for x in sparse])
        return RowSparse(ids, jnp.concatenate(parts), self.shape)

    def _guarded(self, pattern: Sparse, values: Sequence[jax.Array]) -> jax.Array:
        """Do as `_apply`, with a harmless number at padding: slopes may be infinite there."""
        if getattr(pattern, "n_batch", 0):
            return self._apply(pattern, values)
        stored = trailing(is_stored(pattern), values[0].ndim)
        operands = self._at_positions(pattern, values)
        result = _where_existing(self.function, operands, stored, self.kwargs)
        return jnp.where(stored, result, jnp.zeros((), result.dtype))

    def _apply(self, pattern: Sparse, values: Sequence[jax.Array]) -> jax.Array:
        return self.function(*self._at_positions(pattern, values), **self.kwargs)

    def _at_positions(self, pattern: Sparse, values: Sequence[jax.Array]) -> list[ArrayLike]:
        """Return the stored values of the sparse operands, and arrays at the same positions."""
        stored = iter(values)
        return [
            next(stored)
            if is_sparse(x)
            else sampled(x, pattern, self.shape)
            if jnp.ndim(x)
            else x
            for x in self.operands
        ]


def on_union_of_rows(sparse: Sequence[RowSparse]) -> list[RowSparse]:
    """Return the tensors, coalesced, each storing the rows that any of them stores."""
    ids = jnp.concatenate([x.row_ids() for x in sparse])
    pairs = zip(sparse, _in_concatenation([x.values for x in sparse]), strict=True)
    return [RowSparse(ids, values, x.shape).coalesce() for x, values in pairs]


def _on_union_of_entries(sparse: Sequence[BCOO | BCSR]) -> list[BCOO]:
    """Return the tensors in coordinates, each storing the entries that any of them stores."""
    entries = [x.to_bcoo() if isinstance(x, BCSR) else x for x in sparse]
    indices = jnp.concatenate([x.indices for x in entries])
    nse = indices.shape[0] if isinstance(indices, jax.core.Tracer) else None
    pairs = zip(entries, _in_concatenation([x.data for x in entries]), strict=True)
    return [summed(BCOO((data, indices), shape=x.shape), nse) for x, data in pairs]


def _in_concatenation(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return each array at its place in the concatenation of all, zeros elsewhere."""
    rows = [x.shape[0] for x in arrays]
    return [
        jnp.pad(x, [(sum(rows[:i]), sum(rows[i + 1 :])), *[(0, 0)] * (x.ndim - 1)])
        for i, x in enumerate(arrays)
    ]
