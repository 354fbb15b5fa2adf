"""The kernel for TPUs computes what the definition does, without races, in Pallas' interpreter.

The interpreter keeps semaphores and DMAs as a TPU does, copies rows only when they are waited
for, and prints where two copies touch the same row with nothing between them. Blocks are small
here, so that a few rows are several blocks. Which updates become the kernel is read from the
program that is lowered for TPUs, for which none is needed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import jmask
from jmask._kernels import scatter_update, tuning, update_rows
from jmask._kernels._tpu import choice, row_updates
from tests.expressions import functions
from tests.oracle import assert_close
from tests.stored_tables import update_and_apply

pytestmark = pytest.mark.sampled

# Without a clock for each DMA the interpreter sees no race between two of them.
PARAMS = pltpu.InterpretParams(detect_races=True, vector_clock_size=512)
KERNELS = ("jmask_update_rows", "jmask_read_lines")
V = 60


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for name, value in (("_BLOCK", 16), ("_CHUNK", 8), ("_UNROLL", 4)):
        monkeypatch.setattr(row_updates, name, value)


@pytest.fixture
def interpreted(capfd):
    """Run kernels in the interpreter, and refuse races."""
    with pltpu.force_tpu_interpret_mode(PARAMS):
        yield
    assert "RACE" not in "".join(capfd.readouterr())


def momentum(p, m, g, lr):
    m = 0.9 * m + g
    return p - lr * jnp.sign(m), m


def adan_like(p, m, v, n, old, g, lr):
    d = g - old
    m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * d
    n = jnp.maximum(0.9 * n, jnp.abs(g + d))
    return p - lr * (m + v) / (jnp.sqrt(jnp.abs(n)) + 1e-3), m, v, n, g


def clipped(p, m, g, lr):
    g = jnp.clip(jnp.where(jnp.isfinite(g), g, 0.0), -1.0, 1.0)
    return p * (1 - lr) - lr * jnp.tanh(g) ** 3, jnp.exp(-m) + jnp.log1p(g * g)


counted = lambda p, count, g: (p - g / (count + 1).astype(g.dtype), count + 1)
replaced = lambda p, g: (g,)
RULES = {
    "momentum": (momentum, ["float32"] * 2, 1),
    "adan_like": (adan_like, ["float32"] * 5, 1),
    "clipped": (clipped, ["float32"] * 2, 1),
    "counted": (counted, ["float32", "int32"], 0),
    "replaced": (replaced, ["float32"], 0),
}

# Rows, of them padding, width, order.
BATCHES = {
    "one row": (1, 0, 128, "sorted"),
    "no row": (5, 5, 128, "sorted"),
    "a block": (16, 0, 128, "sorted"),
    "blocks": (48, 0, 128, "sorted"),
    "a part of a block": (37, 0, 256, "sorted"),
    "padding last": (40, 13, 128, "sorted"),
    "blocks of padding": (50, 30, 128, "sorted"),
    "padding among them": (40, 13, 128, "unique"),
    "in any order": (33, 0, 128, "unique"),
    "equal ids": (40, 5, 128, "any"),
    "equal ids of many": (40, 5, 128, "any"),
}

CASES = [
    *[(rule, "padding last") for rule in RULES],
    *[("momentum", batch) for batch in BATCHES],
    ("adan_like", "padding among them"),
    ("adan_like", "a part of a block"),
]


def numbers(rng, shape, dtype):
    x = rng.normal(size=shape)
    return jnp.asarray(np.abs(x * 5) if jnp.issubdtype(dtype, jnp.integer) else x, dtype)


def ids_of(rng, count, padding, order):
    ids = rng.permutation(V)[: count - padding]
    if order == "any":
        ids = rng.integers(0, V // 3, count - padding)
    ids = np.concatenate([ids, np.full(padding, V)])
    ids = np.sort(ids) if order == "sorted" else rng.permutation(ids)
    return jnp.asarray(ids, jnp.int32)


def update_of(rule, batch, gradient="float32"):
    combiner, dtypes, scalars = RULES[rule]
    count, padding, width, order = BATCHES[batch]
    rng = np.random.default_rng(0)
    tables = [numbers(rng, (V, width), dtype) for dtype in dtypes]
    return scatter_update.update_elementwise(
        combiner,
        tables,
        ids_of(rng, count, padding, order),
        numbers(rng, (count, width), gradient),
        [jnp.float32(0.1 + i) for i in range(scalars)],
        order,
    )


def run(how, update):
    results = jax.jit(how)(update)
    return [np.asarray(x) for x in results]


def assert_same(update, results):
    """The numbers of the definition, and the very bits of rows that no id names."""
    others = np.setdiff1d(np.arange(V), np.asarray(update.ids))
    expected = run(update_rows._defined, update)
    for old, new, want in zip(update.tables, results, expected, strict=True):
        np.testing.assert_allclose(new, want, rtol=2e-6, atol=2e-6)
        assert np.asarray(old)[others].tobytes() == new[others].tobytes()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("rule", "batch"), CASES)
def test_as_defined(rule, batch, monkeypatch):
    if batch == "equal ids of many":
        monkeypatch.setattr(tuning, "LARGE_SUMS", 0)
        monkeypatch.setattr(tuning, "LATER_ROWS", 3)
    update = update_of(rule, batch)
    assert_same(update, run(update_rows._on_a_tpu, update))


def check_written(table, ids, new, kind, order):
    """What NumPy writes to the rows that exist, and the very bits of all others."""
    how = functools.partial(choice._written_on_a_tpu, kind=kind, order=order)
    (written,) = jax.jit(how)(table, jnp.asarray(ids, jnp.int32), new)
    written, exists = np.asarray(written), ids < len(table)
    expected, rows = table.copy(), ids[exists]
    with np.errstate(invalid="ignore"):
        expected[rows] = new[exists] if kind == "set" else table[rows] + new[exists]
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(written), is_nan)
    assert written[~is_nan].tobytes() == expected[~is_nan].tobytes()
    others = np.setdiff1d(np.arange(len(table)), ids)
    assert written[others].tobytes() == table[others].tobytes()


def table_of(shape, dtype):
    """Of numbers, if they are floats of nan, -0.0 and infinity, too."""
    table = np.array(numbers(np.random.default_rng(0), shape, dtype))
    if table.dtype != np.int32:
        table[::7], table[1::7], table[2::7] = np.nan, -0.0, np.inf
    return table


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("order", ["sorted", "unique", "any", "any of many"])
@pytest.mark.parametrize("kind", ["set", "add"])
def test_sets_and_sums(kind, order, monkeypatch):
    rng, order_of_ids = np.random.default_rng(0), order.split(" ")[0]
    ids, new = ids_of(rng, 40, 7, order_of_ids), numbers(rng, (40, 128), "float32")
    if order_of_ids != "any":
        check_written(table_of((V, 128), "float32"), np.array(ids), np.array(new), kind, order)
    elif kind == "add":
        if order == "any of many":
            monkeypatch.setattr(tuning, "LARGE_SUMS", 0)
        table = numbers(rng, (V, 128), "float32")
        x = update_rows.RowUpdate(update_rows.ADDITION, [table], ids, new, [], order_of_ids)
        assert_same(x, run(update_rows._on_a_tpu, x))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("count", [128 * 20, 128 * 20 + 1, 128 * 20 + 127])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_one_entry_for_each_row(count, dtype, shape):
    """Neighbours in a line, across blocks, in the last line, and none at all; padding."""
    rng, table = np.random.default_rng(0), table_of((count, *shape), dtype)
    for ids in (
        np.r_[3, 5, 130:140, 700, count - 130 : count, [count] * 3],
        np.r_[0:20, [count] * 6],
        np.array([count]),
        np.array([count - 1]),
    )[: 4 if dtype == "float32" and count % 128 == 1 else 1]:
        order = ["sorted", "unique"][len(ids) % 2]
        ids = ids if order == "sorted" else rng.permutation(ids)
        new, exists = np.array(numbers(rng, (len(ids), *shape), dtype)), ids < count
        for kind in ("set", "add"):
            check_written(table, ids, new, kind, order)
        how = functools.partial(choice._read_on_a_tpu, order=order)
        (read,) = jax.jit(how)(table, jnp.asarray(ids, jnp.int32))
        assert read[exists].tobytes() == table[ids[exists]].tobytes()


@pytest.mark.usefixtures("interpreted")
def test_fewer_entries_than_a_line_has():
    """A kernel would read a line past the end of the table."""
    table, ids = table_of((127, 1), "float32"), np.array([5, 126, 127])
    new = np.array(numbers(np.random.default_rng(0), (3, 1), "float32"))
    check_written(table, ids, new, "add", "sorted")
    how = functools.partial(choice._read_on_a_tpu, order="sorted")
    (read,) = jax.jit(how)(table, jnp.asarray(ids, jnp.int32))
    assert read[:2].tobytes() == table[ids[:2]].tobytes()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("kind", ["set", "add"])
def test_rows_of_16_bits(kind, width, dtype):
    """Both rows of a pair, one of them, pairs that are in two blocks; padding."""
    rng, table = np.random.default_rng(0), table_of((V, width), dtype)
    for ids in (
        np.r_[np.arange(1, 40), [V] * 2],
        np.r_[np.arange(0, V, 2), [V] * 30],
        np.r_[0:5, 7, 9, 10, 13, V - 1],
        np.array([V - 2, V - 1]),
        np.array([V]),
        np.sort(rng.permutation(V)[:33]),
    ):
        new = np.array(numbers(rng, (len(ids), width), dtype))
        check_written(table, ids, new, kind, "sorted")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.sampled(15)
def test_inside_shard_map():
    """Each of two devices updates its own rows."""
    update = update_of("momentum", "padding last")
    twice = jax.tree.map(
        lambda x: jnp.stack([x, 2 * x if x.dtype == jnp.float32 else x]), update
    )
    mesh = jax.sharding.Mesh(jax.devices()[:2], "x")

    def on_each(how):
        def local(update):
            tables = how(jax.tree.map(lambda x: x[0], update))
            return [x[None] for x in tables]

        # The interpreter itself does not say over which axes its results vary.
        return jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        )(twice)

    expected = on_each(update_rows._defined)
    for new, want in zip(on_each(update_rows._on_a_tpu), expected, strict=True):
        np.testing.assert_allclose(new, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("places", [(0, 1), (15, 16)])
def test_control_equal_ids_race(places, capfd):
    """The interpreter sees equal ids, in one block and in two that follow each other."""
    table, ids = jnp.zeros((V, 128)), jnp.arange(40, dtype=jnp.int32)
    ids = ids.at[places[1]].set(ids[places[0]])

    @jax.jit
    def run(table, ids):
        new = jnp.ones((40, 128))
        return row_updates.update(lambda x, y: [x + y], [table], ids, [new], padding_last=True)

    def verdict():
        try:
            with pltpu.force_tpu_interpret_mode(PARAMS):
                jax.block_until_ready(run(table, ids))
            return "".join(capfd.readouterr())
        except jax.errors.JaxRuntimeError as error:
            return str(error)
        finally:
            pltpu.reset_tpu_interpret_mode_state()

    # It runs in threads, and does not see each race in each run.
    assert any("RACE" in verdict() for _ in range(20))


# --- which updates are the kernel --------------------------------------------------------


def kernels_in(function, *arguments, platform="tpu"):
    """The kernels in a program that is lowered for TPUs."""
    traced = jax.jit(function).trace(*arguments)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    return sorted(name for name in KERNELS if name in text)


def step(tx, apply=jmask.apply_gradients):
    def function(table, state, ids):
        grads = jmask.grad(lambda t: jnp.sum(jnp.sin(t[ids])))(table)
        return apply(tx, grads, state, table)

    return function


def kernels_of(tx, shape, dtype="float32", **more):
    table = jax.ShapeDtypeStruct(shape, dtype)
    ids = jax.ShapeDtypeStruct((more.pop("lookups", 64),), jnp.int32)
    arguments, how = (table, jax.eval_shape(tx.init, table), ids), more.pop("platform", "tpu")
    return kernels_in(step(tx, **more), *arguments, platform=how)


UPDATE = ["jmask_update_rows"]
BOTH = ["jmask_read_lines", "jmask_update_rows"]


WITH_ROWS_READ = functions("", vars(jmask))('adam(count="per_row"); rowwise_adagrad()')
OPTIMIZERS = WITH_ROWS_READ | functions("", {"optax": optax, **vars(jmask)})("""
    sgd(0.1); sgd(0.1, momentum=0.9, weight_decay=0.1); adagrad(); adam(); ftrl();
    lazy(optax.adamw(0.1)); lazy(optax.rmsprop(0.1)); lazy(optax.lion(0.1));
    lazy(optax.adan(0.1))
