"""Random placements on meshes: where arrays lie changes no number of a training run.

A table of some kind lies on a mesh of 8 devices in some way, and so do the ids of its batches;
axes are automatic or explicit, and the mesh is set or not. Parameters, state and losses of
three steps are those of one device, whatever the optimizer is and however steps are taken;
rows that are not looked up keep their bits, and a table stays where it is.
"""

import contextlib
import functools
from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax.experimental.sparse import BCOO
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from jmask._kernels import tuning
from tests.compiled_step import with_optax
from tests.optimizers import OPTIMIZERS
from tests.oracle import assert_close
from tests.sampling import few_or_many
from tests.stored_tables import STEPS, bits, mesh_of

V, D = 128, 8
TABLE = np.random.default_rng(0).normal(size=(V, D)).astype(np.float32)
# A few ids, or so many that their rows go to their owners alone: not all of the rows.
FEW, MANY = (np.random.default_rng(1).integers(0, V - 7, (3, n), "i4") for n in (16, 2048))
SHARED = FEW[:, 1]  # by all examples, on every device
# How a table of this kind is made of `TABLE`, and the index that a lookup of ids has.
KINDS = {
    "rows": (jnp.asarray, lambda ids: ids),
    "bags": (jnp.asarray, lambda ids: ids),
    "beside shared": (jnp.asarray, lambda ids: [ids, SHARED]),
    "indexed": (jnp.asarray, lambda ids: ids),
    "stack": (lambda x: jnp.asarray(x).reshape(8, -1, D), lambda ids: (ids % 8, ids // 8)),
    "vector": (lambda x: jnp.asarray(x[:, 0]), lambda ids: ids),
    "packed": (jmask.packed, lambda ids: ids // (128 // D)),
}
# Transformations of no row by itself, and those that see whole lines, are no matter of places.
ROW_BY_ROW = ("per row", "rowwise", "norms", "averaged optax")
PARTS = optax.partition(
    {"rows": jmask.adam(0.1), "rest": optax.adam(0.1)}, {"table": "rows", "dense": "rest"}
)
TRANSFORMATIONS = OPTIMIZERS | {
    "adam, averaged": optax.chain(jmask.adam(0.1), jmask.ema(0.9)),
    "rmsprop, noted": optax.chain(OPTIMIZERS["optax.rmsprop"], jmask.touched()),
    "optimistic": jmask.lazy(optax.optimistic_gradient_descent(0.1)),
    "norms, bounded": jmask.lazy(optax.chain(optax.sgd(0.1), jmask.max_row_norm(0.7))),
    "in parts": PARTS,
    "in parts, if finite": jmask.skip_nonfinite(PARTS),
    "deferred": jmask.deferred(optax.adam(0.1)),
    "microbatches": None,  # made of the gradient
}
WAYS = {**STEPS, "optax": with_optax, "scan": jmask.apply_gradients}
WAYS["outside of jit"] = jmask.apply_gradients
MESHES = {(8,): ("x",), (2, 4): ("data", "table")}


@st.composite
def placements(draw):
    """Draw a program, and where its arrays lie."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    names = [x for x in TRANSFORMATIONS if kind != "packed" or not any(
        word in x for word in ROW_BY_ROW)]  # fmt: skip
    sizes = draw(st.sampled_from(sorted(MESHES)))
    axes = st.sampled_from([None, *MESHES[sizes]])
    rows, columns, of_ids = draw(axes), draw(axes), draw(axes)
    return {
        "kind": kind,
        "name": draw(st.sampled_from(names)),
        "way": draw(st.sampled_from(sorted(WAYS))),
        "mesh": (sizes, draw(st.sampled_from(["automatic", "explicit"]))),
        # An axis of the mesh spreads one dimension; what does not divide is not spread.
        "spec": (rows, columns if columns != rows else None),
        "of_ids": of_ids,
        "is_set": draw(st.booleans()),
        "of_no_mesh": draw(st.sampled_from([False, False, True])),  # parameters, not ids
        "has_few_rows": draw(st.booleans()),  # so that all of the table is updated
        "batches": draw(st.sampled_from([FEW, MANY])),
    }


def rows_looked_up(kind, table, ids, where):
    """The rows (n, D) of ids, at `where` if JAX asks for it."""
    if kind == "rows":
        return jmask.embedding_lookup(table, ids)
    if kind == "bags":
        return jmask.embedding_bag(table, jnp.stack([ids, ids[::-1]], 1))
    if kind == "beside shared":
        shared = jmask.embedding_lookup(table, SHARED)
        return jmask.embedding_lookup(table, ids) * jnp.sum(shared)
    if kind == "packed":
        return jmask.embedding_lookup(table, ids, width=D)
    found = table.at[KINDS[kind][1](ids)].get(out_sharding=where)
    return found[:, None] * jnp.ones((1, D)) if kind == "vector" else found


def trained(program, put=lambda x, *spec: jnp.asarray(x), spec=()):
    """Parameters, state and losses after three steps, and the table before."""
    kind, name, way, of_ids = (program[x] for x in ("kind", "name", "way", "of_ids"))
    on_mesh = (lambda x, *spec: jnp.asarray(x)) if program["of_no_mesh"] else put
    params = {
        "table": on_mesh(KINDS[kind][0](TABLE), *spec),
        "dense": on_mesh(np.linspace(-1, 1, D, dtype=np.float32)[None]),
    }
    table, batches = jnp.copy(params["table"]), put(program["batches"], None, of_ids)
    mesh = jax.typeof(batches).sharding.mesh
    where = NamedSharding(mesh, P(of_ids)) if mesh.explicit_axes else None

    def loss(params, ids):
        rows = rows_looked_up(kind, params["table"], ids, where)
        return jnp.mean(jnp.sin(rows * params["dense"]) ** 2)

    tx = TRANSFORMATIONS[name]
    if tx is None:
        like = jax.eval_shape(jmask.grad(loss), params, batches[0])
        tx = jmask.multi_steps(jmask.adam(0.1), 2, like=like)

    def step(carried, ids):
        params, state = carried
        if name == "deferred":
            params, state = tx.catch_up(params, state, {"table": KINDS[kind][1](ids)})
        value, gradient = jmask.value_and_grad(loss)(params, ids)
        return WAYS[way](tx, gradient, state, params), value

    carried = params, tx.init(params)
    if way == "scan":
        run = jax.jit(lambda *x: jax.lax.scan(step, *x), donate_argnums=0)
        (params, state), losses = run(carried, batches)
    else:
        run, losses = step if way == "outside of jit" else jax.jit(step, donate_argnums=0), []
        for ids in (put(ids, of_ids) for ids in program["batches"]):
            carried, value = run(carried, ids)
            losses.append(value)
        params, state = carried
    if name == "deferred":  # what waits differs: each shard sweeps some rows of its own
        params, state = tx.catch_up(params, state)
        state = state.inner
    return (params, state, losses), table


def placed(kind, spec, axes):
    """The axes that dimensions of a table are spread over, where JAX or jmask takes it so."""
    looked_up_by_jax = kind in ("indexed", "stack", "vector")
    if axes == "explicit" and (kind == "packed" or looked_up_by_jax):
        return ()
    return {"vector": spec[:1], "stack": (spec[0], None, spec[1])}.get(kind, spec)


def check(program):
    kind, (sizes, axes) = program["kind"], program["mesh"]
    mesh, spec = mesh_of(*sizes, axes=axes), placed(kind, program["spec"], axes)
    # JAX asks for the mesh outside of jit, and brings arrays of no mesh there by itself.
    is_eager, by_jax = (
        program["way"] == "outside of jit",
        kind in ("indexed", "stack", "vector"),
    )
    if program["of_no_mesh"] and (is_eager or kind not in ("rows", "bags", "beside shared")):
        program = program | {"of_no_mesh": False}
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    is_set = (program["is_set"] or (is_eager and by_jax)) and axes == "explicit"
    few = {"DENSE_ROWS_FOR_EACH_LOOKUP": 1000 if program["has_few_rows"] else 0}
    few["EXCHANGED_IDS"] = 1024
    in_mesh = jax.set_mesh(mesh) if is_set else contextlib.nullcontext()
    with in_mesh, mock.patch.multiple(tuning, **few):
        found, table = trained(program, put, spec)
    expected, _ = trained(program | {"of_no_mesh": True})
    assert_close(found, expected, rtol=2e-4, atol=2e-5)
    new = found[0]["table"]
    if program["name"] != "deferred":
        ids = program["batches"]
        touched = KINDS["stack"][1](ids) if kind == "stack" else divmod(ids, V // 8)
        others = np.ones((8, V // 8), bool)
        others[touched] = False
        old, new_rows = (np.asarray(x).reshape(*others.shape, -1)[others] for x in (table, new))
        np.testing.assert_array_equal(bits(new_rows), bits(old))
    if axes == "explicit" and not program["of_no_mesh"]:
        assert jax.typeof(new) == jax.typeof(table)


@pytest.mark.dtype_promotion
@few_or_many(6, 60)
def test_random_placements(count):
    settings(max_examples=count)(given(placements())(check))()


PLAIN = {
    "kind": "rows",
    "name": "adam",
    "way": "update",
    "mesh": ((8,), "explicit"),
    "spec": (None, None),
    "of_ids": "x",
    "is_set": False,
    "of_no_mesh": False,
    "has_few_rows": False,
    "batches": FEW,
}
COLUMNS = {"way": "apply_gradients", "spec": (None, "x")}
FOUND = {
    "microbatches outside of jit": {
        "name": "microbatches",
        "way": "outside of jit",
        "spec": ("x", None),
    },
    "lines on every device": {"kind": "packed"},
    "deferred columns": {"name": "deferred", "spec": (None, "x")},
    "ids that lie elsewhere": {"kind": "beside shared", "spec": ("x", None)},
    "rows to catch up that lie elsewhere": {"kind": "beside shared", "name": "deferred"},
    "norms of columns": {
        "name": "norms, bounded",
        "way": "apply_gradients",
        "spec": (None, "x"),
    },
    "counts of columns": {
        "name": "adam per row",
        "way": "apply_gradients",
        "spec": (None, "x"),
    },
    "few rows of no mesh": {"way": "apply_gradients", "of_no_mesh": True, "has_few_rows": True},
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.dtype_promotion
def test_what_was_refused(name):
    check(PLAIN | FOUND[name])


# --- gradients that lie elsewhere than their tables -----------------------------------------

IDS, ROWS = np.array([3, 9, 3, 77], "i4"), TABLE[:4] - 1
PLACES = np.argwhere(TABLE > 1.5)
# Made of functions that put arrays (n, ...) on a mesh, spread by rows or not.
GRADIENTS = {
    "rows": lambda put: jmask.RowSparse(put(IDS), put(ROWS), TABLE.shape),
    "masked": lambda put: jmask.masked_tensor(put(TABLE), put(TABLE > 0)),
    "entries": lambda put: BCOO(
        (put(TABLE[tuple(PLACES.T)]), put(PLACES)), shape=TABLE.shape, unique_indices=True
    ),
}


def stepped(tx, way, table, gradient):
    tx = jmask.multi_steps(jmask.adam(0.1), 2, like=gradient) if tx is None else tx
    run, state = jax.jit(functools.partial(WAYS[way], tx)), tx.init(table)
    for _ in range(2):
        table, state = run(gradient, state, table)
    return table, state


@st.composite
def elsewhere(draw):
    names = set(TRANSFORMATIONS) - {"deferred", "in parts", "in parts, if finite"}
    axis = st.sampled_from([None, "data", "table"])
    rows, columns = draw(axis), draw(axis)
    spec = rows, columns if columns != rows else None
    ways, kinds = st.sampled_from(sorted(STEPS)), st.sampled_from(sorted(GRADIENTS))
    return draw(st.sampled_from(sorted(names))), draw(ways), draw(kinds), spec, draw(axis)


def check_elsewhere(case):
    name, way, kind, spec, axis = case
    mesh = mesh_of(2, 4, axes="explicit")
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    by_rows = lambda x: put(x, axis if len(x) % mesh.shape.get(axis, 1) == 0 else None)
    # JAX adds no arrays that lie in different places, and optax selects from none.
    if kind == "masked" and (axis is not None or "optimistic" in name):
        by_rows = lambda x: put(x, *spec)
    expected = stepped(TRANSFORMATIONS[name], way, TABLE, GRADIENTS[kind](jnp.asarray))
    with jax.set_mesh(mesh):
        gradient = GRADIENTS[kind](by_rows)
        found = stepped(TRANSFORMATIONS[name], way, put(TABLE, *spec), gradient)
    assert_close(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.dtype_promotion
@few_or_many(6, 60)
def test_gradients_that_lie_elsewhere(count):
    settings(max_examples=count)(given(elsewhere())(check_elsewhere))()


@pytest.mark.parametrize("kind", ["masked", "entries"])
@pytest.mark.parametrize("name", ["adam", "adam unless not finite", "microbatches"])
def test_masks_that_lie_elsewhere(name, kind):
    check_elsewhere((name, "update", kind, ("data", "table"), None))


@pytest.mark.parametrize("spec", [("x",), (None, "x")], ids=str)
def test_lines_are_on_every_device(spec):
    put = lambda x: jax.device_put(x, NamedSharding(mesh_of(8, axes="explicit"), P(*spec)))
    with pytest.raises(ValueError, match="lines hold several rows: leave it"):
        jmask.packed(put(TABLE))
    lines = put(jmask.packed(np.tile(TABLE, (2, 1))))
    with pytest.raises(ValueError, match=r"lines hold several rows: shard the table itself"):
        jmask.embedding_lookup(lines, [1], width=D)
