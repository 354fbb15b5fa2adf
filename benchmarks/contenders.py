"""Who trains an embedding: jmask, stock optax, torch and FBGEMM, each with the same work.

    step = jmask_step("Adam", rows=1_000_000, width=64)
    step(ids)           looks the rows up, sums their squares, differentiates, updates in place

A contender that is not installed is left out, by raising ImportError.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmask

RATE = 0.01

JMASK: dict[str, Callable[[], optax.GradientTransformation]] = {
    "SGD": lambda: jmask.sgd(RATE),
    "momentum": lambda: jmask.sgd(RATE, momentum=0.9),
    "Adagrad": lambda: jmask.adagrad(RATE),
    "row-wise Adagrad": lambda: jmask.rowwise_adagrad(RATE),
    "Adam": lambda: jmask.adam(RATE),
}
OPTAX: dict[str, Callable[[], optax.GradientTransformation]] = {
    "SGD": lambda: optax.sgd(RATE),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9),
    "Adagrad": lambda: optax.adagrad(RATE),
    "Adam": lambda: optax.adam(RATE),
}
TORCH = {"SGD": "SGD", "Adagrad": "Adagrad", "Adam": "SparseAdam"}
FBGEMM = {
    "SGD": "EXACT_SGD",
    "Adagrad": "EXACT_ADAGRAD",
    "row-wise Adagrad": "EXACT_ROWWISE_ADAGRAD",
}

Step = Callable[[np.ndarray], None]


def _loss(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.sum(table[ids] ** 2)


def _jax_step(tx: Any, rows: int, width: int, value_and_grad: Callable) -> Step:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, ids):
        _, grads = value_and_grad(_loss)(table, ids)
        return jmask.apply_gradients(tx, grads, state, table)

    table = jnp.ones((rows, width))
    place = [table, tx.init(table)]

    def run(ids: np.ndarray) -> None:
        place[:] = step(*place, ids)
        jax.block_until_ready(place)

    return run


def jmask_step(optimizer: str, rows: int, width: int) -> Step:
    """A full step with row-sparse gradients."""
    return _jax_step(JMASK[optimizer](), rows, width, jmask.value_and_grad)


def optax_step(optimizer: str, rows: int, width: int) -> Step:
    """A full step of stock JAX and optax, with dense gradients."""
    return _jax_step(OPTAX[optimizer](), rows, width, jax.value_and_grad)


def jmask_update(optimizer: str, rows: int, width: int) -> Step:
    """The update alone, with a gradient of ones at ids that are sorted and unique."""
    tx = JMASK[optimizer]()

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(table, state, ids, values):
        grads = jmask.RowSparse(ids, values, table.shape, coalesced=True)
        return jmask.apply_gradients(tx, grads, state, table)

    table = jnp.ones((rows, width))
    place, values = [table, tx.init(table)], {}

    def run(ids: np.ndarray) -> None:
        if ids.size not in values:
            values[ids.size] = jnp.ones((ids.size, width))
        place[:] = update(*place, ids, values[ids.size])
        jax.block_until_ready(place)

    return run


def torch_step(optimizer: str, rows: int, width: int) -> Step:
    """A full step of torch with `Embedding(sparse=True)`."""
    import torch

    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    embedding = torch.nn.Embedding(rows, width, sparse=True)
    update = getattr(torch.optim, TORCH[optimizer])(embedding.parameters(), lr=RATE)

    def run(ids: np.ndarray) -> None:
        update.zero_grad()
        embedding(torch.from_numpy(ids)).square().sum().backward()
        update.step()

    return run


def fbgemm_step(optimizer: str, rows: int, width: int) -> Step:
    """A full step of FBGEMM's table-batched embedding, whose update is fused."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            EmbeddingLocation,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    embedding = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType[FBGEMM[optimizer]],
        learning_rate=RATE,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )

    def run(ids: np.ndarray) -> None:
        # A bag for each id: what a lookup is.
        offsets = torch.arange(ids.size + 1)
        embedding(torch.from_numpy(ids.astype(np.int64)), offsets).square().sum().backward()

    return run
