"""Functions of entries on sparse tensors: which of them have sparse results.

An entry that an ordinary sparse tensor does not store is a zero. What a function makes of zeros
is declared where it is lifted, or found by evaluating it at zeros:

| word     | says of the function                        | example     | result            |
|----------|---------------------------------------------|-------------|-------------------|
| `scales` | linear in these operands, all others held   | x * d       | sparse: 0 * d = 0 |
| `adds`   | linear in all operands together             | d + x       | d plus rows       |
| neither  | f(0, ..., 0) is evaluated, as far as known  | sqrt, x > 1 | sparse if it is 0 |

Everything else is dense, with the warning. The product with an entry that is not stored is 0,
as in every sparse library, even where the other factor is inf or nan, unless that is a known
number. Equal positions are summed first, but for a linear function of one sparse operand.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.array_types import adds_when_cast, trailing
from jmask._base.fallback import report_fallback
from jmask._base.shardings import end_to_end, with_whole_rows
from jmask._base.types import Argument, Function, HostArray, Ids, Shape, Sparse, Storage
from jmask._tables.rows_at import add_to_dense
from jmask._tensors.masked_tensor import common_shape
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import (
    as_dense,
    coordinates,
    is_sparse,
    is_stored,
    same_positions,
    sampled,
    stored_values,
    sum_duplicates,
    summed_before_cast,
    to_bcsr,
    unique_positions,
    with_stored_values,
)

Operand = Storage | HostArray
"""What a function of entries is applied to; a number of NumPy is known under jit too."""


class ZeroRules(NamedTuple):
    """Say where the zeros of sparse operands, given by their numbers, stay zeros.

    Attributes:
        adds: whether it is linear in all operands together.
        scales: the sets of operands in which it is linear together.
        vanishes: more sets of operands: it is 0 where all of one are.
        by_arrays: whether zeros stay zeros if other operands are arrays: 0 / d may be nan.
    """

    adds: bool
    scales: Sequence[set[int]]
    vanishes: Sequence[set[int]]
    by_arrays: bool


def on_stored_values(
    function: Function, operands: Sequence[Operand], name: str, safe: float, rules: ZeroRules
) -> Storage:
    """Apply a function of entries to operands of which some are sparse and none is masked."""
    operands = [x if is_sparse(x) or np.ndim(x) == 0 else jnp.asarray(x) for x in operands]
    rows = [x for x in operands if isinstance(x, RowSparse)]
    if any(x.leading > 1 for x in rows):
        return _on_stacked_tables(function, operands, name, safe, rules)
    shape = common_shape([np.shape(x) for x in operands])
    sparse = [x for x in operands if is_sparse(x)]
    for x in rows:
        x.check_single()
    if _one_layout(sparse, shape):
        keeps_zeros, is_linear = _at_zero(function, operands, rules)
        if keeps_zeros and is_linear and (len(sparse) == 1 or isinstance(sparse[0], RowSparse)):
            return _each_alone(function, operands, shape)
        if keeps_zeros:
            return _on_common_positions(function, operands, safe, shape)
        # `dense + rows` touches only the rows that are stored.
        full = [x for x in operands if not is_sparse(x)]
        are_numbers = any(x.dtype != jnp.dtype(bool) for x in operands)  # booleans `or`
        fits = rows and len(full) == 1 and np.shape(full[0]) == shape
        if rules.adds and fits and are_numbers:
            # Linear in all operands: f(dense, rows) = slope * dense + f(0, rows).
            ones = [np.ones((), x.dtype) if x is full[0] else _zero(x) for x in operands]
            slope = np.asarray(_evaluated(function, ones))
            summed = lambda x, dtype=slope.dtype: summed_before_cast(x, dtype)
            alone = [summed(x) if is_sparse(x) else _zero(x) for x in operands]
            added: Argument = _each_alone(function, alone, shape)
            # The array itself, if it can be: a copy of it would not be updated in place.
            dense: Argument = full[0]
            if slope != 1:
                dense = function(*[_zero(x) if is_sparse(x) else x for x in operands])
            return add_to_dense(dense, added)
    report_fallback(
        f"`{name}` made a sparse tensor of shape {tuple(sparse[0].shape)} dense, at O(size) "
        "cost: it does not keep zeros, or combines storages"
    )
    return function(*[as_dense(x) if is_sparse(x) else x for x in operands])


def _one_layout(sparse: Sequence[Sparse], shape: Shape) -> bool:
    """Decide whether the result can have the layout of the sparse operands."""
    if all(isinstance(x, RowSparse) for x in sparse):
        return all(x.ndim == len(shape) and x.shape[0] == shape[0] for x in sparse)
    entries = [x for x in sparse if isinstance(x, BCOO | BCSR) and x.shape == shape]
    is_like = len(entries) == len(sparse) and len({x.n_dense for x in entries}) == 1
    return is_like and not any(x.n_batch for x in entries)


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Context in which a function is evaluated on numbers, also while something is traced.

    What comes out may be nan, and `jax_debug_nans` is not to take it for a mistake.
    """
    with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
        yield


