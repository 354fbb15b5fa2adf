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
from tests.expressions import functions
from tests.optax_cases import CHAINS, ROW_LOCAL
from tests.stored_tables import bits, of_lines

pytestmark = pytest.mark.dtype_promotion

ROOT = Path(__file__).parents[2]
# Something is chosen by a condition, a state or all of a step.
IN_SEVERAL_PASSES = {"novograd", "apply_if_finite(adam(0.1), 3)"}
# Deprecated, in need of the value of the loss, and one that does nothing.
LEFT_OUT = ("optimistic_adam", "polyak_sgd", "set_to_zero()")
LIFTED = {
    name: jmask.lazy(build())
    for name, build in (ROW_LOCAL | CHAINS).items()
    if "contrib" not in name and name not in LEFT_OUT
}
FEW, MOST = [3, 3, 7, 49], [*range(10), 19, 19, 11, 12, -1, 3]


def program(name, shape, ids, kept_as=lambda x: x):
    """The step of an optimizer, traced."""
    tx, table = LIFTED[name], kept_as(jnp.ones(shape))
    gradient = jmask.RowSparse(ids, jnp.ones((len(ids), shape[1])), shape)
    gradient = gradient if table.shape == shape else of_lines(gradient, table)
    params = {"table": table, "other": jnp.ones(3), "dense": jnp.ones(3)}
    step = functools.partial(jmask.apply_gradients, tx)
    return str(jax.make_jaxpr(step)(params | {"table": gradient}, tx.init(params), params))


@pytest.mark.sampled
@pytest.mark.parametrize("name", LIFTED)
def test_which_take_one_pass(name):
    """And of 16 lookups in 20 rows the whole table is as fast: no scatter at all.

    But for a linear step, which adds rows one at a time there too, as `jmask.sgd` does.
    """
    is_in_one = name not in IN_SEVERAL_PASSES
    assert ("jmask_update_rows" in program(name, (50, 6), FEW)) == is_in_one
    assert ("jmask_update_rows" in program(name, (20, 64), MOST)) == (
        name in ("sgd", "identity()")
    )


def test_a_table_that_is_frozen():
    """It keeps its bits, and does not make the step of others two passes."""
    each = {"train": optax.adam(0.1), "freeze": optax.set_to_zero()}
    tx = jmask.lazy(optax.partition(each, {"a": "train", "b": "freeze"}))
    table = jnp.arange(-150.0, 150.0).reshape(50, 6).at[5].set(jnp.nan)
    params, alone = {"a": table, "b": table}, jmask.lazy(optax.adam(0.1))
    gradient = jmask.RowSparse([3, 4, 5, 4], jnp.ones((4, 6)), table.shape)
    step = lambda g, params: jmask.apply_gradients(tx, g, tx.init(params), params)[0]
    given = {"a": gradient, "b": gradient}, params
    assert str(jax.make_jaxpr(step)(*given)).count("jmask_update_rows[") == 2
    new = jax.jit(step)(*given)
    expected, _ = jax.jit(alone.update)(gradient, alone.init(table), table)
    expected = jmask.apply_updates(table, expected)
    np.testing.assert_allclose(new["a"], expected, rtol=1e-6)
    np.testing.assert_array_equal(bits(new["b"]), bits(table))


# Those of Adam and of a schedule take their scalars and which entries are touched: no room.
@pytest.mark.parametrize("name", ["adagrad", "sgd(0.1, momentum=0.9, nesterov=True)", "lion"])
def test_packed_tables(name):
    """One scatter, as of arrays."""
    assert program(name, (20, 64), MOST, jmask.packed).count("jmask_update_rows[") == 1


# In a process of its own: where XLA takes such a combiner it ends the process.
WITHOUT_INPUTS = """
import jax, jax.numpy as jnp, numpy as np, optax, jmask
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


@pytest.mark.parametrize("make", [optax.adagrad, optax.inject_hyperparams(optax.adagrad)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_constants_beside_rows_without_a_scatter_of_all(make, dtype):
    """Adagrad takes 0.0 where a sum is 0: a number beside rows that are no single entries."""
    tx, table, ids = make(0.1), jnp.linspace(-1, 1, 32, dtype=dtype).reshape(8, 4), [6, 1]
    gradient = jmask.RowSparse(ids, jnp.ones((2, 4), dtype), (8, 4))
    lazy = jmask.lazy(tx)
    new, _ = jax.jit(functools.partial(jmask.apply_gradients, lazy))(
        gradient, lazy.init(table), table
    )
    updates, _ = tx.update(gradient.todense(), tx.init(table), table)
    expected = optax.apply_updates(table, updates)
    np.testing.assert_allclose(
        *(np.float32(x[jnp.array(ids)]) for x in (new, expected)), rtol=1e-2
    )


@pytest.mark.parametrize("factor", [-0.25, None])
def test_a_step_of_the_parameter_alone(factor):
    """It is linear, too, but in what is not added: rows of equal ids take it once."""
    scaled = lambda x: x if factor is None else factor * x
    step = optax.stateless(lambda updates, params: jax.tree.map(scaled, params))
    tx, table = jmask.lazy(step), jnp.ones((100, 3))
    gradient = jmask.RowSparse([3, 1, 3], jnp.ones((3, 3)), table.shape)
    step = jax.jit(functools.partial(jmask.apply_gradients, tx))
    new, _ = step(gradient, tx.init(table), table)
    np.testing.assert_array_equal(new, table.at[jnp.array([1, 3])].add(scaled(1.0)))
