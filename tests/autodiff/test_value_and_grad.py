"""`value_and_grad` equals `jax.value_and_grad`, made dense, on every kind of program.

The programs are those of `tests.lookup_programs`: each is run eagerly and under jit, inside of
other transformations, and differentiated again.
"""

import contextlib
import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental.sparse import BCOO
from jax.sharding import PartitionSpec as P

import jmask
from jmask._base.forms import within
from jmask._kernels import tuning
from tests.compilations import no_tracer_is_kept
from tests.expressions import functions
from tests.lookup_programs import (
    BAG_SUMS,
    BAGS,
    BATCH,
    FEATURES,
    IDS,
    MANY_ROWS,
    NARROW,
    PROGRAMS,
    STACKED,
    STACKS,
    SUMMED,
    TABLE,
    D,
    V,
    square,
)
from tests.oracle import assert_close, densified, is_row_sparse, touched_rows

pytestmark = pytest.mark.sampled

# A loss, its table, and a batch if it takes one.
STACKS_OF = {
    f"{name}, {stack.shape}": (loss, stack, BATCH)
    for stack in STACKS
    for name, loss in STACKED.items()
}
SUMS = {name: (loss, MANY_ROWS, BAGS) for name, loss in SUMMED.items()}
CASES = {name: (x.loss, TABLE) for name, x in PROGRAMS.items()}
_BY_HAND = ("where(t[x.ids], x).sum(1)", "helper(t, x.ids, x.wild)")
CASES |= {name: SUMS[name] for name in (*BAG_SUMS, *_BY_HAND)}
# Of these, 16 bits are rounded in another order.
ROUNDED = ("cast", "converted table", "bfloat16")


def tolerance_of(name):
    return 1e-2 if any(word in name for word in ROUNDED) else 2e-5


