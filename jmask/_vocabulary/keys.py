"""Keys as words of 32 bits, which JAX holds whether or not 64-bit types are enabled.

5              [0, 5]                       high word first
-1             [0xFFFFFFFF, 0xFFFFFFFF]     the same key as an int8 and as an int64
"violin"       64 bits of its BLAKE2b       the same in every process
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.row_ids import mixed
from jmask._base.types import HostArray, Ids, Numbers
from jmask._embedding.lookup import checked_integers


def words_of(keys: Numbers) -> Ids:
    """Return keys as words of 32 bits, high word first, as `rows_of` takes them.

    Call it on the host for 64-bit keys of NumPy where JAX has 64-bit types disabled: under
    `jax.jit` they would be cut to 32 bits.

    Args:
        keys: integers of any dtype and shape, or a list; or words already, uint32 (..., 2).

    Returns:
        Words (*keys.shape, 2) of uint32, of NumPy for what is not JAX's. An integer is the
        same key in every dtype that holds it.

    Raises:
        TypeError: if the keys are no integers.
        ValueError: if they are uint32 with dimensions that do not end in 2.

    Example:
        >>> import numpy as np, jmask
        >>> jmask.vocabulary.words_of(np.array([7, 2**40 + 1, -1]))
        array([[         0,          7],
               [       256,          1],
               [4294967295, 4294967295]], dtype=uint32)
    """
    numbers: Ids = checked_integers("keys", keys, "fill")
    if numbers.dtype == jnp.uint32 and numbers.ndim > 1:
        if numbers.shape[-1] == 2:
            return numbers
        raise ValueError(
            f"`keys` of uint32 and shape {numbers.shape} are neither keys (n,) nor words "
            "(..., 2): pass `keys.reshape(-1)`, or words, high word first."
        )
    is_signed = jnp.issubdtype(numbers.dtype, jnp.signedinteger)
    if isinstance(numbers, np.ndarray):
        bits = numbers.astype(np.int64 if is_signed else np.uint64).view(np.uint64)
        return np.stack([bits >> np.uint64(32), bits & np.uint64(2**32 - 1)], -1).astype("u4")
    if numbers.dtype.itemsize == 8:
        return lax.rev(lax.bitcast_convert_type(numbers, jnp.uint32), (numbers.ndim,))
    low = numbers.astype(jnp.int32 if is_signed else jnp.uint32)
    high = low >> 31 if is_signed else jnp.zeros_like(low)
    return lax.bitcast_convert_type(jnp.stack([high, low], -1), jnp.uint32)


def hash_strings(strings: Iterable[str | bytes]) -> HostArray:
    """Return 64-bit hashes of strings as words, the same in every process.

    Among n strings there are two with the same hash with a probability of about n² / 2⁶⁵.

    Args:
        strings: texts, hashed as UTF-8, or bytes.

    Returns:
        Words (n, 2) of uint32, of NumPy: keys for `rows_of`.

    Raises:
        TypeError: if one is neither text nor bytes.

    References:
        BLAKE2b with a digest of 8 bytes, RFC 7693.

    Example:
        >>> import jmask
        >>> jmask.vocabulary.hash_strings(["violin", "viola", "violin"])
        array([[2357323638, 1797244722],
               [2555231205,  982599066],
               [2357323638, 1797244722]], dtype=uint32)
    """
    is_list = isinstance(strings, Iterable) and not isinstance(strings, str | bytes)
    texts = list(strings) if is_list else []
    wrong = [x for x in texts if not isinstance(x, str | bytes)] if is_list else [strings]
    if wrong:
        kind = type(wrong[0]).__name__
        raise TypeError(f"`strings` must be a list of texts or bytes, got {kind}.")
    encoded = (x.encode() if isinstance(x, str) else x for x in texts)
    digests = b"".join(hashlib.blake2b(x, digest_size=8).digest() for x in encoded)
    return np.frombuffer(digests, ">u4").astype(np.uint32).reshape(-1, 2)


def hashed(words: jax.Array) -> jax.Array:
    """Return hashes (n,) of 32 bits of keys (n, 2)."""
    # Mixed twice, so that keys that differ in a few bits of both words are far apart.
    return mixed(mixed(words[:, 1] + np.uint32(0x9E3779B9)) + words[:, 0])


def part_of(hashes: jax.Array, parts: int) -> jax.Array:
    """Return floor(hash * parts / 2³²), which ascends with the hash, below 2³²."""
    # The high half of a product of 64 bits, from products of halves.
    a, b, half = hashes >> np.uint32(16), hashes & np.uint32(0xFFFF), np.uint32(16)
    c, d = np.uint32(parts >> 16), np.uint32(parts & 0xFFFF)
    ad, bc, mask = a * d, b * c, np.uint32(0xFFFF)
    middle = (b * d >> half) + (ad & mask) + (bc & mask)
    return a * c + (ad >> half) + (bc >> half) + (middle >> half)
