"""A small transformer, and a memory of n-grams that it looks up: Engram's idea in forty lines.

    tokens      the  cat  sat
    2-grams     hash(cat, sat)       -> some rows of one large table
    3-grams     hash(the, cat, sat)  -> some more
    memory      those rows side by side; a gate decides how much of them is added

Which rows are read depends on the tokens alone, so a table of 10^8 rows costs what the rows
read cost. Nothing here knows of jmask: `params["memory"][ids]` is a lookup.

References:
    "Conditional Memory via Scalable Lookup: A New Axis of Sparsity for Large Language Models"
    (Engram), arXiv 2601.07372, for multi-head hashing and the gate.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]


class Sizes(NamedTuple):
    """Sizes of a model.

    Attributes:
        vocabulary: of tokens.
        width: of what a layer passes on.
        layers, heads: of the transformer.
        length: the longest text.
        orders: the lengths of the n-grams.
        tables: how many rows each n-gram has, each found by a hash of its own.
        row: numbers in a row of the memory.
    """

    vocabulary: int
    width: int = 128
    layers: int = 3
    heads: int = 4
    length: int = 128
    orders: tuple[int, ...] = (2, 3)
    tables: int = 4
    row: int = 16

    @property
    def lookups(self) -> int:
        """Return rows of the memory that a token looks up."""
        return self.tables * len(self.orders)


def init_params(sizes: Sizes, rows: int, seed: int, dtype: Any = jnp.float32) -> Params:
    """Return parameters of the transformer and of a memory of `rows` rows, unless that is 0."""
    width, keys = sizes.width, iter(jax.random.split(jax.random.key(seed), 100))

    def weight(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    layers = [
        {
            "attention": weight(width, 3 * width),
            "output": weight(width, width) * 0.3,
            "up": weight(width, 4 * width),
            "down": weight(4 * width, width) * 0.3,
        }
        for _ in range(sizes.layers)
    ]
    params: Params = {
        "tokens": 0.02 * jax.random.normal(next(keys), (sizes.vocabulary, width)),
        "positions": 0.02 * jax.random.normal(next(keys), (sizes.length, width)),
        "layers": layers,
        "logits": weight(width, sizes.vocabulary),
    }
    if rows:
        read = sizes.lookups * sizes.row
        params["key"], params["value"] = weight(read, width), weight(read, width)
        params["memory"] = jnp.zeros((sum(parts_of(sizes, rows)), sizes.row), dtype)
    return params


# --- the memory -------------------------------------------------------------------------


def parts_of(sizes: Sizes, rows: int) -> list[int]:
    """Return the number of rows of each hash: different primes, so that collisions differ."""
    parts: list[int] = []
    candidate = max(2, rows // sizes.lookups)
    while len(parts) < sizes.lookups:
        candidate += 1
        if all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            parts.append(candidate)
    return parts


def ngram_ids(tokens: jax.Array, sizes: Sizes, rows: int) -> jax.Array:
    """Map tokens (batch, length) to rows of the memory (batch, length, lookups).

    Each hash of an n-gram is a product-and-xor of its tokens, scrambled, modulo the prime of
    its part of the table. Before the text the tokens are 0.
    """
    multipliers = np.random.default_rng(0).integers(0, 2**31, (sizes.lookups, 8)) * 2 + 1
    parts, ids, start = parts_of(sizes, rows), [], 0
    tokens = tokens.astype(jnp.uint32) + np.uint32(1)
    for number in range(sizes.lookups):
        order = sizes.orders[number // sizes.tables]
        mixed = jnp.zeros_like(tokens)
        for back in range(order):
            shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
            mixed ^= shifted * np.uint32(multipliers[number, back])
        mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        mixed ^= mixed >> np.uint32(16)
        ids.append((mixed % np.uint32(parts[number])).astype(jnp.int32) + np.int32(start))
        start += parts[number]
    return jnp.stack(ids, axis=-1)


def recalled(params: Params, hidden: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the gated sum of rows (batch, length, lookups, row) for the hidden states.

    The gate is Engram's: the sigmoid of the signed root of a scaled product of both.
    """
    read = rows.reshape(*rows.shape[:2], -1).astype(hidden.dtype)
    match = jnp.mean(normed(hidden) * normed(read @ params["key"]), axis=-1, keepdims=True)
    match = match * hidden.shape[-1] ** 0.5
    gate = jax.nn.sigmoid(jnp.sign(match) * jnp.sqrt(jnp.maximum(jnp.abs(match), 1e-6)))
    return gate * (read @ params["value"])


# --- the transformer --------------------------------------------------------------------


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def attention(layer: Params, x: jax.Array, heads: int) -> jax.Array:
    batch, length, width = x.shape
    parts = (x @ layer["attention"]).reshape(batch, length, 3, heads, width // heads)
    queries, keys, values = (parts[:, :, i] for i in range(3))
    mixed = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
    return mixed.reshape(batch, length, width) @ layer["output"]


def loss_fn(params: Params, tokens: jax.Array, sizes: Sizes, rows: int) -> jax.Array:
    """Return the mean loss of a token, in nats; `rows` is that of `init_params`."""
    return jnp.mean(losses(params, tokens, sizes, rows))


def losses(params: Params, tokens: jax.Array, sizes: Sizes, rows: int) -> jax.Array:
    """Return the losses (batch, length) of tokens (batch, length + 1), given those before."""
    given, following = tokens[:, :-1], tokens[:, 1:]
    hidden = params["tokens"][given] + params["positions"][None, : given.shape[1]]
    for number, layer in enumerate(params["layers"]):
        if number == 1 and rows:
            read = params["memory"][ngram_ids(given, sizes, rows)]
            hidden += recalled(params, hidden, read)
        hidden += attention(layer, normed(hidden), sizes.heads)
        hidden += jax.nn.gelu(normed(hidden) @ layer["up"]) @ layer["down"]
    logits = normed(hidden) @ params["logits"]
    of_following = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - of_following
