"""`jmask.apply_gradients` of a lifted optax optimizer is `update` and `apply_updates`.

Where the optimizer is elementwise it is done by one scatter with the optimizer inside, or on
whole tables where a batch touches most rows.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.compiled_step import temporary_bytes
from tests.expressions import functions, named
from tests.optax_cases import ROW_LOCAL
from tests.oracle import assert_close
from tests.stored_tables import of_lines, unpacked, update_and_apply

pytestmark = pytest.mark.dtype_promotion

ROOT = Path(__file__).parents[2]
# The shape of the table, how it is kept, and the ids of three steps; one past the last is none.
FEW = ([3, 3, 7, 49], [7, -1, 8, 3], [50] * 4)
MOST = (
    [0, 3, 3, 7, 1, 2, 4, 5, 6, 8, 9, 19, 19, 11, 12, -1], [20] * 16, list(range(4, 20)),
)  # fmt: skip
FORMS = {
    "rows": ((50, 6), lambda x: x, FEW),
    "whole": ((20, 64), lambda x: x, MOST),
    "packed": ((20, 64), jmask.packed, MOST),
}


def nothing_if_not_finite(updates):
    bad = [jnp.any(~jnp.isfinite(x)) for x in jax.tree.leaves(updates)]
    return jax.tree.map(lambda x: jnp.where(jnp.any(jnp.stack(bad)), 0, x), updates)


def forgetful():
    """Its state, of the shape of the parameters, is zero after each step."""
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    return optax.GradientTransformation(zeros, lambda u, state, params=None: (u, zeros(u)))


def keeping():
    """A state of which nothing is computed: the last gradient, twice, and the one before."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros, zeros

    def update(updates, state, params=None):
        steps = jax.tree.map(lambda g, last: -0.1 * (2 * g - last), updates, state[0])
        return steps, (updates, updates, state[0])

    return optax.GradientTransformation(init, update)


# Their state does not depend on what it was where it is read, is chosen by a condition, or is
# filled anew.
IN_SEVERAL_PASSES = {
    "adan", "novograd", "optimistic_gradient_descent", "optimistic_adam_v2",
    "state filled anew",
}  # fmt: skip
OTHERS = named("", vars(optax) | globals())("""
    momentum | sgd(0.1, momentum=0.9)
    clipped by value | chain(clip(0.5), adamw(0.1))
    clipped by norm | chain(clip_by_global_norm(0.5), adam(0.1))
    clipped by norm, sgd | chain(clip_by_global_norm(0.5), sgd(0.1))
    clipped by value and by norm | chain(clip(0.3), clip_by_global_norm(0.5), adamw(0.1))
    clipped by norm, if finite | chain(
        stateless(lambda updates, _: nothing_if_not_finite(updates)), clip_by_global_norm(0.5),
        adagrad(0.1))
    state filled anew | chain(trace(0.9), forgetful(), scale(-0.1))
    rate by schedule | adagrad(linear_schedule(0.1, 0.2, 10))
    rate and momentum injected | inject_hyperparams(sgd)(learning_rate=0.1, momentum=0.9)
    weights masked | chain(
        masked(add_decayed_weights(0.1), {"table": True, "w": False}), adam(0.1))
    state that is kept | keeping()
    by parameter | partition({"a": adam(0.1), "b": sgd(0.1)}, {"table": "a", "w": "b"})
""")
# Deprecated, and in need of the value of the loss.
LEFT_OUT = ("optimistic_adam", "polyak_sgd")
LIFTED = {
    name: jmask.lazy(build())
    for name, build in (ROW_LOCAL | OTHERS).items()
    if "contrib" not in name and name not in LEFT_OUT
}


def parameters(form):
    shape, kept_as, _ = FORMS[form]
    table = kept_as(jax.random.normal(jax.random.key(0), shape))
    return {"table": table, "w": jax.random.normal(jax.random.key(1), (3,))}


def gradient(params, ids):
    table = params["table"]
    is_packed = table.shape == (10, 128)
    shape = (20, 64) if is_packed else table.shape
    rows = jax.random.normal(jax.random.key(sum(ids)), (len(ids), shape[1]))
    gradient = jmask.RowSparse(ids, rows, shape)
    gradient = of_lines(gradient, table) if is_packed else gradient
    return {"table": gradient, "w": params["w"] / 2}


