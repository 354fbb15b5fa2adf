"""`value_and_grad` equals `jax.value_and_grad`, made dense, on every kind of program."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.sparse import BCOO, BCSR
from jax.extend.core import jaxprs_in_params

import jmask
from tests.oracle import assert_close, densified, is_row_sparse

V, D = 10, 4
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
IDS = jnp.array([1, 2, 1, -3, 15, -40])  # duplicates, wrapping and out-of-range ids
VALID = jnp.array([1, 2, 1])
ENTRIES = ([0, 0, 1, 2, 2, 2], [1, 7, 1, 0, 9, 3])
FEATURES = np.zeros((3, V), np.float32)
FEATURES[ENTRIES] = np.arange(1.0, 7)
COO, CSR = BCOO.fromdense(FEATURES), BCSR.fromdense(FEATURES)
PADDED, TRANSPOSED = BCOO.fromdense(FEATURES, nse=9), BCOO.fromdense(FEATURES.T)


class Program(NamedTuple):
    """A loss of one table; `nse` is the capacity expected, None for a dense gradient."""

    loss: Callable[[jax.Array], jax.Array]
    nse: int | None
    falls_back: bool = False


def square(x):
    return jnp.sum(jnp.sin(x) ** 2)


def rnn(table, ids=VALID, wrap=lambda f: f):
    @wrap
    def cell(hidden, i):
        hidden = jnp.tanh(hidden + table[i])
        return hidden, hidden.sum()

    return lax.scan(cell, jnp.zeros(D), ids)[1].sum()


def double_rows(table, ids):
    return 2 * table[ids]


@jax.custom_vjp
def custom_lookup(table, ids):
    return table[ids]


custom_lookup.defvjp(
    lambda table, ids: (table[ids], (table, ids)),
    lambda saved, ct: (jnp.zeros_like(saved[0]).at[saved[1]].add(2 * ct), None),
)


@jax.custom_jvp
def custom_square(x):
    return x * x


custom_square.defjvp(lambda x, t: (x[0] * x[0], 3 * x[0] * t[0]))


def take(mode):
    def loss(table):
        rows = jnp.take(table, IDS, axis=0, mode=mode)
        return square(jnp.where(jnp.isnan(rows), 0, rows))

    return Program(loss, 6)


PROGRAMS: dict[str, Program] = {
    "index": Program(lambda t: square(t[IDS]), 6),
    "index, 2-D ids": Program(lambda t: square(t[IDS.reshape(2, 3)]), 6),
    "index, narrow ids": Program(lambda t: square(t[VALID.astype(jnp.int8)]), 3),
    "index, unsigned ids": Program(lambda t: square(t[VALID.astype(jnp.uint32)]), 3),
    "index, NumPy ids": Program(lambda t: square(t[np.array([1, 2, 1])]), 3),
    # jax.numpy drops a lookup of nothing, so to JAX the table is not used at all.
    "index, no ids": Program(lambda t: square(t[IDS[:0]]), None),
    "index with slice": Program(lambda t: square(t[IDS, :]), 6),
    "take, default": take(None),
    "take, clip": take("clip"),
    "take, wrap": take("wrap"),
    "take, fill": take("fill"),
    "at.get, clip": Program(lambda t: square(t.at[IDS].get(mode="clip")), 6),
    "at.get, fill": Program(lambda t: square(t.at[IDS].get(mode="fill", fill_value=0)), 6),
    "at.get, drop": Program(lambda t: square(t.at[IDS].get(mode="promise_in_bounds")), 6),
    "scalar": Program(lambda t: square(t[IDS[0]]), 1),
    "scalar, out of range": Program(lambda t: square(t[IDS[4]]), 1),
    "dynamic_slice": Program(lambda t: square(lax.dynamic_slice_in_dim(t, IDS[4], 3)), 3),
    "vmapped dynamic_slice": Program(
        lambda t: square(jax.vmap(lambda i: lax.dynamic_slice_in_dim(t, i, 3))(IDS)), 18
    ),
    "vmapped scalar": Program(lambda t: square(jax.vmap(lambda i: t[i])(IDS)), 6),
    "vmapped index": Program(lambda t: square(jax.vmap(lambda i: t[i])(IDS.reshape(2, 3))), 6),
    "vmapped twice": Program(
        lambda t: square(jax.vmap(jax.vmap(lambda i: t[i]))(IDS.reshape(2, 3))), 6
    ),
    "two lookups": Program(lambda t: square(t[IDS] * t[IDS[::-1]]), 12),
    "lookup and slice": Program(lambda t: square(t[IDS]) + square(t[2:4]), 8),
    "slice alone": Program(lambda t: square(t[2:4]) + square(t[0]), None),
    "row of the result": Program(lambda t: square(t[IDS][0]), 6),
    "masked rows": Program(lambda t: square(jnp.where((IDS > 1)[:, None], t[IDS], 0)), 6),
    "scaled table": Program(lambda t: square((3.0 * t * VALID[1])[IDS] / 2), 6),
    "negated table": Program(lambda t: square((1 - t - 1)[IDS]), 6),
    "converted table": Program(
        lambda t: jnp.sum(t.astype(jnp.bfloat16)[VALID].astype(jnp.float32)), 3
    ),
    "reshaped table": Program(lambda t: square(t.reshape(V, 2, 2)[IDS]), 6),
    "expanded table": Program(lambda t: square(t[:, None, :][IDS]), 6),
    "jit": Program(jax.jit(lambda t: square(t[IDS])), 6),
    "jit in jit": Program(jax.jit(lambda t: square(jax.jit(double_rows)(t, IDS))), 6),
    "checkpoint": Program(jax.checkpoint(lambda t: square(t[IDS])), 6),
    "checkpoint of jit": Program(jax.checkpoint(jax.jit(lambda t: square(t[IDS]))), 6),
    "scan": Program(rnn, 3),
    "scan of checkpoint": Program(lambda t: rnn(t, wrap=jax.checkpoint), 3),
    "checkpoint of scan": Program(jax.checkpoint(rnn), 3),
    "scan in scan": Program(
        lambda t: lax.scan(lambda c, i: (c + rnn(t + 0), i), 0.0, VALID)[0], 9
    ),
    "reverse unrolled scan": Program(
        lambda t: square(
            lax.scan(
                lambda c, i: (jnp.cos(c + t[i]), c),
                t[0] * 0,
                VALID,
                reverse=True,
                unroll=2,
            )[1]
        ),
        4,
    ),
    "lookup before and in scan": Program(lambda t: rnn(t) + square(t[IDS]), 9),
    "fori_loop": Program(
        lambda t: square(lax.fori_loop(0, 3, lambda k, c: c * t[VALID[k]], jnp.ones(D))),
        3,
    ),
    "cond": Program(
        lambda t: lax.cond(IDS[0] > 0, lambda t: square(t[IDS]), lambda t: t[IDS[:2]].sum(), t),
        6,
    ),
    "cond, other branch": Program(
        lambda t: lax.cond(IDS[0] < 0, lambda t: square(t[IDS]), lambda t: t[IDS[:2]].sum(), t),
        6,
    ),
    "cond, one branch without": Program(
        lambda t: lax.cond(IDS[0] < 0, lambda t: square(t[IDS]), lambda t: 1.0, t), 6
    ),
    "switch": Program(
        lambda t: lax.switch(
            VALID[1], [lambda t, n=n: square(t[IDS[:n]]) for n in (1, 2, 4)], t
        ),
        4,
    ),
    "scan in cond": Program(
        lambda t: lax.cond(IDS[0] > 0, rnn, lambda t: square(t[IDS]), t), 6
    ),
    "cond in scan": Program(
        lambda t: lax.scan(
            lambda c, i: (
                lax.cond(i > 1, lambda: c + square(t[i]), lambda: c * t[0, 0]),
                None,
            ),
            1.0,
            VALID,
        )[0],
        None,
        falls_back=True,
    ),
    "cond in scan, rows": Program(
        lambda t: lax.scan(
            lambda c, i: (lax.cond(i > 1, lambda: c + square(t[i]), lambda: c), None),
            1.0,
            VALID,
        )[0],
        3,
    ),
    "sparse features, coo": Program(lambda t: square(COO @ t), 6),
    "sparse features, padded": Program(lambda t: square(PADDED @ t), 9),
    "sparse features, csr": Program(lambda t: square(CSR @ t), 6),
    "sparse features, a column": Program(lambda t: square(COO @ t[:, 0]), None),
    "sparse features, transposed": Program(lambda t: square(TRANSPOSED.T @ t), 6),
    "custom_vjp": Program(lambda t: square(custom_lookup(t, VALID)), 3),
    "custom_jvp": Program(lambda t: jnp.sum(custom_square(t[IDS])), 6),
    "relu and softmax": Program(
        lambda t: square(jax.nn.relu(t[IDS])) + square(jax.nn.softmax(t[IDS])), 12
    ),
    "grad inside": Program(lambda t: square(jax.grad(lambda x: square(x))(t[IDS])), 6),
    "second order": Program(
        lambda t: square(jax.grad(lambda t: square(t[VALID]))(t)[VALID]), 3
    ),
    "tied": Program(lambda t: square(t[IDS] @ t.T), None, falls_back=True),
    "tied in scan": Program(
        lambda t: square(
            lax.scan(lambda c, i: (jnp.tanh(t[i] + t.T @ (t @ c)), None), jnp.zeros(D), VALID)[
                0
            ]
        ),
        None,
        falls_back=True,
    ),
    "penalised": Program(lambda t: square(t[IDS]) + jnp.sum(t**2), None, falls_back=True),
    "scaled by a dense array": Program(
        lambda t: square((t * jnp.arange(V)[:, None])[IDS]), None
    ),
    "transposed lookup": Program(lambda t: square(t.T[:, IDS]), None),
    "columns": Program(lambda t: square(t[:, VALID]), None),
    "entries": Program(lambda t: square(t[VALID, VALID]), None),
    "carried through scan": Program(
        lambda t: lax.scan(
            lambda c, i: ((c[0] + square(c[1][i]), c[1]), None), (0.0, t), VALID
        )[0][0],
        3,
    ),
    "changed in scan": Program(
        lambda t: lax.scan(
            lambda c, i: ((c[0] + square(c[1][i]), 2 * c[1]), None), (0.0, t), VALID
        )[0][0],
        None,
        falls_back=True,
    ),
    "dense only": Program(lambda t: square(t), None),
    "dense only, in scan": Program(
        lambda t: lax.scan(lambda c, i: (c * square(t), None), 1.0, VALID)[0], None
    ),
    "unused": Program(lambda t: square(IDS * 1.0), None),
    "scatter of the model": Program(
        lambda t: square(t * jnp.zeros((V, D)).at[VALID].add(jnp.ones((3, D)))), None
    ),
}


@contextlib.contextmanager
def expecting_fallback(expected: bool):
    """Fallback warnings occur exactly if expected."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    fallbacks = [w for w in caught if w.category is jmask.StorageFallbackWarning]
    assert bool(fallbacks) == expected, [str(w.message) for w in caught]
    assert len(fallbacks) == len(caught)