def _at_zero(
    function: Function, operands: Sequence[Operand], rules: ZeroRules
) -> tuple[bool, bool]:
    """Decide whether zeros stay zeros, and whether the function is linear in what is sparse."""
    sparse = {i for i, x in enumerate(operands) if is_sparse(x)}
    others = [x for x in operands if not is_sparse(x)]
    known = {i for i, x in enumerate(operands) if _is_number(x)}
    linear = rules.adds or any(sparse <= one for one in rules.scales)
    value = None
    if len(known) == len(others):
        value = _evaluated(function, [_zero(x) if is_sparse(x) else x for x in operands])
        zero = value is not None and not value.any()
    else:
        vanishing = sparse | {i for i in known if not np.asarray(operands[i]).any()}
        fits = rules.by_arrays or all(np.ndim(x) == 0 for x in others)
        zero = fits and any(one <= vanishing for one in (*rules.scales, *rules.vanishes))
    if zero and linear:
        zeros = map(_zero, operands)
        dtype = (jax.eval_shape(function, *zeros) if value is None else value).dtype
        linear = all(adds_when_cast(operands[i].dtype, dtype) for i in sparse)
    return zero, linear


def _is_number(x: Operand) -> bool:
    return not is_sparse(x) and np.ndim(x) == 0 and not isinstance(x, jax.core.Tracer)


def _zero(x: Operand) -> HostArray:
    return np.zeros((), x.dtype)


def _evaluated(function: Function, numbers: Sequence[Ids]) -> HostArray | None:
    """Return the function of numbers; None if its closure holds arrays that are traced."""
    with trial():
        value = function(*map(jnp.asarray, numbers))
        return None if isinstance(value, jax.core.Tracer) else np.asarray(value)


def _each_alone(function: Function, operands: Sequence[Operand], shape: Shape) -> Sparse:
    """Apply a linear function to each sparse operand alone; concatenate the rows."""
    sparse = {i: x for i, x in enumerate(operands) if is_sparse(x)}
    results = []
    for place, x in sparse.items():
        alone = [_zero(y) if i in sparse and i != place else y for i, y in enumerate(operands)]
        part = function(*_sampled(alone, [stored_values(x)], x, shape))
        results.append(_broadcast(part, x, shape))
    if len(sparse) == 1:
        (x,) = sparse.values()
        return with_stored_values(x, results[0], shape)
    ids = end_to_end([coordinates(x)[0] for x in sparse.values()])
    return RowSparse(ids, end_to_end(results), shape)