@contextlib.contextmanager
def expecting_fallback(expected):
    """Fallback warnings occur exactly if expected."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    fallbacks = [w for w in caught if w.category is jmask.StorageFallbackWarning]
    assert bool(fallbacks) == expected, [str(w.message) for w in caught]
    assert len(fallbacks) == len(caught)


def check(loss, *args, falls_back=False, rtol=2e-5):
    """Compare with JAX, eagerly and jitted; returns the gradient."""
    expected = jax.jit(jax.value_and_grad(loss))(*args)
    close = {"rtol": rtol, "atol": rtol / 10}
    for wrap in (lambda f: f, jax.jit):
        with expecting_fallback(falls_back):
            value, gradient = wrap(jmask.value_and_grad(loss))(*args)
        assert_close((value, densified(gradient)), expected, **close)
        if is_row_sparse(gradient):
            gradient.validate()
            assert gradient.dtype == args[0].dtype
            for dense in (gradient, gradient.coalesce(), gradient.flat()):
                found = dense.todense().reshape(gradient.shape)
                np.testing.assert_allclose(found, expected[1], **close)
    return gradient


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    program = PROGRAMS[name]
    gradient = check(
        program.loss, TABLE, falls_back=program.falls_back, rtol=tolerance_of(name)
    )
    assert (gradient.nse if is_row_sparse(gradient) else None) == program.nse
    if name.startswith("sparse features"):
        assert touched_rows(gradient).tolist() == np.flatnonzero(FEATURES.any(0)).tolist()


@pytest.mark.parametrize("name", STACKS_OF)
def test_stacks_of_tables(name):
    assert is_row_sparse(check(*STACKS_OF[name], rtol=tolerance_of(name)))


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_rows(name, monkeypatch):
    """Where rows are few and where they are many: eagerly and jitted, alone and as an array."""
    for few in (0, tuning.SMALL_ROWS):
        monkeypatch.setattr(tuning, "SMALL_ROWS", few)
        loss, *args = SUMS[name]
        if name not in NARROW:
            assert is_row_sparse(check(loss, *args, rtol=tolerance_of(name)))
        # In one program the sums are what is known of the rows, which are not made.
        dense = jax.jit(lambda *args, loss=loss: jmask.grad(loss)(*args).todense())
        expected = jax.jit(jax.grad(loss))(*args)
        np.testing.assert_allclose(dense(*args), expected, rtol=2e-2, atol=2e-3)


# --- inside of other programs -------------------------------------------------------------

# JAX maps no reference in a `cond`, and no primitive that a test defines.
NOT_MAPPED = ("reference in jit and cond", "branches by platform")
MAPPED = {name: case for name, case in CASES.items() if name not in NOT_MAPPED}
MAPPED |= {name: case for name, case in STACKS_OF.items() if case[1] is STACKS[-1]}


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("name", MAPPED)
def test_inside_other_programs(name, monkeypatch):
    """Under vmap, in a scan and in a cond: gradients of one table, and of two."""
    monkeypatch.setattr(tuning, "SMALL_ROWS", 0)
    loss, table, *batch = MAPPED[name]
    tables = jnp.stack([table, 2 * table])
    grad = lambda t: jmask.grad(loss)(t, *batch)

    @jax.jit
    def run(tables, on):
        mapped = jax.vmap(grad)(tables)
        _, scanned = jax.lax.scan(lambda c, t: (c, grad(t)), 0, tables)
        branches = lambda t: jax.lax.cond(on, lambda t: loss(t, *batch), lambda t: t.sum(), t)
        merged = [jmask.todense(jmask.tree.merge(x)) for x in (mapped, scanned)]
        second = jax.tree.map(lambda leaf: leaf[1], mapped)
        return merged, jmask.todense(second), jmask.todense(jmask.grad(branches)(tables[0]))

    expected = jax.jit(jax.vmap(lambda t: jax.grad(loss)(t, *batch)))(tables)
    both, second, branch = run(tables, True)
    rtol = tolerance_of(name)
    close = {"rtol": rtol, "atol": rtol}
    for x in both:
        np.testing.assert_allclose(x, expected.sum(0), **close)
    np.testing.assert_allclose(second, expected[1], **close)
    np.testing.assert_allclose(branch, expected[0], **close)


# Programs that read an id which is out of range in the value and in its derivative. JAX, to
# which ids are promised to be in range, clamps it forwards and drops it backwards; here the
# second derivative adds to the row that was read.
OUT_OF_RANGE_TWICE = ("two lookups", "t[x.beyond].sum(1)")


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("name", [name for name in CASES if name not in OUT_OF_RANGE_TWICE])
def test_second_derivatives(name, monkeypatch):
    """Reverse and forward, through a gradient by rows."""
    monkeypatch.setattr(tuning, "SMALL_ROWS", 0)
    loss, table, *batch = CASES[name]
    along = jnp.cos(table)

    def both(grad):
        dense = lambda t: jmask.todense(grad(loss)(t, *batch))
        of_sum = jax.grad(lambda t: jnp.sum(dense(t) * along))
        return jax.jit(lambda t: (of_sum(t), jax.jvp(dense, (t,), (along,))[1]))(table)

    # A cast back is one of a row here, and of each of its copies there.
    rtol = 5 * tolerance_of(name)
    assert_close(both(jmask.grad), both(jax.grad), rtol=rtol, atol=rtol)


# One for each rule that traces a program inside the program, and what falls back.
TRACING = ("cond", "cond, one branch without", "switch", "cond in scan, rows", "scan")
TRACING += ("checkpoint", "cond in scan", "checkpoint of scan", "tied", "penalised")


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("name", [*TRACING, *BAG_SUMS, *_BY_HAND])
def test_nothing_is_kept_of_a_call(name, monkeypatch):
    """No tracer, and no array or trace that lives longer than the gradient."""
    monkeypatch.setattr(tuning, "SMALL_ROWS", 0)
    loss, table, *batch = CASES[name]
    with no_tracer_is_kept():
        for wrap in (lambda f: f, jax.jit):
            copied = table + 0
            gradient = wrap(jmask.grad(loss))(copied, *batch)
            assert_close(densified(gradient), jax.grad(loss)(table, *batch), rtol=2e-5)
            alive = weakref.ref(copied)
            del gradient, copied
            gc.collect()
            assert alive() is None


# Of a table that all devices have: rows that each reads by itself, and rows that all read.
ON_DEVICES = functions("t, ids", globals())("""
    psum(jnp.sin(t[ids] * t[:2])); psum(jnp.sin(t[ids])) + jnp.sum(t[ALL] ** 2);
    psum(lax.scan(lambda c, i: (jnp.cos(c + t[i]), c), t[0], ALL[:2])[1] * t[ids]);
    psum(lax.cond(t[0, 0] > 0, lambda: t[ids], lambda: jnp.sin(t[ALL[:2]]) + 0 * t[ids]));
    psum(jax.checkpoint(lambda t: jnp.sin(t[3:5] + t[ids]))(t)); jnp.sum(jnp.sin(t[ALL]));
    psum(jmask.embedding_bag(t, ids[:, None])) + jnp.sum(jmask.embedding_bag(t, ALL[None]));
    psum(jnp.sin((t @ jnp.ones((4, 3)))[ids]) + (t * jnp.arange(10.0)[:, None])[ids, :3])
