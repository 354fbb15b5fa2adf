"""Models that `jax.export` writes down for any size of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jmask

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(9, 3)), jnp.float32)
IDS = np.random.default_rng(1).integers(-1, 10, (5000, 2)).astype(np.int32)

MODELS = {
    "lookup": jmask.embedding_lookup,
    "lookup, bounded": lambda t, ids: jmask.embedding_lookup(t, ids, max_norm=1.0),
    "lookup, clip": lambda t, ids: jmask.embedding_lookup(t, ids, mode="clip"),
    "packed": lambda t, ids: jmask.PackedTable.pack(t)[ids],
    "sum": jmask.embedding_bag,
    "mean": lambda t, ids: jmask.embedding_bag(t, ids, combiner="mean", padding_id=-1),
    "sqrtn": lambda t, ids: jmask.embedding_bag(
        t, ids, combiner="sqrtn", weights=ids.astype(np.float32)
    ),
    "max": lambda t, ids: jmask.embedding_bag(t, ids, combiner="max", padding_id=-1),
    "segments": lambda t, ids: jmask.embedding_bag(
        t, ids[:, 0], segment_ids=ids[:, 1], num_segments=9, mode="zero"
    ),
    "gradient": lambda t, ids: jmask.grad(lambda t: jnp.sum(jnp.tanh(t[ids])))(t).values,
    "gradient of bags": lambda t, ids: (
        jmask.grad(lambda t: jnp.sum(jmask.embedding_bag(t, ids) ** 2))(t).values
    ),
    "a step": lambda t, ids: jmask.apply_gradients(
        jmask.sgd(0.1), jmask.grad(lambda t: jnp.sum(t[ids] ** 3))(t), jmask.sgd(0.1).init(t), t
    )[0],
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_any_batch(name):
    model = MODELS[name]
    ids = jax.ShapeDtypeStruct(export.symbolic_shape("b, 2"), np.int32)
    exported = export.export(jax.jit(model))(TABLE, ids)
    for size in (3, 5000):  # rows of many bags are summed in blocks where the size is known
        result = exported.call(TABLE, IDS[:size])
        np.testing.assert_allclose(result, model(TABLE, IDS[:size]), rtol=1e-4, atol=1e-4)
