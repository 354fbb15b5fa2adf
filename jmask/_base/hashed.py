"""A fixed permutation of row numbers, by which tables with `hashed=True` number their rows.

    id i of N rows          column x = i % 1024, line y = i // 1024, of L = N / 1024
    three rounds            x += h(y);  y += h(x);  x += h(y)
    position                x L + y

Each round adds a hash of the one to the other, so it can be undone. Frequent ids, which often
come first, and ids with a factor in common lie all over the table, whatever the number of its
shards: a checkpoint fits any mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np

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
    """Return uint32 numbers with their bits mixed: the finalizer of MurmurHash3, fmix32."""
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13), (1, 16)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits
