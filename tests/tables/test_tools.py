"""Tools around a step take tables of every kind, and states: each works, or says what to do.

Frameworks and optax step as `apply_gradients` does; files and exported programs give back what
they were given.
"""

import contextlib
import functools
import os
import pathlib
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from tests.expressions import functions
from tests.later import later
from tests.optimizers import NAMED
from tests.oracle import assert_close
from tests.stored_tables import LAYOUTS, batch_of, bits, mesh_of, sharded, stored, unpacked

pytestmark = [pytest.mark.sampled(15), pytest.mark.dtype_promotion]

export = later("jax.export")
ocp, eqx = later("orbax.checkpoint"), later("equinox")
linen, train_state = later("flax.linen"), later("flax.training.train_state")
nnx = later("flax.nnx")

V, D = 24, 12
TX = jmask.adam(0.1)
START = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
IDS = np.array([1, 3, 3, 20, 9, 2, 5, 20], np.int32)
TABLES = ("array", "packed", "8 devices", "automatic axis")


def parameters(table="array", start=START):
    """A table and what every device has, and the ids of a batch."""
    if table not in LAYOUTS:
        return {"t": stored(table, start), "w": jnp.ones(2)}, jnp.asarray(IDS)
    spread = sharded(start, table)
    w = jax.device_put(jnp.ones(2), NamedSharding(spread.sharding.mesh, P()))
    return {"t": spread, "w": w}, batch_of(IDS, table)


def table_of(params):
    return np.asarray(unpacked(params["t"], stored("packed", START), START.shape))


def on_mesh_of(params):
    mesh = getattr(params["t"].sharding, "mesh", None)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def loss(params, ids):
    rows = jmask.embedding_lookup(params["t"], ids, width=D)
    return jnp.sum(jnp.sin(rows)) + jnp.sum(params["w"])


gradients = jax.jit(jmask.grad(loss))


def stepped(tx, params, ids):
    return jmask.apply_gradients(tx, gradients(params, ids), tx.init(params), params)


# --- optax and what is built on it ------------------------------------------------------------


def by_optax(params, grads):
    updates, _ = TX.update(grads, TX.init(params), params)
    return optax.apply_updates(params, updates)


def by_incremental_update(params, grads):
    new, _ = jmask.apply_gradients(TX, grads, TX.init(params), params)
    return optax.incremental_update(new, params, 1.0)


def by_train_state(params, grads):
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=TX)
    return state.apply_gradients(grads=grads).params


def by_nnx_optimizer(params, grads):
    class Model(nnx.Module):
        def __init__(self):
            self.t, self.w = nnx.Param(params["t"]), nnx.Param(params["w"])

    model = Model()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    optimizer.update(model, nnx.State({name: nnx.Param(x) for name, x in grads.items()}))
    return {"t": model.t[...], "w": model.w[...]}


@pytest.mark.parametrize(
    "tool", [by_optax, by_incremental_update, by_train_state, by_nnx_optimizer]
)
@pytest.mark.parametrize("table", TABLES)
def test_steps(table, tool):
    params, ids = parameters(table)
    with on_mesh_of(params):
        found = tool(params, gradients(params, ids))
    expected, _ = stepped(TX, *parameters())
    np.testing.assert_allclose(table_of(found), table_of(expected), rtol=1e-5, atol=1e-6)
    assert found["t"].sharding.is_equivalent_to(params["t"].sharding, 2)


def linen_embed(table, ids):
    return linen.Embed(V, D).apply({"params": {"embedding": table}}, ids)


def nnx_embed(table, ids):
    layer = nnx.Embed(V, D, rngs=nnx.Rngs(0))
    layer.embedding[...] = table
    return layer(ids)