""")


@pytest.mark.parametrize("apply", [jmask.apply_gradients, update_and_apply])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.dtype_promotion
def test_optimizers_that_are_the_kernel(name, apply):
    kernels = BOTH if name in WITH_ROWS_READ else UPDATE
    assert kernels_of(OPTIMIZERS[name](), (10**6, 128), apply=apply) == kernels


WIDE = (10**6, 128)
# Updates, and whether they are the kernel.
SHAPES = [
    *(((10**6, width), dtype, {}, UPDATE) for width in (128, 256, 384, 1024, 4096)
      for dtype in ("float32", "bfloat16")),
    (WIDE, "float16", {}, []),  # libtpu takes none
    ((10**6, 64), "float32", {}, []),  # kept transposed
    ((10**6, 200), "float32", {}, []),
    ((10**6, 2, 128), "float32", {}, []),
    ((10**6,), "float32", {}, []),
    ((10**6 + 1, 128), "bfloat16", {}, []),  # the last row has no other in its words
    ((10**6, 2**20), "float32", {}, []),  # blocks do not fit in VMEM
    (WIDE, "float32", {"lookups": 0}, []),
    (WIDE, "float32", {"platform": "cpu"}, []),
    (WIDE, "float32", {"platform": "cuda"}, []),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:on a TPU a step copies")
def test_shapes_that_are_the_kernel_or_left_to_xla():
    for shape, dtype, more, kernels in SHAPES:
        assert kernels_of(jmask.adam(), shape, dtype, **more) == kernels, (shape, dtype, more)


def test_the_switch(monkeypatch):
    monkeypatch.setenv("JMASK_KERNELS", "0")
    for tx in (jmask.adam(), jmask.sgd(0.1), jmask.rowwise_adagrad()):
        assert kernels_of(tx, WIDE) == []


def test_batched_calls_are_the_definition():
    table, ids = jnp.zeros((2, 10**4, 128)), jnp.zeros((2, 8), jnp.int32)
    tx = jmask.adagrad()
    state = jax.eval_shape(jax.vmap(tx.init), table)
    assert kernels_in(jax.vmap(step(tx)), table, state, ids) == []


def test_packed_tables():
    table = jax.eval_shape(jmask.packed, jax.ShapeDtypeStruct((10**6, 64), "float32"))
    tx = jmask.adam()
    state = jax.eval_shape(tx.init, table)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    for apply in (jmask.apply_gradients, update_and_apply):
        assert kernels_in(step(tx, apply), table, state, ids) == UPDATE


def test_one_export_holds_the_kernel_and_scatters():
    table, ids = jnp.ones((V, 128)), jnp.array([3, 5, 3])
    tx = jmask.adam()
    arguments = table, tx.init(table), ids
    exported = jax.export.export(jax.jit(step(tx)), platforms=["cpu", "tpu", "cuda"])(
        *arguments
    )
    text = exported.mlir_module()
    assert "jmask_update_rows" in text
    assert '"stablehlo.scatter"' in text
    assert_close(exported.call(*arguments), jax.jit(step(tx))(*arguments), rtol=1e-6)


def test_narrow_tables_are_said_once():
    choice.warn_if_copied.cache_clear()
    with pytest.warns(UserWarning, match=r"jmask.packed\(table\)"):
        kernels_of(jmask.adagrad(), (10**6, 64))
    kernels_of(jmask.adagrad(), (10**6, 64))  # not again, nor of small tables
    kernels_of(jmask.adagrad(), (10**3, 64))
