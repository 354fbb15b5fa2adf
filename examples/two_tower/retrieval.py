"""What all two-tower recommenders here share: their loss, and how good they are.

Users and items are vectors; a user is shown the items with the greatest cosine similarity.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmask

TEMPERATURE = 0.1

Batch = dict[str, Any]


def in_batch_softmax(users: jax.Array, items: jax.Array, batch: Batch) -> jax.Array:
    """Return the softmax loss of each user's item among all items of the batch.

    Frequent items are in more batches, which their scores make up for; and where the item
    of another line is the same one, it is no wrong answer: it is masked.

    Args:
        users, items (n, dim): vectors of any length; line i of both belong together.
        batch: "items" (n,), their ids, and "frequency" (n,), how often each occurs.

    References:
        Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
        Recommendations", 2019.
    """
    scores = unit(users) @ unit(items).T / TEMPERATURE - jnp.log(batch["frequency"])
    same = batch["items"][:, None] == batch["items"]
    choices = ~same | jnp.eye(len(scores), dtype=bool)
    return -jnp.mean(jnp.diagonal(jmask.nn.log_softmax(scores, where=choices)))


def unit(vectors: jax.Array) -> jax.Array:
    """Return vectors of length one."""
    squares = jnp.sum(vectors**2, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(squares + 1e-12)


def recall(users: jax.Array, items: jax.Array, wanted: np.ndarray, k: int) -> float:
    """Return the share of users whose wanted item is among their k best.

    Args:
        users (n, dim), items (V, dim): vectors of any length.
        wanted (n,): the id of an item for each user.
        k: how many items a user is shown.
    """
    scores = unit(users) @ unit(items).T
    of_wanted = jnp.take_along_axis(scores, wanted[:, None], axis=1)
    return float(jnp.mean(jnp.sum(scores > of_wanted, axis=1) < k))
