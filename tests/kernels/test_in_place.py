"""A donated step works in place, whatever the optimizer and the size of the table.

Read from the compiled program, for which nothing is allocated: every table and every
state array shares its buffer with the one that comes out, nothing else in the program is
as large as a table, and the temporary memory is that of the batch. And a run compiles
once.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests import compiled_step as steps
from tests.compiled_step import (
    IN_PLACE,
    Step,
    check_that_tables_are_seen,
    compiled_step,
    temporary_bytes,
    whole_table_operations,
)
from tests.lookup_programs import BATCH, STACKED
from tests.optimizers import NOT_LAZY, OPTIMIZERS
from tests.stored_tables import STEPS as WAYS

pytestmark = pytest.mark.dtype_promotion

SMALL, LARGE = 10**5, 10**7

PARTITION = jmask.lazy(
    optax.partition(
        {"table": optax.adam(1e-3), "dense": optax.sgd(0.1)},
        {"table": "table", "dense": "dense"},
    )
)
ADAMW = OPTIMIZERS["optax.adamw"]
FROZEN, FROZEN_BY_OPTAX = (
    optax.partition(
        {"train": optax.adam(1e-3), "freeze": freeze}, {"table": "freeze", "dense": "train"}
    )
    for freeze in (jmask.lazy(optax.set_to_zero()), optax.set_to_zero())
)
MIXED = jmask.lazy(optax.adam(1e-3, mu_dtype=jnp.float32))

STEPS = {
    **{name: Step(tx) for name, tx in OPTIMIZERS.items()},
    "partition": Step(PARTITION),
    "vector": Step(ADAMW, row=()),
    "3-D table": Step(ADAMW, row=(2, 8)),
    "read as integers": Step(ADAMW, row=(32,)),
    "written as windows": Step(ADAMW, row=(50,)),
    "one pass, written as windows": Step(ADAMW, row=(50,), apply=jmask.apply_gradients),
    "float16": Step(ADAMW, dtype=jnp.float16),
    "float16, float32 updates": Step(MIXED, dtype=jnp.float16),
    "several lookups": Step(ADAMW, loss=steps.squares_of_several_lookups),
    "lookups in scan": Step(ADAMW, loss=steps.squares_in_scan),
    "apply_gradients": Step(ADAMW, apply=jmask.apply_gradients),
    **{
        f"one pass, {name}": Step(OPTIMIZERS[name], apply=jmask.apply_gradients)
        for name in (
            *("adam", "ftrl", "adagrad", "clipped optax.adam", "adam unless not finite"),
            "sgd with all terms",
        )
    },
    "float16, rounded stochastically": Step(
        jmask.adagrad(state_dtype=jnp.float32),
        dtype=jnp.float16,
        apply=steps.rounded_stochastically,
    ),
    # No gradient depends on what is read, and still it is read before the table is written.
    "linear loss": Step(ADAMW, loss=steps.linear),
    **{
        f"frozen, {apply.__name__}": Step(FROZEN, apply=apply)
        for apply in (jmask.apply_gradients, steps.with_optax)
    },
    "frozen by optax": Step(FROZEN_BY_OPTAX, apply=jmask.apply_gradients),
}

NARROW = {
    "bfloat16": Step(ADAMW, dtype=jnp.bfloat16),
    "bfloat16, float32 updates": Step(MIXED, dtype=jnp.bfloat16),
    "one pass, bfloat16": Step(ADAMW, dtype=jnp.bfloat16, apply=jmask.apply_gradients),
    "bfloat16, rounded stochastically": Step(
        jmask.rowwise_adagrad(state_dtype=jnp.float32),
        dtype=jnp.bfloat16,
        apply=steps.rounded_stochastically,
    ),
}
NARROW_TABLES = {
    **{
        name: OPTIMIZERS[name]
        for name in ("sgd", "adagrad", "rowwise adagrad", "adam", "optax.adam")
    },
    "rowwise adagrad, float32 state": jmask.rowwise_adagrad(state_dtype=jnp.float32),
    "adam, float32 state": jmask.adam(state_dtype=jnp.float32),
}
STEPS |= NARROW
# Kept as integers of as many bits a table would be copied there, which is half as much.
OF_THE_OLDEST = pytest.mark.xfail(
    jax.__version_info__ < (0, 11, 2),
    reason="on CPUs the XLA of JAX 0.10 to 0.11.1 has no bfloat16 scatter: it widens tables",
    strict=True,
)


def cases(steps):
    return pytest.mark.parametrize("step", steps.values(), ids=steps.keys())


aliased_bytes = lambda compiled: compiled.memory_analysis().alias_size_in_bytes


def check_in_place(step):
    small, large = step.compile(SMALL), step.compile(LARGE)
    temporary = temporary_bytes(large, step.table_bytes(LARGE), step.entries(LARGE))
    assert temporary == pytest.approx(temporary_bytes(small), rel=0.01)
    assert temporary < 16 * step.batch_bytes()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[OF_THE_OLDEST] if n in NARROW else []) for n in STEPS]
)
def test_in_place(name):
    check_in_place(STEPS[name])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=OF_THE_OLDEST), "float16"])
@pytest.mark.parametrize("name", NARROW_TABLES)
def test_narrow_tables_with_rows_of_64(name, dtype):
    """Rows of 64 are read as integers, of which no table is made."""
    tx, apply = NARROW_TABLES[name], jmask.apply_gradients
    step = Step(tx, row=(64,), dtype=jnp.dtype(dtype), apply=apply)
    tables = step.table_bytes(SMALL), step.entries(SMALL), IN_PLACE | {"bitcast-convert"}
    assert temporary_bytes(step.compile(SMALL), *tables) < step.entries(SMALL) / 4


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batches_of_one_row(name):
    """XLA makes slices of their gathers and scatters, but not of those of an update."""
    # What a loss looks up is a slice, which XLA may read again from a copy of the table.
    tx, apply = OPTIMIZERS[name], jmask.apply_gradients
    step = Step(tx, lookups=1, apply=apply, loss=steps.linear)
    assert temporary_bytes(step.compile(SMALL), entries=step.entries(SMALL)) < SMALL


@cases(NARROW)
def test_aliased_in_spite_of_copies(step):
    assert aliased_bytes(step.compile(LARGE)) >= step.table_bytes(LARGE)


@cases(
    {
        name: dataclasses.replace(STEPS[name], lookups=4096)
        for name in ("sgd", "adam", "optax.adamw", "several lookups", "vector")
    }
)
def test_more_lookups_than_rows(step):
    rows = 100
    assert aliased_bytes(step.compile(rows)) >= step.table_bytes(rows)


def test_control_tables_are_seen():
    """Those that a dense step makes, or a step that is given none to write to."""
    check_that_tables_are_seen(Step(jmask.adam()), None)
    for tx in NOT_LAZY.values():
        compiled = Step(tx).compile(LARGE)
        assert not whole_table_operations(compiled, Step(tx).entries(LARGE)) <= IN_PLACE


# --- stacks of tables ------------------------------------------------------------------------

STACKED_UPDATES = {
    **{name: OPTIMIZERS[name] for name in ("sgd", "adam", "optax.adamw", "adam per row")},
    **{name: OPTIMIZERS[name] for name in ("averaged optax.adam", "optax.adan")},
    "with averages": optax.chain(OPTIMIZERS["rowwise adagrad"], jmask.ema(0.5)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "lookup",
    [
        *("vmap over tables", "pairs", "a table, then rows", "a scan over tables"),
        *("some columns", "table by table", "stacked", "reversed rows"),
    ],
)
@pytest.mark.parametrize("name", STACKED_UPDATES)
@pytest.mark.parametrize("width", [16, 1])
def test_stacks_in_place(name, lookup, way, width):
    tx, table = STACKED_UPDATES[name], jax.ShapeDtypeStruct((3, 50_000, width), jnp.float32)
    compiled = compiled_step(STACKED[lookup], tx, table, BATCH, apply=WAYS[way])
    state = jax.eval_shape(tx.init, table)
    tables = sum(x.size == table.size for x in (table, *jax.tree.leaves(state)))
    assert temporary_bytes(compiled, 4 * tables * table.size, table.size) < table.size


# --- a run is compiled once -----------------------------------------------------------------


# One for each way in which a step is called and its state is kept.
@pytest.mark.sampled
@cases(
    {
        name: STEPS[name]
        for name in (
            *("sgd with all terms", "rowwise adagrad", "adam unless not finite", "partition"),
            *("adam within norms", "clipped optax.adam", "injected optax.adam"),
            *("several lookups", "lookups in scan", "one pass, adam"),
            *("one pass, clipped optax.adam", "one pass, adam unless not finite"),
            *("float16, rounded stochastically", "bfloat16, float32 updates"),
        )
    }
)
def test_a_run_is_traced_once(step):
    rows, traces = 50, 0

    def counted(params, ids):
        nonlocal traces
        traces += 1
        return step.loss(params, ids)

    counting = dataclasses.replace(step, loss=counted, lookups=8)
    run = counting.jitted()
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), step.arguments(rows)[0])
    state = step.tx.init(params)
    rng = np.random.default_rng(0)
    for _ in range(3):
        ids = jnp.asarray(rng.integers(rows, size=8), jnp.int32)
        params, state, _ = run(params, state, ids)
    assert traces == 1


# Their gradient has the size of the table; table and slots are not copied (jaxlib 0.12).
@pytest.mark.of_cpus
@pytest.mark.parametrize(
    "name", ["momentum", "adagrad", "adam", "optax.adamw", "rowwise adam", "ftrl", "optax.adan"]
)
def test_small_tables_are_updated_in_place(name):
    tx, table = OPTIMIZERS[name], jnp.ones((10_000, 64))

    def step(table, state, ids):
        grads = jmask.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
        return jmask.apply_gradients(tx, grads, state, table)

    args = table, tx.init(table), jnp.arange(8192, dtype=jnp.int32)
    text = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile().as_text()
    # Of one that reads another slot as it was XLA may copy that.
    most = name in ("ftrl", "optax.adan")
    assert len(re.findall(r"= f32\[10000,64\]\S* copy\(", text)) <= most
