"""Row ids: canonical form, and the opaque form in which they travel through pytrees.

**Canonical form.** For a table of V rows an id is valid when 0 <= id < V. Every other id
is padding and is written as V, so that dropping out-of-range scatters drops it and -1
never wraps to the last row:

    canonical([2, -1, 0, 9], V=5)  ->  [2, 5, 0, 5]

**Opaque form.** Optimizers map arithmetic over the leaves of a gradient. On ids that
would be silent corruption: `optax.clip(1.)` turns the ids [1, 7] into [1, 1], a step-size
schedule turns them into zeros of a valid dtype. So the leaf of a `RowSparse` that holds
ids has an extended dtype, `key<row ids: ...>`: jit, vmap, scan, cond, donation and
sharding carry it, arithmetic on it is a TypeError that names the way out, since the name of
the dtype does. It costs nothing: in the compiled program it is the plain integer array.

The payload is the bitwise complement of an id, -1 - id, so that `zeros_like`, `ones_like` and
`full_like`, which can make such a leaf from nothing, yield padding and not a row.
"""

from collections.abc import Sequence
from typing import Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl
from jax.typing import DTypeLike

from jmask._base.array_types import is_known, shapes_from
from jmask._base.types import Argument, DType, IdArray, Ids

INT32_MAX = np.iinfo(np.int32).max

# What is known of ids. "sorted": ascending, unique, padding last. "unique": unique apart from
# padding. "routed": the same, each on the shard of the table that has its row. "any": nothing.
Order = Literal["sorted", "unique", "routed", "any"]


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise TypeError(
        "row ids of a jmask.RowSparse are not random keys and not numbers: wrap the "
        "optax transformation in jmask.lazy(...), or use `.indices` and `.values`."
    )


class _Tag(str):
    """Text in the names of dtypes, "multiply does not accept dtypes key<...>", else empty.

    orbax writes `str(key_impl)` next to the words of a key, and looks that up among JAX's own
    implementations when it reads them. Where it is empty, orbax returns the words, of which
    `RowSparse.tree_unflatten` makes the leaf again.
    """

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return (
            "row ids: use jmask.lazy(tx), jmask.multi_steps(tx, k, like=grads), or "
            "jmask.tree.add, jmask.tree.norm, .scale, .merge, .psum, .pmean"
        )


# JAX's only public way to an extended dtype is a PRNG implementation.
_IMPLEMENTATIONS = {
    4 * words: define_prng_impl(
        key_shape=(words,),
        seed=_refuse,
        split=_refuse,
        random_bits=_refuse,
        fold_in=_refuse,
        name=f"jmask row ids, {32 * words} bit",
        tag=_Tag(),
    )
    for words in (1, 2)
}


def hide(ids: IdArray) -> jax.Array:
    """Turn integer ids (...,) into the opaque leaf of the same shape."""
    # lax, not jnp: operators of arrays take several times as long to trace.
    words = lax.bitcast_convert_type(lax.bitwise_not(ids), np.uint32)
    if ids.dtype.itemsize == 4:
        words = lax.expand_dims(words, (ids.ndim,))
    return wrap(words)


def wrap(words: jax.Array) -> jax.Array:
    """Return the opaque leaf (...,) of its words, unsigned integers (..., 1 or 2)."""
    return jax.random.wrap_key_data(words, impl=_IMPLEMENTATIONS[4 * words.shape[-1]])


def reveal(leaf: jax.Array) -> jax.Array:
    """Return the integer ids of an opaque leaf (...,), or their shape for its shape."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return shapes_from(reveal, leaf)
    words = jax.random.key_data(leaf)
    if words.shape[-1] == 1:
        ids = lax.bitcast_convert_type(lax.squeeze(words, (words.ndim - 1,)), np.int32)
    else:
        ids = lax.bitcast_convert_type(words, np.int64)
    return lax.bitwise_not(ids)


def is_opaque(leaf: object) -> bool:
    """Decide whether a pytree leaf is ids in opaque form (or the shape of such)."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def most_rows() -> int:
    """Return how many rows ids can number."""
    return np.iinfo(np.int64 if jax.config.read("jax_enable_x64") else np.int32).max


def id_dtype(rows: int) -> DType:
    """Return the integer dtype that holds the ids and the padding of a table of `rows` rows.

    A symbolic number of rows, of `jax.export`, gets 32 bits.
    """
    if not is_known(rows) or rows <= INT32_MAX:
        return np.dtype(np.int32)
    if rows > most_rows():
        raise ValueError(
            f"a table of {rows} rows needs int64 row ids, and JAX has 64-bit types "
            "disabled: set jax.config.update('jax_enable_x64', True)."
        )
    return np.dtype(np.int64)


