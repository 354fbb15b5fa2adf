"""Tools around a step that meet tables and states: each works, or says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.later import later
from tests.optimizers import NAMED
from tests.stored_tables import stored, unpacked
from tests.tables.test_checkpoints import restored

pytestmark = [pytest.mark.sampled(15), pytest.mark.dtype_promotion]

export = later("jax.export")
train_state = later("flax.training.train_state")
nnx = later("flax.nnx")


V, D = 13, 3
TX = jmask.adam(0.1)
START = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
IDS = jnp.array([1, 1, 7])
TABLES = ("array", "packed")
LINES = stored("packed", START)


def table_of(params):
    return np.asarray(unpacked(params["t"], LINES, START.shape))


def loss(params, ids=IDS):
    rows = jmask.embedding_lookup(params["t"], ids, width=D)
    return jnp.sum(jnp.sin(rows)) + jnp.sum(params["w"])


def parameters(table):
    x = stored(table, START)
    return {"t": x, "w": jnp.ones(2)}


def stepped(tx, params):
    grads = jmask.grad(loss)(params)
    return jmask.apply_gradients(tx, grads, tx.init(params), params)


# --- optax and what is built on it ------------------------------------------------------------


def by_optax(params, grads):
    updates, _ = TX.update(grads, TX.init(params), params)
    return optax.apply_updates(params, updates)


def by_flax(params, grads):
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=TX)
    return state.apply_gradients(grads=grads).params


def by_nnx(params, grads):
    class Model(nnx.Module):
        def __init__(self):
            self.t, self.w = nnx.Param(params["t"]), nnx.Param(params["w"])

    model = Model()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    optimizer.update(model, nnx.State({name: nnx.Param(x) for name, x in grads.items()}))
    return {"t": model.t[...], "w": model.w[...]}


@pytest.mark.parametrize("tool", [by_optax, by_flax, by_nnx])
@pytest.mark.parametrize("table", TABLES)
def test_updates_by_optax(table, tool):
    params = parameters(table)
    found, expected = tool(params, jmask.grad(loss)(params)), stepped(TX, params)[0]
    np.testing.assert_array_equal(table_of(found), table_of(expected))


LABELS = {"t": "rows", "w": "dense"}


def labels(params):
    """As one writes it: of each leaf, by its path."""
    return jax.tree.map_with_path(lambda path, _: LABELS[path[0].key], params)


mask = lambda params: jax.tree.map(lambda label: label == "rows", labels(params))
partition = lambda rows, by: optax.partition({"rows": rows, "dense": optax.sgd(0.1)}, by)
LABELLED = {
    "partition": lambda by: partition(TX, by),
    "masked": lambda by: optax.masked(TX, by),
}


@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize("table", TABLES)
def test_trees_and_functions_of_labels(table, name):
    params, function = parameters(table), mask if name == "masked" else labels
    wanted = table_of(stepped(TX, parameters("array"))[0])
    new, _ = stepped(LABELLED[name](function({"t": 0, "w": 0})), params)
    np.testing.assert_allclose(table_of(new), wanted, rtol=1e-6)
    with pytest.raises(ValueError, match=r"RowSparse[^~]*put it inside jmask\.lazy"):
        stepped(LABELLED[name](function), params)


@pytest.mark.parametrize("by", [LABELS, labels], ids=["tree", "function"])
@pytest.mark.parametrize("table", TABLES[:2])
def test_labels_inside_lazy(table, by):
    wanted = table_of(stepped(jmask.lazy(optax.adam(0.1)), parameters("array"))[0])
    new, _ = stepped(jmask.lazy(partition(optax.adam(0.1), by)), parameters(table))
    np.testing.assert_allclose(table_of(new), wanted, rtol=1e-6)


# --- files ---------------------------------------------------------------------------------

EVERY = NAMED | {
    "every other step": jmask.multi_steps(
        jmask.adam(0.1), 2, like={"t": jmask.RowSparse.zeros((V, D), nse=3), "w": jnp.ones(2)}
    )
}


def exported_and_back(function, *args):
    pytest.importorskip("flatbuffers")
    exported = export.export(jax.jit(function))(*args)
    return export.deserialize(exported.serialize()).call(*args)


def assert_exported(tx, params):
    def step(params, state, ids):
        grads = jmask.grad(loss)(params, ids)
        return jmask.apply_gradients(tx, grads, state, params)

    args = (params, tx.init(params), IDS)
    ours, wanted = exported_and_back(step, *args), jax.jit(step)(*args)
    assert jax.tree.structure(ours) == jax.tree.structure(wanted)
    np.testing.assert_allclose(table_of(ours[0]), table_of(wanted[0]), rtol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name in EVERY if name not in ("adamw", "adam within norms")]
)
def test_exported_steps(name):
    """Not of states of optax's types, which those register who export them."""
    assert_exported(EVERY[name], parameters("array"))


@pytest.mark.parametrize("table", TABLES)
def test_exported_steps_of_tables(table):
    assert_exported(TX, parameters(table))


def test_exported_tensors():
    x = jmask.masked_tensor(jnp.ones(2), jnp.array([True, False]))
    again = exported_and_back(lambda x: x, x)
    np.testing.assert_array_equal(again.to_tensor(0), x.to_tensor(0))
    rows = jmask.RowSparse([1], jnp.ones((1, 2)), (3, 2))
    with pytest.raises(TypeError, match=r"row-sparse tensor.*jmask\.to_arrays"):
        exported_and_back(lambda x: x.todense(), rows)
    masked = jmask.masked_tensor(rows.coalesce())
    with pytest.raises(TypeError, match=r"row-sparse tensor.*jmask\.to_arrays"):
        exported_and_back(lambda x: x.to_tensor(0), masked)
    found = exported_and_back(
        lambda arrays: jmask.from_arrays(arrays, like=rows).todense(), jmask.to_arrays(rows)
    )
    np.testing.assert_array_equal(found, rows.todense())


@pytest.mark.parametrize("name", EVERY)
def test_orbax_of_states(name, tmp_path):
    tx, params = EVERY[name], parameters("array")
    tree = stepped(tx, params)
    again = restored(tree, tmp_path, (params, tx.init(params)))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, again, tree)


# --- profiles ------------------------------------------------------------------------------


def test_profiles_name_the_update():
    """In programs of their own: one from the cache keeps the names it was made with."""
    tx = jmask.lazy(optax.adam(0.1))

    def two_calls(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return jmask.apply_updates(params, updates), state

    one_call = lambda params, state, grads: jmask.apply_gradients(tx, grads, state, params)
    params = parameters("array")
    args = (params, tx.init(params), jmask.grad(loss)(params))
    for step, names in (
        (one_call, {"jmask.apply_gradients"}),
        (two_calls, {"jmask.lazy.update", "jmask.apply_updates"}),
    ):
        text = jax.jit(step).lower(*args).compile().as_text()
        assert all(name in text for name in names)