def check(loss: Callable[..., Any], *args: Any, falls_back: bool = False) -> Any:
    """Compare with JAX, eagerly and jitted; returns the gradient."""
    expected = jax.value_and_grad(loss)(*args)
    for wrap in (lambda f: f, jax.jit):
        with expecting_fallback(falls_back):
            result = wrap(jmask.value_and_grad(loss))(*args)
        assert_close(densified(result), expected, rtol=2e-5, atol=2e-6)
    return result[1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    program = PROGRAMS[name]
    gradient = check(program.loss, TABLE, falls_back=program.falls_back)
    if program.nse is None:
        assert isinstance(gradient, jax.Array)
    else:
        assert gradient.nse == program.nse
        gradient.validate()


def test_one_dimensional_and_wide_tables():
    for table in (TABLE[:, 0], TABLE.reshape(V, 2, 2)):
        for loss in (
            lambda t: square(t[IDS]),
            lambda t: square(t[IDS[0]]),
            lambda t: square(jax.vmap(lambda i: t[i])(IDS)),
        ):
            assert is_row_sparse(check(loss, table))


def test_several_tables_in_a_tree():
    params = {
        "user": TABLE,
        "item": [TABLE * 2, TABLE[:5]],
        "dense": {"w": TABLE[:D], "b": jnp.float32(0.5)},
    }

    def loss(params):
        rows = params["user"][IDS] * params["item"][0][IDS] + params["item"][1][IDS % 5]
        return square(rows @ params["dense"]["w"] + params["dense"]["b"])

    gradient = check(loss, params)
    kinds = jax.tree.map(is_row_sparse, gradient, is_leaf=is_row_sparse)
    assert kinds == {
        "user": True,
        "item": [True, True],
        "dense": {"w": False, "b": False},
    }


def test_same_table_twice_in_a_tree():
    check(lambda p: square(p[0][IDS] * p[1][IDS]), (TABLE, TABLE))


@pytest.mark.parametrize("argnums", [0, 2, -1, (0,), (2, 0), (0, 1, 2)])
def test_argnums(argnums):
    def loss(t, w, u, *, ids):
        return square(t[ids] @ w) + square(u[ids])

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


def test_other_arguments_may_be_anything():
    def loss(t, config, ids, train=False):
        assert train is True
        return square(config["activation"](t[ids]))

    config = {"activation": jnp.tanh, "name": "x"}
    gradient = jmask.grad(loss)(TABLE, config, np.array([1, 2]), train=True)
    assert gradient.nse == 2


def test_python_scalar_parameter():
    value, gradient = jmask.value_and_grad(lambda x, t: x * square(t[IDS]))(2.0, TABLE)
    assert gradient == pytest.approx(value / 2)


def test_under_vmap_of_the_whole():
    """Per-example gradients: a batch of row-sparse ones."""

    def gradient(i):
        return jmask.grad(lambda t: square(t[i]))(TABLE)

    batch = jax.vmap(gradient)(VALID)
    dense = jax.vmap(lambda g: g.todense())(batch)
    expected = jax.vmap(lambda i: jax.grad(lambda t: square(t[i]))(TABLE))(VALID)
    np.testing.assert_allclose(dense, expected, rtol=1e-6)


def equations(jaxpr):
    """All equations of a program, those of inner programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def table_makers(program) -> set[str]:
    """The primitives that make an array of the table's shape."""
    return {
        eqn.primitive.name
        for eqn in equations(program.jaxpr)
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
    loss = jax.checkpoint(lambda t: square(t[IDS]))
    assert "optimization_barrier" in jax.jit(jmask.grad(loss)).lower(TABLE).as_text()


class TestFallback:
    def test_warning_names_shape_and_line(self):
        with pytest.warns(jmask.StorageFallbackWarning, match=r"float32\[10, 4\]") as seen:
            jmask.grad(PROGRAMS["tied"].loss)(TABLE)
        assert seen[0].filename == __file__

    def test_once_per_place(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                jmask.grad(lambda t: square(t[IDS] @ t.T))(TABLE)
        assert len(caught) == 1

    def test_strict_raises(self):
        with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match="table"):
            jmask.grad(PROGRAMS["tied"].loss)(TABLE)
        with jmask.strict():
            jmask.grad(PROGRAMS["index"].loss)(TABLE)
            jmask.grad(PROGRAMS["dense only"].loss)(TABLE)


class TestBadInput:
    def test_sparse_parameter(self):
        x = jmask.RowSparse([1], jnp.ones((1, 2)), (3, 2))
        with pytest.raises(TypeError, match="argument 1 holds a RowSparse"):
            jmask.grad(lambda a, x: x.todense().sum(), argnums=1)(1.0, {"t": x})

    def test_argnums(self):
        with pytest.raises(ValueError, match="`argnums` names argument 2"):
            jmask.grad(square, argnums=2)(TABLE)
        with pytest.raises(TypeError, match="`argnums` must be integers"):
            jmask.grad(square, argnums="t")(TABLE)

    def test_what_jax_refuses(self):
        with pytest.raises(TypeError, match="requires real- or complex-valued"):
            jmask.grad(square)(IDS)
        with pytest.raises(TypeError, match="scalar-output"):
            jmask.grad(lambda t: t[IDS])(TABLE)