@pytest.mark.parametrize("layer", [linen_embed, nnx_embed])
def test_layers(layer):
    """On automatic axes, where a plain lookup is partitioned: row-sparse, and nothing moved."""
    params, ids = parameters("automatic axis")
    look = lambda table, ids: jnp.sum(jnp.sin(layer(table, ids)))

    def step(table, ids):
        gradient = jmask.grad(look)(table, ids)
        return jmask.apply_gradients(TX, gradient, TX.init(table), table)[0]

    with jmask.strict():
        new = jax.jit(step)(params["t"], ids)
    np.testing.assert_allclose(new, step(START, jnp.asarray(IDS)), rtol=1e-5, atol=1e-6)
    assert new.sharding.is_equivalent_to(params["t"].sharding, 2)


LABELS = {"t": "rows", "w": "dense"}
# As one writes it: of each leaf, by its path.
labels = lambda params: jax.tree.map_with_path(lambda path, _: LABELS[path[0].key], params)
mask = lambda params: jax.tree.map(lambda label: label == "rows", labels(params))
masked = lambda rows, by: optax.masked(rows, by)
partition = lambda rows, by: optax.partition({"rows": rows, "dense": optax.sgd(0.1)}, by)


@pytest.mark.parametrize("table", TABLES[:2])
def test_trees_and_functions_of_labels(table):
    """A function of labels mapped over gradients sees inside their nodes: it belongs inside."""
    params, ids = parameters(table)
    wanted = table_of(stepped(TX, *parameters())[0])
    for make, function in ((partition, labels), (masked, mask)):
        new, _ = stepped(make(TX, function({"t": 0, "w": 0})), params, ids)
        np.testing.assert_allclose(table_of(new), wanted, 1e-5, 1e-6)
        with pytest.raises(ValueError, match=r"RowSparse[^~]*put it inside jmask\.lazy"):
            stepped(make(TX, function), params, ids)
    wanted = table_of(stepped(jmask.lazy(optax.adam(0.1)), *parameters())[0])
    for by in (LABELS, labels):
        new, _ = stepped(jmask.lazy(partition(optax.adam(0.1), by)), params, ids)
        np.testing.assert_allclose(table_of(new), wanted, 1e-5, 1e-6)


# --- files ---------------------------------------------------------------------------------