def dense(tree):
    return unpacked(tree, jax.ShapeDtypeStruct((10, 128), jnp.float32), (20, 64))


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LIFTED)
def test_same_result(name, form):
    tx, params = LIFTED[name], parameters(form)
    steps = (jmask.apply_gradients, update_and_apply)
    one, two = (jax.jit(functools.partial(step, tx)) for step in steps)
    actual = expected = params
    other = state = tx.init(params)
    for ids in FORMS[form][2]:
        before, grads = dense(actual), gradient(params, ids)
        expected, state = two(grads, state, expected)
        actual, other = one(grads, other, actual)
        untouched = np.setdiff1d(np.arange(FORMS[form][0][0]), ids)
        np.testing.assert_array_equal(
            dense(actual)["table"][untouched], before["table"][untouched]
        )
    assert jax.tree.structure((actual, other)) == jax.tree.structure((expected, state))
    assert_close(dense((actual, other)), dense((expected, state)), rtol=3e-6, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("name", LIFTED)
def test_which_take_one_pass(name):
    """And of 16 lookups in 20 rows the whole table is as fast: no scatter at all.

    But for a linear step, which adds rows one at a time there too, as `jmask.sgd` does.
    """
    tx, is_in_one = LIFTED[name], name not in IN_SEVERAL_PASSES
    for form, is_scattered in (("rows", is_in_one), ("whole", name == "sgd")):
        params, ids = parameters(form), FORMS[form][2][0]
        step = functools.partial(jmask.apply_gradients, tx)
        program = str(jax.make_jaxpr(step)(gradient(params, ids), tx.init(params), params))
        assert ("jmask_update_rows" in program) == is_scattered


# Those of Adam and of a schedule take their scalars and which entries are touched: no room.
@pytest.mark.parametrize("name", ["adagrad", "momentum", "lion"])
def test_packed_tables(name):
    """One scatter, as of arrays."""
    tx, params = LIFTED[name], parameters("packed")
    step = functools.partial(jmask.apply_gradients, tx)
    program = jax.make_jaxpr(step)(gradient(params, MOST[0]), tx.init(params), params)
    assert str(program).count("jmask_update_rows[") == 1


# In a process of its own: where XLA takes such a combiner it ends the process.
WITHOUT_INPUTS = """
import jax, jax.numpy as jnp, numpy as np, optax, jmask
from jmask._kernels.scatter_update import update_elementwise
from jmask._kernels.update_rows import updated
from jax import lax

SCALARS = {
    "random": lambda: jax.random.uniform(jax.random.key(0)),
    "fori_loop": lambda: lax.fori_loop(0, 3, lambda i, c: c * 1.5 + i, 1.0),
    "while_loop": lambda: lax.while_loop(lambda c: c < 10, lambda c: 2 * c, 1.0),
    "scan": lambda: lax.scan(lambda c, x: (c + x, None), 0.0, jnp.arange(3.0))[0],
    "cond": lambda: lax.cond(jnp.arange(3).sum() > 2, lambda: 1.5, lambda: 2.0),
    "sort": lambda: jnp.sort(jnp.array([3.0, 1.0, 2.0]))[1],
    "arithmetic": lambda: jnp.where(jnp.sqrt(2.0) > 1, 0.9, 0.1),
}
TABLE = jnp.ones((9, 4))
GRADIENT = jmask.RowSparse([1, 3, 1], jnp.ones((3, 4)), (9, 4))

def optimizers(scalar):
    times = optax.stateless(lambda g, p: jax.tree.map(lambda x: -x * scalar(), g))
    rate = lambda count: 0.1 * scalar()
    return (
        jmask.lazy(optax.chain(optax.scale_by_adam(), times)), jmask.lazy(times),
        jmask.lazy(optax.adamw(rate)), jmask.adam(rate), jmask.sgd(rate),
    )

@jax.jit
def in_two_calls(number):
    def step(inner):
        updates, _ = inner.update(GRADIENT, inner.init(TABLE), TABLE)
        return jmask.apply_updates(TABLE, updates)
    return [step(inner) for inner in optimizers(lambda: number)]

for name, scalar in SCALARS.items():
    @jax.jit
    def in_one_call(gradient, table):
        step = lambda inner: jmask.apply_gradients(inner, gradient, inner.init(table), table)
        return [step(inner)[0] for inner in optimizers(scalar)]
    for x, y in zip(in_one_call(GRADIENT, TABLE), in_two_calls(scalar())):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=name)

    def combiner(param, slot, grad):
        return param - scalar() * grad, slot + grad

    @jax.jit
    def step(table):
        ids, grad = jnp.array([1, 3]), jnp.ones((2, 4))
        update = update_elementwise(combiner, [table, 0 * table], ids, grad, (), "unique")
        return updated([update])[0][0]

    np.testing.assert_allclose(step(TABLE)[3], np.full(4, 1 - scalar()), rtol=1e-6)
print("done")
"""


def run(program):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | cache | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_scalars_that_depend_on_no_input():
    finished = run(WITHOUT_INPUTS)
    assert finished.stdout == "done\n", finished.stderr


PROGRAMS = re.findall(r"```mlir\n(.*?)```", (ROOT / "docs/performance.md").read_text(), re.S)
RUN_IT = """
import dataclasses, sys, jax, jax.numpy as jnp
from jax import export
from jax.extend.mlir.dialects import stablehlo

text, results = {text!r}, {results}
args = jnp.arange(8.0), jnp.array([[1], [3]]), jnp.array([10.0, 20.0])
like = export.export(jax.jit(lambda t, ids, rows: [t] * results, keep_unused=True))(*args)
code = stablehlo.serialize_portable_artifact_str(text, stablehlo.get_current_version())
print([x.tolist() for x in dataclasses.replace(like, mlir_module_serialized=code).call(*args)])
"""


@pytest.mark.slow
@pytest.mark.of_cpus
@pytest.mark.parametrize(
    ("number", "of_another", "right"),
    [
        (0, "(%table, %double,", [[0, 11, 2, 23, 4, 5, 6, 7], [0, 20, 4, 120, 8, 10, 12, 14]]),
        (0, "(%table, %table,", [[0, 11, 2, 23, 4, 5, 6, 7], [0, 10, 2, 60, 4, 5, 6, 7]]),
        (1, "", [[0, 161, 2, 323, 4, 5, 6, 7]]),
    ],
)
def test_faults_of_xla_are_as_documented(number, of_another, right):
    """If this fails XLA was mended: guards in `scatter_update` and a section of docs can go."""
    text, is_right = PROGRAMS[number], "double" in of_another
    if is_right:  # the program itself is meaningful: it is the array passed twice
        text = text.replace("(%table, %table,", of_another)
        double = "%double = stablehlo.add %table, %table : tensor<8xf32>"
        text = text.replace("  %new:2", f"  {double}\n  %new:2")
    finished = run(RUN_IT.format(text=text, results=2 - number))
    expected = str([[float(x) for x in row] for row in right]) + "\n"
    assert (finished.stdout == expected) == is_right, finished.stderr


def test_what_the_loss_is_needed_for_still_gets_it():
    tx = jmask.lazy(optax.polyak_sgd())
    params = parameters("rows")
    grads, state = gradient(params, [1, 2]), tx.init(params)
    new, _ = jmask.apply_gradients(tx, grads, state, params, value=jnp.float32(3.0))
    updates, _ = tx.update(grads, state, params, value=jnp.float32(3.0))
    expected = jmask.apply_updates(params, updates)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), new, expected)


LINEAR = functions("", vars(optax))("""
    sgd(0.1); scale(-0.1); sgd(lambda count: 0.1 / (count + 1)); identity();
    chain(scale(0.5), sgd(0.2)); inject_hyperparams(sgd)(learning_rate=0.1)
""")


@pytest.mark.parametrize("name", LINEAR)
def test_rows_of_a_linear_step_are_added_one_at_a_time(name):
    """As `jmask.sgd` adds them: nothing of equal ids is found, or summed first."""
    table, ids = jnp.ones((50_000, 8)), jnp.arange(4096) % 3000
    gradient = jmask.RowSparse(ids, jnp.ones((4096, 8)), table.shape)

    def compiled(tx):
        step = lambda gradient, state, table: jmask.apply_gradients(tx, gradient, state, table)
        step = jax.jit(step, donate_argnums=(1, 2))
        return step.lower(gradient, tx.init(table), table).compile()

    program, ours = compiled(jmask.lazy(LINEAR[name]())), compiled(jmask.sgd(0.1))
    for word in ("while(", " sort(", " scatter(", " gather("):
        assert program.as_text().count(word) == ours.as_text().count(word)
    assert temporary_bytes(program) <= temporary_bytes(ours) + 64