""")
ALL = jnp.array([1, 2, 1])
psum = lambda x: lax.psum(jnp.sum(x), "x")


@pytest.mark.parametrize("name", ON_DEVICES)
def test_rows_that_all_devices_read(name):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    where = {"mesh": mesh, "in_specs": (P(), P("x")), "out_specs": P()}
    loss = jax.shard_map(ON_DEVICES[name], **where)
    in_rounds = lambda t, ids: lax.scan(lambda c, k: (c + loss(t, ids + k), k), 0.0, ALL)[0]
    for program in (loss, in_rounds):
        assert is_row_sparse(check(program, TABLE, jnp.array([1, 2, 4, 1])))


# --- arguments and results ----------------------------------------------------------------


@pytest.mark.parametrize("argnums", [0, 2, -1, (0,), (2, 0), (0, 1, 2)])
def test_argnums(argnums):
    loss = lambda t, w, u, *, ids: square(t[ids] @ w) + square(u[ids])
    args = (TABLE, TABLE[:D], 2 * TABLE)
    result = jmask.value_and_grad(loss, argnums=argnums)(*args, ids=IDS)
    expected = jax.value_and_grad(loss, argnums=argnums)(*args, ids=IDS)
    assert_close(densified(result), expected, rtol=2e-5, atol=2e-6)
    gradient = jmask.grad(loss, argnums)(*args, ids=IDS)
    assert_close(densified(gradient), expected[1], rtol=2e-5, atol=2e-6)


def test_aux_of_any_kind():
    def loss(t, ids, name):
        rows = t[ids]
        return square(rows), {"rows": rows, "name": name, "n": 3, "const": IDS, "x": None}

    (value, aux), gradient = jmask.value_and_grad(loss, has_aux=True)(TABLE, IDS, "a")
    (expected, other), _ = jax.value_and_grad(loss, has_aux=True)(TABLE, IDS, "a")
    assert value == expected
    assert (aux["name"], aux["n"], aux["x"]) == ("a", 3, None)
    np.testing.assert_array_equal(aux["rows"], other["rows"])
    assert is_row_sparse(gradient)
    gradient, aux = jmask.grad(loss, has_aux=True)(TABLE, IDS, name="b")
    assert is_row_sparse(gradient)
    assert aux["name"] == "b"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_parameters_that_are_no_tables(wrap):
    """Numbers, none at all, and beside a table functions and flags, which have no gradient."""
    value, gradient = wrap(jmask.value_and_grad(lambda x, t: x * square(t[IDS])))(2.0, TABLE)
    assert gradient == pytest.approx(value / 2)
    none = wrap(lambda x: jmask.value_and_grad(lambda p, x: jnp.sum(x))({}, x))
    assert none(jnp.ones(3)) == (3, {})
    params = {"table": TABLE, "act": jnp.tanh, "scale": 2.0, "train": True}
    grads = jmask.grad(lambda p: p["scale"] * jnp.sum(p["act"](p["table"][IDS])))(params)
    assert grads["act"] is grads["scale"] is grads["train"] is None
    expected = jax.grad(lambda t: 2 * jnp.sum(jnp.tanh(t[IDS])))(TABLE)
    np.testing.assert_allclose(grads["table"].todense(), expected, rtol=1e-5)


def test_a_dict_is_a_copy():
    """What a function puts into a dict is its own affair, as in JAX."""

    def loss(params):
        params["table"] = 2 * params["table"]
        return jnp.sum(params["table"][IDS])

    params = {"table": TABLE}
    assert is_row_sparse(jmask.grad(loss)(params)["table"])
    assert params["table"] is TABLE


def test_errors_of_users_are_left_alone():
    def loss(table):
        raise TypeError("ShapeDtypeStruct is what I expected")

    with pytest.raises(TypeError, match="is what I expected"):
        jmask.grad(loss)(TABLE)


def test_entries_of_a_sparse_tensor_that_are_not_stored_are_not_lost():
    """Behind a `cond` that rebuilds the tensor, or where the function raises once."""
    x = BCOO.fromdense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    weights, raised = jnp.array([[1.0, 2.0], [3.0, 4.0]]), []

    def raises_once(x):
        if not raised:
            raised.append(True)
            raise RuntimeError("once")
        return jnp.sum(jmask.todense(x) * weights)

    with pytest.raises(RuntimeError, match="once"):
        jmask.grad(raises_once)(x)
    np.testing.assert_array_equal(jmask.grad(raises_once)(x), weights)

    def rebuilt(x):
        is_so = {"indices_sorted": x.indices_sorted, "unique_indices": x.unique_indices}
        other = lambda x: BCOO((x.data * 1, x.indices), shape=x.shape, **is_so)
        x = jax.lax.cond(x.data[0] > 0, lambda x: x, other, x)
        return jnp.sum(jmask.todense(x) * weights)

    with pytest.raises(TypeError, match="masked_grad=True"):
        jmask.grad(rebuilt)(x)


@pytest.mark.parametrize("bits", [32, 64])
def test_entries_of_more_rows_than_ids_number(bits, monkeypatch):
    """Where 32 bits do not number all entries, single entries are numbered by two ids."""
    grad = jmask.grad(lambda t, i: t[i, i % 64].sum())
    shape = jax.ShapeDtypeStruct((50_000_000, 64), "float32")
    gradient = jax.eval_shape(grad, shape, jax.ShapeDtypeStruct((5,), "int32"))
    assert (gradient.nse, gradient.leading) == (5, 1)
    monkeypatch.setattr("jmask._autodiff.views.most_rows", lambda: 12)
    ids = jnp.array([3, 1, 3, 7])
    with jax.enable_x64(bits == 64):
        table = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)))
        loss = lambda t: (
            jnp.sum(jnp.sin(t[ids, ids % 4]))
            + square(jnp.exp(t)[ids, 1])
            + square(jnp.pad(t, ((1, 2), (0, 1)))[ids])
        )
        assert check(loss, table).leading == 1


# --- what is made of the table ------------------------------------------------------------


def table_makers(program):
    """The primitives that make an array of the table's shape."""
    return {
        eqn.primitive.name
        for eqn in within(program.eqns)
        if any(v.aval.shape == (V, D) for v in eqn.outvars)
    }


