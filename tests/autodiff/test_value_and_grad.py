"""`value_and_grad` equals `jax.value_and_grad`, made dense, on every kind of program."""

import contextlib
import warnings

import jax
import numpy as np
import pytest

import jmask
from jmask._base.forms import within
from tests.compilations import no_tracer_is_kept
from tests.lookup_programs import FEATURES, IDS, PROGRAMS, TABLE, D, V, square
from tests.oracle import assert_close, densified, is_row_sparse, touched_rows

pytestmark = pytest.mark.sampled


@contextlib.contextmanager
def expecting_fallback(expected):
    """Fallback warnings occur exactly if expected."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    fallbacks = [w for w in caught if w.category is jmask.StorageFallbackWarning]
    assert bool(fallbacks) == expected, [str(w.message) for w in caught]
    assert len(fallbacks) == len(caught)


def check(loss, *args, falls_back=False):
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
        if name.startswith("sparse features"):
            assert touched_rows(gradient).tolist() == np.flatnonzero(FEATURES.any(0)).tolist()


# One for each rule that traces a program inside the program.
TRACING = ("cond", "cond, one branch without", "switch", "cond in scan, rows", "scan")


@pytest.mark.parametrize("name", [*TRACING, "checkpoint", "cond in scan"])
def test_no_tracer_is_kept(name):
    """`jax_check_tracer_leaks` refuses what a trace leaves behind."""
    with no_tracer_is_kept():
        for wrap in (lambda f: f, jax.jit):
            gradient = wrap(jmask.grad(PROGRAMS[name].loss))(TABLE)
    expected = jax.grad(PROGRAMS[name].loss)(TABLE)
    assert_close(densified(gradient), expected, rtol=2e-5, atol=2e-6)


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


def test_python_scalar_parameter():
    value, gradient = jmask.value_and_grad(lambda x, t: x * square(t[IDS]))(2.0, TABLE)
    assert gradient == pytest.approx(value / 2)


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
    loss = jax.checkpoint(lambda t: square(t[IDS]))
    assert "optimization_barrier" in jax.jit(jmask.grad(loss)).lower(TABLE).as_text()
