"""A step on a TPU costs the rows, not the table: read from programs compiled without one.

A table may be streamed in place and without temporaries, which the other tests do not see.
Here steps on 10**6 and on 10**7 rows are compared: no scatter moves a whole table, no array
with an entry for each row is made, and what the compiler says the instructions cost is the
same. `make test-tpu` runs these; `make tpu-cost` prints estimates of whole steps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies

import jmask
from tests.accelerators.test_tpu import TOPOLOGIES, device
from tests.compiled_step import (
    IN_PLACE,
    Step,
    costed_cycles,
    rounds_of_loops,
    squares_of_bags,
    squares_of_several_lookups,
    streaming_scatters,
    whole_table_operations,
)

pytestmark = [pytest.mark.needs(what="libtpu"), pytest.mark.dtype_promotion]

ROWS, LOOKUPS, WIDTH = (10**6, 10**7), 512, 128


wide = functools.partial(Step, row=(WIDTH,), lookups=LOOKUPS)
passed = functools.partial(wide, apply=jmask.apply_gradients)
packed = functools.partial(passed, row=(64,), table=jmask.PackedTable.pack)

STEPS = {
    "sgd": passed(jmask.sgd(0.1)),
    "sgd in two steps": wide(jmask.sgd(0.1)),
    "decayed sgd": passed(jmask.sgd(0.1, weight_decay=0.1)),
    "momentum": passed(jmask.sgd(0.1, momentum=0.9)),
    "adagrad, several": passed(jmask.adagrad(), loss=squares_of_several_lookups),
    "adam": passed(jmask.adam()),
    "adam, bags": passed(jmask.adam(), loss=squares_of_bags),
    "adam of rows": passed(jmask.adam(count="per_row")),
    "rowwise": passed(jmask.rowwise_adagrad()),
    "rowwise in two steps": wide(jmask.rowwise_adagrad(), loss=squares_of_bags),
    "ftrl": passed(jmask.ftrl()),
    "optax.adam": wide(jmask.lazy(optax.adam(0.1))),
    "optax.lion": passed(jmask.lazy(optax.lion(0.1))),
    "optax.rmsprop": wide(jmask.lazy(optax.rmsprop(0.1)), loss=squares_of_bags),
    "packed adam": packed(jmask.adam()),
    "packed rowwise": packed(jmask.rowwise_adagrad()),
    "bfloat16": passed(jmask.adagrad(), dtype=jnp.bfloat16),
}


def check_flat(programs):
    for compiled, rows in zip(programs, ROWS, strict=True):
        assert not streaming_scatters(compiled, rows)
        assert whole_table_operations(compiled, rows) <= IN_PLACE
        assert not rounds_of_loops(compiled)
    small, large = map(costed_cycles, programs)
    assert large <= 1.02 * small + 2000


@pytest.mark.parametrize("name", STEPS)
def test_flat(name):
    topology = TOPOLOGIES[list(STEPS).index(name) % 3]
    check_flat([STEPS[name].compile(rows, device(topology)) for rows in ROWS])


@pytest.mark.parametrize(
    ("topology", "tx"), [("v5e:2x2", jmask.adam()), ("v6e:2x2", jmask.rowwise_adagrad())]
)
def test_sharded_tables_are_flat(topology, tx):
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    mesh = jax.sharding.Mesh(np.array(described.devices), "x")
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    programs = []
    for rows in ROWS:
        shape = jax.ShapeDtypeStruct((4 * rows, WIDTH), "float32")
        table = jmask.sharded(shape, mesh, packed=False)
        state = jax.eval_shape(tx.init, table)
        by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        state = jax.tree.map(
            lambda x, by_rows=by_rows: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=by_rows if x.ndim else whole
            ),
            state,
        )
        ids = jax.ShapeDtypeStruct((LOOKUPS,), "int32", sharding=whole)

        def step(table, state, ids):
            grads = jmask.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
            return jmask.apply_gradients(tx, grads, state, table)

        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(table, state, ids)
        assert "jmask_update_rows" in lowered.as_text()
        programs.append(lowered.compile())
    check_flat(programs)


@pytest.mark.parametrize("name", ["sgd", "rowwise"])
def test_control_scatters_of_xla_stream(name, monkeypatch):
    """With the promise of sorted ids they do: what the tests above would see."""
    monkeypatch.setenv("JMASK_KERNELS", "0")
    monkeypatch.setattr("jmask._kernels.tuning.SORTED_PAYS", 10**9)
    compiled = STEPS[name].compile(ROWS[0], device("v5e:2x2"))
    assert streaming_scatters(compiled, ROWS[0])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_without_the_kernel_no_table_streams(topology, monkeypatch):
    monkeypatch.setenv("JMASK_KERNELS", "0")
    for name in ("sgd", "decayed sgd", "optax.adam"):
        compiled = STEPS[name].compile(ROWS[1], device(topology))
        assert not streaming_scatters(compiled, ROWS[1])


# --- what the compiler takes -------------------------------------------------------------

ELEMENTWISE = {
    "clamp": lambda x: jnp.clip(x, -1.0, 1.0),
    "copysign": lambda x: jnp.sign(x) * jnp.abs(x),
    "pow": lambda x: jnp.abs(x) ** 1.5 + x**3,
    "roots": lambda x: jnp.sqrt(jnp.abs(x)) + jax.lax.rsqrt(x * x + 1),
    "exponentials": lambda x: jnp.exp(x) + jnp.exp2(x) + jnp.log(x) + jnp.log1p(x * x),
    "sigmoids": lambda x: jnp.tanh(x) + jax.nn.sigmoid(x) + jnp.sin(x) + jnp.cos(x),
    "angles": lambda x: jnp.tan(x) + jnp.arctan2(x, x + 1),
    "rounding": lambda x: jnp.floor(x) + jnp.ceil(x) + jnp.round(x) + jax.lax.rem(x, x + 2),
    "next": lambda x: jnp.nextafter(x, 2 * x),
    "masks": lambda x: jnp.where((x > 0) & (x < 1) | ~jnp.isfinite(x), x, 0.0),
    "more masks": lambda x: jnp.where(
        (x >= 0) ^ (x != 1), jnp.maximum(x, 2), jnp.minimum(x, 0)
    ),
    "integers": lambda x: (x.astype(jnp.int32) % 7).astype(x.dtype),
    "bfloat16": lambda x: (x.astype(jnp.bfloat16) * 2).astype(x.dtype),
    "reduced": lambda x: jax.lax.reduce_precision(x, 8, 7),
}


@pytest.mark.parametrize("names", [tuple(ELEMENTWISE)[i::3] for i in range(3)])
def test_arithmetic_that_is_lowered(names):
    topology = TOPOLOGIES[len(names) % 3]

    change = lambda g, p: -sum(ELEMENTWISE[name](g + 0.1 * p) for name in names)
    inner = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda g, s, p: (jax.tree.map(change, g, p), jax.tree.map(jnp.add, s, g)),
    )
    compiled = passed(jmask.lazy(inner)).compile(ROWS[0], device(topology))
    assert "jmask_update_rows" in compiled.as_text()