def _on_common_positions(
    function: Function, operands: Sequence[Operand], safe: float, shape: Shape
) -> Sparse:
    """Apply the function where any operand stores an entry; equal positions are summed."""
    sparse = [x for x in operands if is_sparse(x)]
    is_compressed = all(isinstance(x, BCSR) for x in sparse)
    if all(same_positions(sparse[0], x) for x in sparse[1:]):
        sparse = [unique_positions(x) for x in sparse]
    else:
        sparse = _on_union(sparse)
    like, values = sparse[0], [stored_values(x) for x in sparse]
    exists = trailing(is_stored(like), values[0].ndim)
    arrays = _sampled(operands, values, like, shape)
    arrays = [x if _is_number(x) else where_or(exists, x, safe) for x in arrays]
    result = function(*arrays)
    result = jnp.where(exists, result, jnp.zeros((), result.dtype))
    result = with_stored_values(like, _broadcast(result, like, shape), shape)
    return to_bcsr(result) if is_compressed and isinstance(result, BCOO) else result


def where_or(valid: jax.Array, x: jax.Array, safe: float) -> jax.Array:
    """Return `x` where `valid`, and elsewhere `safe`, or 1 of integers."""
    number = safe if jnp.issubdtype(x.dtype, jnp.inexact) else 1
    return jnp.where(valid, x, jnp.asarray(number, x.dtype))


def _sampled(
    operands: Sequence[Operand], values: Sequence[jax.Array], like: Sparse, shape: Shape
) -> list[Argument]:
    """Return the operands at the positions of `like`, given the `values` of sparse ones."""
    stored = iter(values)
    return [
        next(stored) if is_sparse(x) else sampled(jnp.asarray(x), like, shape) if x.ndim else x
        for x in operands
    ]


def _broadcast(values: jax.Array, like: Sparse, shape: Shape) -> jax.Array:
    is_rows = isinstance(like, RowSparse)
    return jnp.broadcast_to(values, (like.nse, *shape[1:])) if is_rows else values


def _on_union(sparse: Sequence[Sparse]) -> list[Sparse]:
    """Return the tensors, each storing the positions that any of them stores, once."""
    entries = [x.to_bcoo() if isinstance(x, BCSR) else x for x in sparse]
    starts = np.cumsum([0, *(stored_values(x).shape[0] for x in entries)])

    def among_all(x: Sparse, start: int) -> jax.Array:
        values = with_whole_rows(stored_values(x))
        after = starts[-1] - start - values.shape[0]
        return jnp.pad(values, [(start, after), *[(0, 0)] * (values.ndim - 1)])

    pairs = [(x, among_all(x, start)) for x, start in zip(entries, starts, strict=False)]
    if isinstance(entries[0], RowSparse):
        ids = jnp.concatenate([with_whole_rows(coordinates(x)[0]) for x in entries])
        return [RowSparse(ids, values, x.shape).coalesce() for x, values in pairs]
    indices = jnp.concatenate([x.indices for x in entries])
    nse = indices.shape[0] if isinstance(indices, jax.core.Tracer) else None
    return [sum_duplicates(BCOO((values, indices), shape=x.shape), nse) for x, values in pairs]


def _on_stacked_tables(
    function: Function, operands: Sequence[Operand], name: str, safe: float, rules: ZeroRules
) -> Storage:
    """Apply the function to tensors (M, V, *row), some of which store rows of (M * V, *row)."""
    rows = [x for x in operands if isinstance(x, RowSparse)]
    finest = max(rows, key=lambda x: (x.leading, -(x.width or 0)))
    flat = finest.flat().shape

    def flattened(x: Operand) -> Operand:
        if x.ndim and x.shape != finest.shape:
            raise ValueError(
                f"{finest!r} of stacked tables takes numbers and tensors of its shape, got "
                f"shape {tuple(x.shape)}: broadcast that first, or use x.flat() or x.todense()."
            )
        if isinstance(x, RowSparse):
            return x.with_rows_of(finest).flat()
        return x.reshape(flat) if x.ndim and not isinstance(x, BCSR) else x

    result = on_stored_values(function, list(map(flattened, operands)), name, safe, rules)
    if isinstance(result, RowSparse):
        return result.stacked_as(finest)
    return as_dense(result).reshape(finest.shape)