@pytest.mark.parametrize(
    "name", ["index", "jit", "scan", "cond", "checkpoint", "vmapped scalar", "take, fill"]
)
def test_no_array_of_the_table_is_made(name):
    """Nor is one carried through a scan, whose outputs its carries are."""
    program = jax.make_jaxpr(jmask.grad(PROGRAMS[name].loss))(TABLE)
    # The barrier around what `jax.checkpoint` computes again passes the table through.
    assert table_makers(program) <= {"optimization_barrier"}
    stock = jax.make_jaxpr(jax.grad(PROGRAMS[name].loss))(TABLE)
    assert table_makers(stock) - {"optimization_barrier"}, "the check sees what it forbids"


def test_remat_still_recomputes():
    """The barrier that keeps XLA from undoing `jax.checkpoint` is still in the program."""
    grad = jax.jit(jmask.grad(PROGRAMS["checkpoint"].loss))
    assert "optimization_barrier" in grad.lower(TABLE).as_text()


def test_a_loop_over_rows_of_a_cast_table_does_not_make_it():
    def loss(table, ids):
        cell = lambda c, i: (jnp.tanh(c + table.astype(jnp.bfloat16)[i]), None)
        return jax.lax.scan(cell, jnp.zeros(64, "bfloat16"), ids)[0].sum().astype("float32")

    shapes = [jax.ShapeDtypeStruct(*x) for x in (((50_000, 64), "float32"), ((8,), "int32"))]
    step = jax.jit(lambda *x: jmask.grad(loss)(*x).values)
    memory = step.lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 50_000 * 64


ANY_SIZE = functions("t, ids", globals())("""
    t[ids]; jnp.sin(t)[ids]; t[ids, ids % 2]; jmask.embedding_bag(t, ids[:, None]);
    lax.scan(lambda c, i: (c, t[i]), 0.0, ids)[1]; lax.map(lambda i: jnp.sin(t)[i], ids);
    lax.cond(ids[0] > 2, lambda: jnp.sum(t[ids]), lambda: jnp.sum(t[ids[:1]]));
    lax.cond(ids[0] < 2, lambda: t[ids], lambda: 2 * t[ids]);
    jnp.sum(t[: ids.shape[0]]) + t[ids];
    t[ids] + lax.map(jnp.sin, jnp.broadcast_to(t[3], (ids.shape[0], 2)))
""")


@pytest.mark.parametrize("name", ANY_SIZE)
def test_batch_of_any_size(name):
    """`jax.export` writes a gradient down before the size of a batch is known."""
    look = ANY_SIZE[name]
    gradient = jax.jit(
        lambda t, ids: jmask.todense(jmask.grad(lambda t: jnp.sum(look(t, ids) ** 2))(t))
    )
    table, ids = jnp.arange(14.0).reshape(7, 2) / 5, jnp.array([1, 3, 3])
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b"), ids.dtype)
    program = export.export(gradient)(table, shape)
    np.testing.assert_allclose(program.call(table, ids), gradient(table, ids), rtol=1e-6)