def restored(tree, path, *shapes):
    """What orbax gives of a tree that it saved."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "run", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "run", *shapes)


def by_orbax(tree, like, path):
    return restored(tree, path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


def by_equinox(tree, like, path):
    eqx.tree_serialise_leaves(path / "run.eqx", tree)
    return eqx.tree_deserialise_leaves(path / "run.eqx", like)


def by_hand(tree, like, path):
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def as_plain_arrays(route):
    """The same of `to_arrays` of the tree."""

    def run(tree, like, path):
        plain = route(jmask.to_arrays(tree), jmask.to_arrays(like), path)
        return jmask.from_arrays(plain, like)

    return run


ROUTES = {
    "orbax": by_orbax,
    "orbax, without types": lambda tree, like, path: jmask.from_arrays(
        restored(tree, path), like
    ),
    "equinox": by_equinox,
    "by hand": by_hand,
    "pickle": lambda tree, like, path: pickle.loads(pickle.dumps(tree)),
    "arrays": as_plain_arrays(lambda tree, like, path: tree),
    "arrays in orbax": as_plain_arrays(by_orbax),
    "arrays in equinox": as_plain_arrays(by_equinox),
}


@functools.cache
def run_of(table, name="adam", scale=1.0):
    return stepped(EVERY[name], *parameters(table, scale * START))


def assert_restored(again, tree):
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("table", TABLES[:2])
def test_files(table, route, tmp_path):
    """Parameters and the state of a step, restored to a tree of other numbers."""
    tree, like = run_of(table), run_of(table, scale=0.0)
    assert_restored(ROUTES[route](tree, like, tmp_path), tree)


@pytest.mark.parametrize("name", NAMED)
def test_orbax_of_states(name, tmp_path):
    tree = run_of("array", name)
    assert_restored(by_orbax(tree, tree, tmp_path), tree)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("axes", ["explicit", "automatic"])
def test_orbax_on_another_mesh(devices, axes, tmp_path):
    """What orbax restores to the sharding that it is asked for, the state of a step as well."""
    params, ids = parameters("8 devices")
    tree, mesh = stepped(TX, params, ids), mesh_of(devices, axes=axes)

    def elsewhere(x):
        spec = P("x") if x.shape[:1] == (V,) else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    again = restored(tree, tmp_path, jax.tree.map(elsewhere, tree))
    assert_restored(again, tree)
    assert again[0]["t"].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    step = jax.jit(lambda p, s, ids: jmask.apply_gradients(TX, jmask.grad(loss)(p, ids), s, p))
    elsewhere = jax.device_put(IDS, NamedSharding(mesh, P("x")))
    assert_close(step(*again, elsewhere), step(*tree, ids))


@pytest.mark.rank_promotion
@pytest.mark.parametrize("fresh", ["fresh()", "jax.eval_shape(fresh)"])
def test_the_page_of_checkpoints_on_eight_devices(fresh):
    """As it says, and what it restores goes on."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    program, names = page.partition("```python\n")[2].partition("```")[0], {}
    program = program.replace("make_mesh((1,)", "make_mesh((8,)")
    exec(program.replace("placed, fresh()", f"placed, {fresh}"), names)
    params, state = names["params"], names["state"]
    grads = jmask.grad(names["loss"])(params, jnp.array([1, 4]))
    params, state = jmask.apply_gradients(names["tx"], grads, state, params)
    np.testing.assert_allclose(params["table"][:, 0], [0, -0.2, 0, 0, -0.2, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("at", [(1, jnp.array([0, 2])), (jnp.array([0, 1]), 2, jnp.array([0]))])
def test_arrays_of_a_gradient_of_a_stack(at):
    gradient = jmask.grad(lambda t: jnp.sum(t[at]))(jnp.ones((2, 3, 1)))
    again = jmask.from_arrays(jmask.to_arrays(gradient), gradient)
    assert again.leading == gradient.leading
    np.testing.assert_array_equal(again.todense(), gradient.todense())


def test_arrays_of_padding():
    """An id beyond V is padding, and of what is stored it would be a row of a larger table."""
    x = jmask.RowSparse([1, 7, -1], jnp.ones((3, 1)), (3, 1))
    again = jmask.from_arrays(jmask.to_arrays(x), like=x)
    np.testing.assert_array_equal(again.todense(), x.todense())
    with pytest.raises(ValueError, match="holds 7, which is no row of `like`"):
        jmask.from_arrays({"indices": x.indices, "values": x.values}, like=x)


# --- exported programs, profiles, and programs of their own ---------------------------------

EVERY = NAMED | {
    "every other step": jmask.multi_steps(
        jmask.adam(0.1), 2, like={"t": jmask.RowSparse.zeros((V, D), nse=8), "w": jnp.ones(2)}
    )
}
# States of optax's types are registered by those who export them.
EXPORTED = [("array", name) for name in EVERY if name not in ("adamw", "adam within norms")]


def exported_and_back(function, *args):
    pytest.importorskip("flatbuffers")
    exported = export.export(jax.jit(function))(*args)
    return jax.jit(export.deserialize(exported.serialize()).call)(*args)


@pytest.mark.parametrize(("table", "name"), [*EXPORTED, *((x, "adam") for x in TABLES[1:])])
def test_exported_steps(table, name):
    tx, (params, ids) = EVERY[name], parameters(table)

    def step(params, state, ids):
        grads = jmask.grad(loss)(params, ids)
        return jmask.apply_gradients(tx, grads, state, params)

    args = (params, tx.init(params), ids)
    with on_mesh_of(params):
        ours, wanted = exported_and_back(step, *args), jax.jit(step)(*args)
    assert jax.tree.structure(ours) == jax.tree.structure(wanted)
    np.testing.assert_allclose(table_of(ours[0]), table_of(wanted[0]), rtol=1e-6)


LOOKUPS = functions("t, ids", globals())("""
    t[ids]; jnp.take(t, ids, axis=0, mode="clip"); jnp.exp(t)[ids]; t[ids[:, None]].sum(1);
    jmask.embedding_lookup(t, ids, padding_id=0); jmask.embedding_bag(t, ids[:, None]);
    (t / jnp.linalg.norm(t, axis=1, keepdims=True) ** 2)[ids] + t[3][None];
    t[ids] + jnp.sum(t[:2]); jax.lax.map(lambda i: t[i], ids)
""")


@pytest.mark.parametrize("name", ["sgd", "adam", "rowwise adagrad", "adam unless not finite"])
@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("sizes", ["7, b", "v, b", "v, 5"])
def test_steps_of_any_size(lookup, name, sizes):
    """The numbers of rows and of ids are left open where a step is exported."""
    tx, (rows, ids) = NAMED[name], export.symbolic_shape(sizes)

    def step(table, state, ids):
        grads = jmask.grad(lambda t: jnp.sum(jnp.sin(LOOKUPS[lookup](t, ids))))(table)
        return jmask.apply_gradients(tx, grads, state, table)

    like = jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    args = like, jax.eval_shape(tx.init, like), jax.ShapeDtypeStruct((ids,), jnp.int32)
    exported = export.export(jax.jit(step))(*args)
    for count in (5, 1)[: 2 if "b" in sizes else 1]:
        table = jnp.arange(28.0).reshape(7, 4)
        args = table, tx.init(table), jnp.arange(count, dtype=jnp.int32) % 3
        assert_close(exported.call(*args), step(*args), rtol=1e-5, atol=1e-6)


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


def test_profiles_name_the_update():
    """In programs of their own: one from the cache keeps the names it was made with."""
    tx = jmask.lazy(optax.adam(0.1))

    def two_calls(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return jmask.apply_updates(params, updates), state

    one_call = lambda params, state, grads: jmask.apply_gradients(tx, grads, state, params)
    params, ids = parameters()
    args = (params, tx.init(params), gradients(params, ids))
    for step, names in (
        (one_call, {"jmask.apply_gradients"}),
        (two_calls, {"jmask.lazy.update", "jmask.apply_updates"}),
    ):
        text = jax.jit(step).lower(*args).compile().as_text()
        assert all(name in text for name in names)


def check_gradients_on_explicit_axes():
    table = jmask.sharded(START, jax.make_mesh((4,), ("x",)))
    look = lambda t: jmask.embedding_lookup(t, jnp.array([1, 1, 12]))
    for loss in (lambda t: jnp.sum(look(t)), lambda t: jnp.sum(jnp.sin(look(t)))):
        value, gradient = jmask.value_and_grad(loss)(table)
        expected, dense = jax.value_and_grad(loss)(START)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient.todense(), dense, rtol=1e-6)
        new, _ = jmask.apply_gradients(TX, gradient, TX.init(table), table)
        array, _ = jmask.apply_gradients(TX, jmask.grad(loss)(START), TX.init(START), START)
        np.testing.assert_allclose(np.asarray(new), array, rtol=1e-5)
    assert jax.sharding.get_abstract_mesh().empty


def test_gradients_on_explicit_axes_outside_jit():
    """Which `jax.make_mesh` gives, and without a mesh that is set, in a process of its own."""
    # Behind a thousand other tests `jnp.zeros` was on a mesh of theirs, with automatic axes.
    module = "tests.tables.test_tools"
    code = f"import tests.conftest, {module} as t; t.check_gradients_on_explicit_axes()"
    root, cpus = pathlib.Path(__file__).parents[2], {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=cpus, check=True)
