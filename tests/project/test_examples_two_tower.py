"""Two towers in four frameworks: one model, one trajectory, and row-sparse gradients."""

import re
from functools import cache
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.later import later
from tests.oracle import is_row_sparse
from tests.project.test_examples import load  # noqa: F401

eqx = later("equinox")
nnx = later("flax.nnx")

# Examples are written as programs are, which may promote ranks.
pytestmark = [pytest.mark.sampled(15), pytest.mark.rank_promotion, pytest.mark.dtype_promotion]

FRAMEWORKS = ("plain", "linen", "nnx", "equinox")
USERS, ITEMS, DIM = 8, 6, 4
SMALL = ["--users", "1000", "--items", "1000", "--groups", "20"]


@pytest.fixture
def two_tower(load, monkeypatch):  # noqa: F811
    example = load("two_tower")
    monkeypatch.setattr(example, "MEASURE_EVERY", 50)
    monkeypatch.setattr(import_module("interactions"), "BATCH", 256)
    return example


def initial_params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)
    return {
        name: {"embedding": normal(rows, DIM), "kernel": normal(DIM, DIM), "bias": normal(DIM)}
        for name, rows in (("user", USERS), ("item", ITEMS))
    }


def some_batch(step):
    """With every user and every item, so that lazy and dense updates are the same."""
    rng = np.random.default_rng(step)
    return {
        "users": rng.permutation(USERS).astype(np.int32),
        "items": np.append(rng.permutation(ITEMS), [1, 2]).astype(np.int32),
        "frequency": rng.uniform(0.01, 0.1, 8).astype(np.float32),
    }


def with_plain(state, params):
    return params, state[1]


def with_linen(state, params):
    towers = {
        name: {
            "embed": {"embedding": p["embedding"]},
            "dense": {"kernel": p["kernel"], "bias": p["bias"]},
        }
        for name, p in params.items()
    }
    return state.replace(params={"params": towers})


def with_nnx(state, params):
    for name, p in params.items():
        tower = getattr(state[0], name)
        tower.embed.embedding[...] = p["embedding"]
        tower.dense.kernel[...] = p["kernel"]
        tower.dense.bias[...] = p["bias"]
    return state


def with_equinox(state, params):
    def leaves(model):
        towers = [getattr(model, name) for name in params]
        return [x for t in towers for x in (t.embed.weight, t.dense.weight, t.dense.bias)]

    new = [x for p in params.values() for x in (p["embedding"], p["kernel"].T, p["bias"])]
    return eqx.tree_at(leaves, state[0], new), state[1]


GIVEN = dict(zip(FRAMEWORKS, (with_plain, with_linen, with_nnx, with_equinox), strict=True))


def recording(tx, seen):
    def update(updates, state, params=None, **extra_args):
        seen.extend(filter(is_row_sparse, jax.tree.leaves(updates, is_leaf=is_row_sparse)))
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


@cache
def losses_of_stock_jax():
    """Six steps of optax on the dense gradients of JAX."""
    plain, params = import_module("two_tower_plain"), initial_params()
    tx = optax.adam(1e-2)

    def loss_fn(params, batch):
        return plain.in_batch_softmax(*plain.towers(params, batch), batch)

    @jax.jit
    def train_step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for step in range(6):
        params, state, loss = train_step(params, state, some_batch(step))
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_same_losses_with_row_sparse_gradients(name, load, tmp_path, monkeypatch):  # noqa: F811
    """From the same parameters all lose what stock JAX does, also after a checkpoint."""
    framework, seen = load(f"two_tower_{name}"), []
    monkeypatch.setattr(framework, "tx", recording(framework.tx, seen))
    state = framework.create(USERS, ITEMS, DIM, seed=0)
    state = GIVEN[name](state, jax.tree.map(jnp.copy, initial_params()))
    losses, given = [], [x for x in jax.tree.leaves(state) if np.ndim(x) == 2]
    with jmask.strict():
        for step in range(3):
            state, loss = framework.train_step(state, some_batch(step))
            losses.append(float(loss))
    assert len(given) == 12, "tables and kernels, each with two moments"
    assert all(x.is_deleted() for x in given), "donated"
    assert sorted({(x.shape, x.nse) for x in seen}) == [((ITEMS, DIM), 8), ((USERS, DIM), 8)]

    with import_module("checkpoints").Checkpoints(tmp_path, {}) as checkpoints:
        checkpoints.save(3, state, losses)
        state, _ = framework.train_step(state, some_batch(0))
        start, state, losses = checkpoints.restore(state, [])
    for step in range(start, 6):
        state, loss = framework.train_step(state, some_batch(step))
        losses.append(float(loss))
    np.testing.assert_allclose(losses, losses_of_stock_jax(), rtol=2e-5)

    vectors = framework.vectors(state, {"users": np.arange(USERS), "items": np.arange(ITEMS)})
    assert [x.shape for x in vectors] == [(USERS, DIM), (ITEMS, DIM)]


@pytest.mark.slow
def test_recommends_and_goes_on(two_tower, tmp_path, capsys, monkeypatch):
    """A run in two parts is the run in one, and finds what there is to find."""
    drawn, save_curves = [], two_tower.save_curves
    monkeypatch.setattr(
        two_tower, "save_curves", lambda *args: (drawn.append(args), save_curves(*args))
    )
    run = [*SMALL, "--plot", str(tmp_path / "curve.png")]
    two_tower.main([*run, "--steps", "150"])
    printed = capsys.readouterr().out
    assert "plain, 150 steps" in printed
    found, chance, popular, best = (
        float(re.search(rf"{what} ([\d.]+)%", printed)[1])
        for what in ("recall@50", "by chance", "popular items", "knowing all groups")
    )
    assert chance < popular < found <= best + 5
    assert found > popular + 5

    parts = [*run, "--checkpoint", str(tmp_path / "run")]
    two_tower.main([*parts, "--steps", "100"])
    two_tower.main([*parts, "--steps", "150"])
    assert "going on after step 100" in capsys.readouterr().out
    whole, _, resumed = drawn
    assert whole[1] == (0, 50, 100, 150)
    np.testing.assert_equal(resumed, whole)

    from matplotlib.image import imread

    assert imread(tmp_path / "curve.png").std() > 0.01
    with pytest.raises(SystemExit, match="run with other settings: seed was 0, now 1"):
        two_tower.main([*parts, "--seed", "1"])


def test_loss_masks_equal_items(two_tower):
    """Softmax with popularity correction in float64, line by line."""
    import retrieval

    rng = np.random.default_rng(0)
    users, items = rng.normal(size=(2, 6, 4))
    ids = np.array([1, 2, 1, 3, 2, 2])
    items = items[ids]
    frequency = np.linspace(0.1, 0.4, 6)[ids]
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    scores = unit(users) @ unit(items).T / retrieval.TEMPERATURE - np.log(frequency)
    losses = [
        np.log(sum(np.exp(scores[i, j]) for j in range(6) if j == i or ids[j] != ids[i]))
        - scores[i, i]
        for i in range(6)
    ]
    batch = {"items": ids, "frequency": frequency}
    loss = jax.jit(retrieval.in_batch_softmax)(users, items, batch)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


def test_recall(two_tower):
    import retrieval

    users = items = jnp.eye(4)
    assert retrieval.recall(users, items, np.array([0, 1, 2, 0]), 1) == 0.75
    assert retrieval.recall(users, items, np.array([0, 1, 2, 0]), 2) == 1
