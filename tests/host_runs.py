"""Runs with tables on the host, and the same with tables on the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmask
from tests.optimizers import OPTIMIZERS as SHARED

ROWS, OTHERS, STEPS = 60, 40, 4

OPTIMIZERS = {
    **{
        name: SHARED[name]
        for name in (
            *("optax.adam", "optax.adagrad", "optax.sgd with momentum", "adam", "adagrad"),
            *("rowwise adagrad", "rowwise adam", "ftrl", "adam unless not finite"),
        )
    },
    "schedule": jmask.sgd(optax.linear_schedule(0.1, 0.01, 5)),
    "clipped, with a schedule": jmask.lazy(
        optax.chain(
            optax.clip_by_global_norm(0.5), optax.adamw(optax.cosine_decay_schedule(0.1, 5))
        )
    ),
    "injected": jmask.lazy(
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 5))
    ),
    "ema": optax.chain(jmask.adam(1e-2), jmask.ema(0.9)),
    "partition": optax.partition(
        {"t": jmask.rowwise_adagrad(0.1), "w": jmask.lazy(optax.adam(1e-2))},
        {"table": "t", "other": "t", "w": "w"},
    ),
}


def new_params(dtype=np.float32):
    rng = np.random.default_rng(0)
    table, other = rng.normal(size=(ROWS, 3)), rng.normal(size=(OTHERS, 2, 2))
    return {
        "table": table.astype(dtype),
        "other": other.astype(dtype),
        "w": rng.normal(size=(3,)).astype(np.float32),
    }


def batches(steps=STEPS, seed=1):
    """Lookups with duplicates; bags with padding; ids that both tables look up."""
    rng = np.random.default_rng(seed)
    for k in range(steps):
        sizes = rng.integers(0, 4, 6)
        bags = [rng.integers(0, ROWS // 2, n).tolist() for n in sizes]
        lines = np.where(rng.random((4, 3)) < 0.3, -1, rng.integers(0, OTHERS, (4, 3)))
        yield {
            "ids": rng.integers(0, ROWS, (5, 2)),
            "bags": jmask.pad_bags(
                bags, weights=[[0.5 + k] * len(x) for x in bags], at_least=16
            ),
            "lines": lines.astype(np.int32),
            "both": rng.integers(0, OTHERS, 3).astype(np.uint8),
            "y": rng.normal(size=5).astype(np.float32),
        }


IDS = {
    "table": lambda batch: [batch["ids"], batch["bags"], batch["both"]],
    "other": lambda batch: [batch["lines"], batch["both"]],
}


def loss_fn(params, batch):
    table, other = params["table"], params["other"]
    rows = jmask.embedding_lookup(table, batch["ids"]).astype(jnp.float32)
    loss = jnp.mean((jnp.sum(rows * params["w"][None, None], (1, 2)) - batch["y"]) ** 2)
    bags = jmask.embedding_bag(table, batch["bags"], combiner="mean")
    lines = jmask.embedding_bag(other, batch["lines"], padding_id=-1)
    both = table[batch["both"]][:, :2] * other[batch["both"]][:, 0]
    return loss + sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in (bags, lines, both))


def step_of(tx, loss_fn=loss_fn, donate=(0, 1)):
    @functools.partial(jax.jit, donate_argnums=donate)
    def step(params, state, batch):
        loss, grads = jmask.value_and_grad(loss_fn)(params, batch)
        params, state = jmask.apply_gradients(tx, grads, state, params)
        return params, state, loss

    return step


def on_device(tx, params, loader, loss_fn=loss_fn):
    """Train with tables on the device."""
    step, params = step_of(tx, loss_fn), jax.tree.map(jnp.array, params)
    state, losses = tx.init(params), []
    for batch in loader:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, state, losses


def on_host(tx, params, loader, ids=IDS, loss_fn=loss_fn, **options):
    """Train with NumPy tables on the host; `w` goes to the device."""
    step = step_of(tx, loss_fn)
    params = {k: jnp.array(x) if k == "w" else x for k, x in params.items()}
    host = jmask.host.offload(params, tx, **options)
    losses = []
    for batch, rows, state in host.steps(loader, ids=ids):
        rows, state, loss = step(rows, state, batch)
        host.commit(rows, state)
        losses.append(float(loss))
    host.flush()
    return host, losses


def assert_same(host, params, state, tolerance=2e-6):
    for ours, theirs in ((host.params, params), (host.state, state)):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert x.dtype == y.dtype
            x, y = (np.asarray(a, np.float64) for a in (x, y))
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
