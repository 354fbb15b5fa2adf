"""`sgd`, `adagrad` and `rowwise_adagrad` take the steps of FBGEMM's EXACT optimizers.

Bags of random ids with duplicates; 15 steps. Without weight decay, which FBGEMM's CPU build
takes and ignores. `make test-torch` installs fbgemm-gpu-cpu and runs these.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask

pytestmark = [
    pytest.mark.needs(what="torch"),
    # The package warns while it is imported, of things that are not used here.
    pytest.mark.filterwarnings("ignore"),
]

V, D, BAGS, STEPS = 12, 8, 5, 15
RATE = 0.1

CASES = {
    "sgd": ("EXACT_SGD", {}, jmask.sgd(RATE)),
    "adagrad": ("EXACT_ADAGRAD", {"eps": 1e-8}, jmask.adagrad(RATE, eps=1e-8)),
    "rowwise": ("EXACT_ROWWISE_ADAGRAD", {"eps": 1e-8}, jmask.rowwise_adagrad(RATE, eps=1e-8)),
}


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        sizes = rng.integers(0, 4, BAGS)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        yield rng.integers(0, V - 2, offsets[-1]), offsets, rng.normal(size=(BAGS, D))


@pytest.mark.parametrize("name", CASES)
def test_same_trajectory(name):
    try:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                EmbeddingLocation,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
    except ImportError as error:
        pytest.fail(f"FBGEMM is needed: run these tests with `make test-torch` ({error})")

    kind, settings, tx = CASES[name]
    start = np.float32(np.random.default_rng(1).normal(size=(V, D)))
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(V, D, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType[kind],
        learning_rate=RATE,
        **settings,
    )
    theirs.split_embedding_weights()[0].data.copy_(torch.as_tensor(start))

    table = jnp.asarray(start)
    state = tx.init(table)
    for ids, offsets, weights in batches():
        bags = theirs(torch.as_tensor(ids), torch.as_tensor(offsets))
        bags.backward(torch.as_tensor(np.float32(weights)))

        def loss(table, ids=ids, offsets=offsets, weights=weights):
            bag = np.repeat(np.arange(BAGS), np.diff(offsets))
            return jnp.sum(table[jnp.asarray(ids)] * np.float32(weights)[bag])

        grads = jmask.grad(loss)(table)
        if isinstance(grads, jax.Array):  # no ids at all: to JAX the table is not used
            grads = jmask.RowSparse.zeros(table.shape)
        table, state = jmask.apply_gradients(tx, grads, state, table)
    ours = np.asarray(table)
    np.testing.assert_allclose(
        ours, theirs.split_embedding_weights()[0].detach(), rtol=2e-5, atol=2e-6
    )
    np.testing.assert_array_equal(ours[V - 2 :], start[V - 2 :])
    if kind != "EXACT_SGD":
        (of_torch,), *_ = theirs.split_optimizer_states()
        accumulated = np.asarray(state.sum_of_squares).reshape(of_torch.shape)
        np.testing.assert_allclose(accumulated, of_torch, rtol=2e-5, atol=1e-6)