def as_number(size: int, dtype: DTypeLike) -> Ids:
    """Return a size as a number; a symbolic one, of `jax.export`, is known in the program."""
    known = is_known(size)
    return np.asarray(size, dtype) if known else jnp.asarray(size).astype(dtype)


def canonical(ids: Ids, rows: int) -> IdArray:
    """Cast integer ids to `id_dtype(rows)`; those out of range become `rows`."""
    ids = widen(ids, rows)
    # As unsigned numbers, negative ids are the greatest. XLA simplifies min(min(x, V), V), so
    # that a lookup and the read at the ids of its gradient become one gather.
    unsigned = np.dtype(f"uint{8 * ids.dtype.itemsize}")
    padding = as_number(rows, unsigned)
    bounded = lax.min(lax.bitcast_convert_type(ids, unsigned), padding)
    return lax.bitcast_convert_type(bounded, ids.dtype)


def numbered(
    positions: Sequence[jax.Array], sizes: Sequence[int], dtype: DTypeLike
) -> jax.Array:
    """Return the row-major numbers of positions along dimensions of these sizes."""
    number = jnp.zeros((), dtype)
    for size, position in zip(sizes, positions, strict=True):
        number = number * as_number(size, dtype) + position.astype(dtype)
    return number


def positions_of(number: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Return the position along each dimension for row-major numbers: undo `numbered`."""
    positions: list[jax.Array] = []
    for size in reversed(sizes):
        divisor = as_number(max(size, 1), number.dtype)
        positions.insert(0, lax.rem(number, divisor))
        number = lax.div(number, divisor)
    return positions


def widen(ids: Ids, rows: int) -> IdArray:
    """Cast integer ids to `id_dtype(rows)`; what does not fit becomes padding.

    Unlike a plain cast this never wraps an id onto another row: 2**32 + 3 is not row 3. Those
    of NumPy may be wider than JAX holds, of 64 bits while x64 is disabled.
    """
    dtype, limits = id_dtype(rows), jnp.iinfo(ids.dtype)
    where: Argument = np.where if isinstance(ids, np.ndarray) else jnp.where
    if limits.max > np.iinfo(dtype).max:
        ids = where(ids > np.array(rows, ids.dtype), np.array(rows, ids.dtype), ids)
    if limits.min < np.iinfo(dtype).min:
        ids = where(ids < 0, np.array(-1, ids.dtype), ids)
    return lax.convert_element_type(ids, dtype)


# --- a fixed permutation of row numbers, of tables with `hashed=True` ------------------------
#
#     id i of N rows          column x = i % 1024, line y = i // 1024, of L = N / 1024
#     three rounds            x += h(y);  y += h(x);  x += h(y)
#     position                x L + y
#
# Each round adds a hash of the one to the other, so it can be undone. Frequent ids, which often
# come first, and ids with a factor in common lie all over the table, whatever the number of its
# shards: a checkpoint fits any mesh.

COLUMNS = 1024
"""Tables with `hashed=True` have a multiple of this many rows."""


def position_of(ids: jax.Array, rows: int) -> jax.Array:
    """Return the positions of ids (...) in [0, rows); what is no row stays what it is."""
    lines = rows // COLUMNS
    x, y = ids % COLUMNS, ids // COLUMNS
    x = (x + _hash(y, 1, COLUMNS)) % COLUMNS
    y = (y + _hash(x, 2, lines)) % lines
    x = (x + _hash(y, 3, COLUMNS)) % COLUMNS
    return jnp.where((ids >= 0) & (ids < rows), x * lines + y, ids)


def id_of(positions: jax.Array, rows: int) -> jax.Array:
    """Return the ids of positions in [0, rows): undo `position_of`."""
    lines = rows // COLUMNS
    x, y = positions // lines, positions % lines
    x = (x - _hash(y, 3, COLUMNS)) % COLUMNS
    y = (y - _hash(x, 2, lines)) % lines
    x = (x - _hash(y, 1, COLUMNS)) % COLUMNS
    return y * COLUMNS + x


def _hash(number: jax.Array, round_of: int, limit: int) -> jax.Array:
    """Return a number below `limit` for each number."""
    bits = number.astype(jnp.uint32) + np.uint32(round_of * 0x9E3779B9 % 2**32)
    return (mixed(bits) % np.uint32(limit)).astype(number.dtype)


def mixed(bits: jax.Array) -> jax.Array:
    """Return 32-bit integers with their bits mixed: the finalizer of MurmurHash3, fmix32."""
    shifted = lambda by: bits ^ lax.shift_right_logical(bits, np.asarray(by, bits.dtype))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = shifted(shift) * np.uint32(factor).view(bits.dtype)
    return shifted(16)
