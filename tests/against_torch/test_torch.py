"""`adam`, `adagrad` and `sgd` take the steps of the SparseAdam, Adagrad and SGD of torch.

Runs of 20 steps with the same gradients: ids with duplicates, steps without any id, rows
whose duplicates cancel (touched, with a gradient of zero) and rows never touched, which
keep their bits. float64 agrees to 1e-12, float32 to 2e-5. `make test-torch` runs these.

`sgd`, `adagrad` and `rowwise_adagrad` take the steps of the EXACT optimizers of FBGEMM: bags of
random ids with duplicates, without weight decay, which its CPU build takes and ignores.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask

pytestmark = pytest.mark.needs(what="torch")


ROWS, STEPS, LOOKUPS = 12, 20, 6
NEVER_TOUCHED = (0, 7)
CANCELLED = 3
EMPTY_STEPS = (4, 11)

SHAPES = ((ROWS,), (ROWS, 5), (ROWS, 2, 3))
TOLERANCES = {np.float64: 1e-12, np.float32: 2e-5}


BUILDERS = {"SparseAdam": jmask.adam, "Adagrad": jmask.adagrad, "SGD": jmask.sgd}
# Optimizers of torch by their names in `torch.optim`, and their settings.
SPARSE = {
    "adam": ("SparseAdam", {}),
    "adam, all terms": (
        "SparseAdam",
        {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "maximize": True},
    ),
    "adam without momentum": ("SparseAdam", {"lr": 0.1, "betas": (0.0, 0.9)}),
    "adagrad": ("Adagrad", {}),
    "adagrad, all terms": (
        "Adagrad",
        {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.3, "eps": 1e-3},
    ),
    "adagrad, maximize": ("Adagrad", {"lr": 0.1, "maximize": True}),
    "sgd": ("SGD", {"lr": 0.1}),
}
# torch refuses weight decay, and gives momentum dense semantics, for sparse gradients.
DENSE = {
    "adagrad, weight decay": ("Adagrad", {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1}),
    "sgd, weight decay": ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    "sgd, momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "sgd, nesterov": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
}


def optimizer_of(pair, lazy):
    """The optimizer of jmask that must equal one of torch: it has the same settings."""
    kind, settings = pair
    settings = {"learning_rate" if name == "lr" else name: x for name, x in settings.items()}
    if "betas" in settings:
        settings["b1"], settings["b2"] = settings.pop("betas")
    return BUILDERS[kind](**settings, lazy_update=lazy)


def pairs(table):
    return pytest.mark.parametrize("pair", table.values(), ids=table.keys())


shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: dtype.__name__)
start_of = lambda shape, dtype: np.random.default_rng(1).normal(size=shape).astype(dtype)


def gradients(shape, dtype):
    """The ids and rows of each step."""
    rng = np.random.default_rng(0)
    eligible = [row for row in range(ROWS) if row not in (*NEVER_TOUCHED, CANCELLED)]
    steps = []
    for step in range(STEPS):
        count = 0 if step in EMPTY_STEPS else LOOKUPS
        # Three distinct rows at most, so there are duplicates in every step.
        ids = rng.choice(rng.choice(eligible, size=3, replace=False), size=count)
        rows = rng.normal(size=(count, *shape[1:]))
        if step % 3 == 2 and count:
            # After it has moved, so that its averages are not zero.
            ids[:3] = CANCELLED
            rows[1], rows[2] = -rows[0], 0
        elif step % 3 == 1 and count:
            ids[0] = CANCELLED
        steps.append((ids.astype(np.int64), rows.astype(dtype)))
    return steps


def run_torch(torch, pair, start, steps, sparse):
    """The parameter after the steps, and the optimizer's state."""
    param = torch.nn.Parameter(torch.tensor(start))
    optimizer = getattr(torch.optim, pair[0])([param], **pair[1])
    for ids, rows in steps:
        param.grad = torch.sparse_coo_tensor(
            torch.tensor(ids)[None], torch.tensor(rows), start.shape
        )
        if not sparse:
            param.grad = param.grad.to_dense()
        optimizer.step()
    state = {name: np.asarray(x) for name, x in optimizer.state[param].items() if x is not None}
    return param.detach().numpy(), state


def run_jmask(tx, start, steps):
    """The parameter after the steps, and the optimizer's state."""
    step = jax.jit(functools.partial(jmask.apply_gradients, tx))
    param = jnp.asarray(start)
    state = tx.init(param)
    for ids, rows in steps:
        param, state = step(jmask.RowSparse(ids, rows, start.shape), state, param)
    return np.asarray(param), state


def check_equal(ours, theirs, dtype):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.dtype == theirs.dtype == dtype
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def check_pair(torch, pair, shape, dtype, sparse):
    start, steps = start_of(shape, dtype), gradients(shape, dtype)
    theirs, their_state = run_torch(torch, pair, start, steps, sparse)
    with jax.enable_x64(dtype is np.float64):
        ours, our_state = run_jmask(optimizer_of(pair, sparse), start, steps)
    check_equal(ours, theirs, dtype)
    never = list(NEVER_TOUCHED)
    if sparse:
        assert ours[never].tobytes() == start[never].tobytes()
        assert theirs[never].tobytes() == start[never].tobytes()
    assert (ours != start).any(axis=tuple(range(1, ours.ndim)))[CANCELLED]
    assert our_state.count == STEPS
    if "step" in their_state:
        assert their_state["step"] == STEPS
    names = {"mu": "exp_avg", "nu": "exp_avg_sq", "sum_of_squares": "sum"}
    for ours_is, theirs_is in names.items():
        if theirs_is in their_state:
            check_equal(getattr(our_state, ours_is), their_state[theirs_is], dtype)


@dtypes
@shapes
@pairs(SPARSE)
def test_sparse_gradients(torch, pair, shape, dtype):
    check_pair(torch, pair, shape, dtype, sparse=True)


@dtypes
@shapes
@pairs(DENSE)
def test_dense_semantics(torch, pair, shape, dtype):
    check_pair(torch, pair, shape, dtype, sparse=False)


# --- FBGEMM -----------------------------------------------------------------------------


V, D, BAGS, BATCHES = 12, 8, 5, 15
RATE = 0.1

CASES = {
    "sgd": ("EXACT_SGD", {}, jmask.sgd(RATE)),
    "adagrad": ("EXACT_ADAGRAD", {"eps": 1e-8}, jmask.adagrad(RATE, eps=1e-8)),
    "rowwise": ("EXACT_ROWWISE_ADAGRAD", {"eps": 1e-8}, jmask.rowwise_adagrad(RATE, eps=1e-8)),
}


def batches():
    rng = np.random.default_rng(0)
    for _ in range(BATCHES):
        sizes = rng.integers(0, 4, BAGS)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        yield rng.integers(0, V - 2, offsets[-1]), offsets, rng.normal(size=(BAGS, D))


@pytest.mark.filterwarnings("ignore")  # of what the package imports
@pytest.mark.parametrize("name", CASES)
def test_same_trajectory(name):
    try:
        import torch

        with warnings.catch_warnings(action="ignore"):
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
