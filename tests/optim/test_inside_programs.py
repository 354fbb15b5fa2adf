"""A step gives the same on each of several devices, differentiated, and leaves no tracer.

And from gathered rows of bags, which optimizers take as they take the same rows in an array: in
a step of a large batch of bags nothing as large as all rows is made.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmask
from jmask._kernels import tuning
from jmask._kernels.gathered_rows import GATHERED, GatheredRows
from tests.compilations import no_tracer_is_kept
from tests.compiled_step import compiled_step, shapes, temporary_bytes, with_optax
from tests.expressions import functions
from tests.kernels.test_in_place import PARTITION
from tests.optimizers import NOT_LAZY, OF_ALL_TABLES, OPTIMIZERS
from tests.oracle import assert_close
from tests.stored_tables import STEPS

pytestmark = pytest.mark.dtype_promotion

# Rows of a large table and of a small one, whose ids nearly all come again.
LARGE_TABLE, SMALL_TABLE, WIDTH = 40, 8, 4


# One for each way in which a step is made: the others differ from these in arithmetic alone.
WAYS = (
    "sgd", "sgd with all terms", "adam", "rowwise adagrad", "rowwise adam with weight decay",
    "adam unless not finite", "adam without bad rows", "adam within norms",
    "clipped optax.adam", "injected optax.adam", "partition",
)  # fmt: skip

OF_WAYS = {**OPTIMIZERS, "partition": PARTITION}


@pytest.fixture(params=WAYS)
def tx(request):
    return OF_WAYS[request.param]


def problem(seed=0, rows=SMALL_TABLE):
    """Parameters, and ids and rows of a gradient."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params = {"table": normal(rows, WIDTH), "dense": normal(WIDTH)}
    return params, (jnp.array([5, 2, 2]) + seed, normal(3, WIDTH))


def gradients(of_rows, params):
    ids, values = of_rows
    return {
        "table": jmask.RowSparse(ids, values, params["table"].shape),
        "dense": values.sum(0),
    }


@pytest.mark.parametrize("name", ["adam", "momentum", "rowwise adagrad"])
def test_derivatives_of_a_step(name):
    """Of what comes out in the rows of the gradient, as of the operations one by one."""
    tx = OPTIMIZERS[name]
    params, (ids, values) = problem()

    def after(apply, values):
        new, _ = apply(tx, gradients((ids, values), params), tx.init(params), params)
        return jnp.sum(new["table"] ** 2) + jnp.sum(new["dense"] ** 2)

    expected = jax.grad(lambda values: after(with_optax, values))(values)
    in_one = lambda values: after(jmask.apply_gradients, values)
    np.testing.assert_allclose(jax.grad(in_one)(values), expected, rtol=1e-4, atol=1e-5)
    _, slope = jax.jvp(in_one, (values,), (jnp.ones_like(values),))
    np.testing.assert_allclose(slope, expected.sum(), rtol=1e-4, atol=1e-5)


def on_two_devices(apply, tx, same):
    """A step on each device, on the same parameters or on some of its own."""

    def step(params, rows):
        params = params if same else jax.tree.map(lambda x: x[0], params)
        rows = jax.tree.map(lambda x: x[0], rows)
        params, _ = apply(tx, gradients(rows, params), tx.init(params), params)
        return params if same else jax.tree.map(lambda x: x[None], params)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    spec = P() if same else P("x")
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec, P("x")), out_specs=spec))


@pytest.mark.parametrize(
    ("name", "rows", "apply"),
    [
        ("rowwise adagrad", SMALL_TABLE, jmask.apply_gradients),
        ("adam", SMALL_TABLE, with_optax),
        *(
            pytest.param(name, LARGE_TABLE, apply, marks=pytest.mark.sampled)
            for name in WAYS
            for apply in (jmask.apply_gradients, with_optax)
        ),
    ],
)
def test_parameters_of_each_device(name, rows, apply):
    tx = OF_WAYS[name]
    problems = [problem(0, rows), problem(1, rows)]
    if "finite" in name or "bad" in name:  # each decides for its table
        params, (ids, values) = problems[1]
        problems[1] = params, (ids, values.at[2, 0].set(jnp.nan))
    together = jax.tree.map(lambda *x: jnp.stack(x), *problems)
    expected = [
        apply(tx, gradients(of_rows, params), tx.init(params), params)[0]
        for params, of_rows in problems
    ]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    assert_close(on_two_devices(apply, tx, same=False)(*together), expected)


@pytest.mark.sampled
def test_what_differs_is_not_taken_for_the_same(tx):
    """Gradients of each device for parameters of all: what comes out is not replicated."""
    (params, rows), (_, others) = problem(0), problem(1)
    step = on_two_devices(jmask.apply_gradients, tx, same=True)
    # The second from the loop of a step that may not be taken.
    why = "out_specs which require replication|carry input and carry output must have equal"
    with pytest.raises((TypeError, ValueError), match=why):
        step(params, jax.tree.map(lambda *x: jnp.stack(x), rows, others))


@pytest.mark.sampled
@pytest.mark.parametrize("name", OF_ALL_TABLES)
def test_no_tracer_is_kept(name):
    """JAX remembers what a primitive is given, and must not remember the trace with it."""
    tx, (params, of_rows) = OPTIMIZERS[name], problem(rows=LARGE_TABLE)
    grads = gradients(of_rows, params)
    for step in STEPS.values():
        with no_tracer_is_kept():
            jax.jit(lambda *given, step=step: step(tx, *given)).lower(
                grads, tx.init(params), params
            )


# --- gathered rows ----------------------------------------------------------------------


V, D, B, L = 40, 24, 8, 5  # row D is one that no id names
LIKE = jmask.RowSparse.zeros((V, D), nse=B * L)

EVERY = {
    **OPTIMIZERS,
    **NOT_LAZY,
    "every other step": jmask.multi_steps(jmask.adam(0.1), 2, like={"t": LIKE}),
}


def gathered_gradients(seed, repeats=True):
    """A gradient with equal ids and padding, and what makes its rows, with weights.

    Its rows are those of bags, or rows that do not repeat.
    """
    rng = np.random.default_rng(seed)
    bags = B if repeats else B * L
    source = jnp.asarray(rng.normal(size=(bags, D)), jnp.float32)
    index = jnp.repeat(jnp.arange(bags, dtype=jnp.int32), B * L // bags)
    weight = jnp.asarray(rng.normal(size=B * L), jnp.float32)
    ids = jnp.asarray(rng.integers(0, V // 2, B * L), jnp.int32).at[7].set(V)
    rows = GatheredRows(source, index, weight, jnp.dtype(jnp.float32))
    return jmask.RowSparse(ids, rows.array(), (V, D)), rows


@pytest.mark.sampled
@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("apply", [jmask.apply_gradients, with_optax], ids=["one", "two"])
@pytest.mark.parametrize("name", EVERY)
def test_as_rows_in_an_array(monkeypatch, name, apply, repeats):
    for threshold in ("SMALL_ROWS", "DENSE_ROWS_FOR_EACH_LOOKUP"):
        monkeypatch.setattr(tuning, threshold, 0)
    monkeypatch.setattr(tuning, "BLOCK_ROWS", (3, 3))
    tx = EVERY[name]
    start = {"t": jnp.asarray(np.random.default_rng(9).normal(size=(V, D)), jnp.float32)}

    @jax.jit
    def run(gradient, known, state, params):
        if known is not None:
            GATHERED.note(gradient.values, known)
        return apply(tx, {"t": gradient}, state, params)

    results = []
    for kind in (0, 1):
        params, state = start, tx.init(start)
        for seed in range(3):
            gradient, known = gathered_gradients(seed, repeats)
            params, state = run(gradient, known if kind else None, state, params)
        results.append((params, state))
    assert_close(*results, rtol=2e-5, atol=1e-6)
    # Rows that no id names keep their bits.
    if name not in NOT_LAZY:
        np.testing.assert_array_equal(results[0][0]["t"][V // 2 :], start["t"][V // 2 :])


LARGE = ("sgd", "adam", "adagrad", "rowwise adagrad", "ftrl", "optax.adam")


@pytest.mark.of_cpus
@pytest.mark.sampled
@pytest.mark.parametrize("rows", [10**6, 2000])
@pytest.mark.parametrize("name", LARGE)
def test_a_step_of_bags_writes_no_row_out(name, rows):
    count, width = 102_400, 64
    loss = lambda table, ids: jnp.sum(jmask.embedding_bag(table, ids.reshape(-1, 5)) ** 2)
    table = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    compiled = compiled_step(loss, OPTIMIZERS[name], table, ids)
    # Bags are 5 MB, and all rows would be 26. XLA of JAX 0.10 keeps the bags once more.
    most = 12.6e6 if jax.__version_info__ >= (0, 12) else 18e6
    assert temporary_bytes(compiled, rows * width * 4) < most


@pytest.mark.of_cpus
def test_gradients_of_weights_take_the_products_of_an_einsum():
    """And less memory: their rows are read twice, and the cotangents of these not written."""
    tx, ids = OPTIMIZERS["adam"], jax.ShapeDtypeStruct((1024, 32), jnp.int32)
    table = {"t": jax.ShapeDtypeStruct((10**5, 64), jnp.float32)}
    params = table | {"w": jax.ShapeDtypeStruct((1024, 32), jnp.float32)}

    def products_and_memory(pool):
        loss = lambda p, ids: jnp.sum(pool(p["t"], ids, p["w"]) ** 2)
        step = lambda *a: jmask.apply_gradients(tx, jmask.grad(loss)(a[1], a[2]), a[0], a[1])
        compiled = jax.jit(step).lower(jax.eval_shape(tx.init, params), params, ids).compile()
        return len(re.findall(r" dot\(", compiled.as_text())), temporary_bytes(compiled)

    bags = products_and_memory(lambda t, ids, w: jmask.embedding_bag(t, ids, weights=w))
    by_hand = products_and_memory(lambda t, ids, w: jnp.einsum("bl,bld->bd", w, t[ids]))
    assert bags[0] == by_hand[0] == 2
    rows = 1024 * 32 * 64 * 4  # bytes of those that are read
    assert bags[1] < 1.2 * rows < by_hand[1] / 1.5


# Losses of parameters `p` and ids, by the names of the parameters.
_LATE = {
    "t w": """
        jnp.sum(p["t"][ids] * p["w"][..., None]);
        jnp.sum(jmask.embedding_bag(p["t"], ids, weights=p["w"]) ** 2);
        jax.checkpoint(lambda p: jnp.sum(jnp.sin(p["t"][ids]).sum(-1) * p["w"]))(p)
    """,
    "t scores": """
        jnp.sum(jmask.embedding_bag(p["t"], ids, weights=jax.nn.softmax(p["scores"][ids])) ** 2)
    """,
    "t u": """
        jnp.sum(p["t"][ids].sum(1) * p["u"][ids].mean(1));
        jnp.sum(jnp.sin(sum(jmask.embedding_bag(p[name], ids) for name in ("t", "u"))))
    """,
}
LATE = {
    code: (loss, names.split())
    for names, text in _LATE.items()
    for code, loss in functions("p, ids", globals())(text).items()
}
LINEAR = next(iter(LATE))


def late_step(name, tx, with_value, sharding=None):
    """Bytes of temporaries of a donated step, compiled, and of a table."""
    rows, width, bags, length = 400_000, 64, 512, 32
    sizes = {"t": (rows, width), "u": (rows, width), "w": (bags, length), "scores": (rows,)}
    loss, names = LATE[name]
    params = {x: jax.ShapeDtypeStruct(sizes[x], jnp.float32) for x in names}
    ids = jax.ShapeDtypeStruct((bags, length), jnp.int32)
    how = {"sharding": sharding, "with_value": with_value}
    compiled = compiled_step(loss, tx, params, ids, **how)
    return compiled.memory_analysis().temp_size_in_bytes, rows * width * 4


@pytest.mark.parametrize("with_value", [True, False], ids=["value_and_grad", "grad"])
@pytest.mark.parametrize("name", ["sgd", "adam", "optax.adam"])
@pytest.mark.parametrize("loss", LATE)
def test_tables_that_are_read_for_gradients_alone_are_written_after(loss, name, with_value):
    """A gradient of weights reads the rows again: not from a copy of the table."""
    temporaries, table = late_step(loss, OPTIMIZERS[name], with_value)
    assert temporaries < table / 2


# What a loss of a table, or of a stack of them, returns beside its value.
AUX = {
    "the rows": lambda table, ids, rows: rows,
    "other rows": lambda table, ids, rows: jnp.tanh(table[ids[::-1]]),
    "rows again": lambda table, ids, rows: jax.lax.stop_gradient(table)[ids],
    "bags": lambda table, ids, rows: {"bags": jmask.embedding_bag(table, ids), "step": 3},
    "a mean of all": lambda table, ids, rows: jnp.mean(table, 0),
    "signs": lambda table, ids, rows: (rows > 0, jnp.sum(rows).astype(int)),
}
# The value: what it needs of the rows (8, n, width) and of weights that are given.
BESIDE = {
    "squares": lambda rows, weights: jnp.sum(rows**2),
    # Gradients that need no rows, so that the loss alone keeps none of them.
    "products": lambda rows, weights: jnp.vdot(rows, weights),
    "products by lines": lambda rows, weights: sum(map(jnp.vdot, rows, weights)),
    "products of a stack": lambda rows, weights: sum(map(jnp.vdot, rows, weights)),
}


def step_with_aux(loss, aux, sharding=None):
    """Bytes of temporaries of a donated step whose loss has `aux`, compiled, and of a table."""
    stack = (8, 200_000, 128) if "stack" in loss else (10**6, 128)
    shapes_of = {"table": (stack, jnp.float32), "ids": ((8, 4096), jnp.int32)}
    shapes_of["weights"] = ((8, 4096, 128), jnp.float32)
    table, ids, weights = (jax.ShapeDtypeStruct(*x) for x in shapes_of.values())
    tx = jmask.sgd(0.1)

    def loss_fn(table, ids, weights):
        rows = table[jnp.arange(8)[:, None], ids] if table.ndim == 3 else table[ids]
        first = table[0] if table.ndim == 3 else table
        return BESIDE[loss](rows, weights), AUX[aux](first, ids, rows)

    def step(table, state, *batch):
        grads, beside = jmask.grad(loss_fn, has_aux=True)(table, *batch)
        return *jmask.apply_gradients(tx, grads, state, table), beside

    arguments = shapes((table, jax.eval_shape(tx.init, table), ids, weights), sharding)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes, 4 * table.size


def test_a_table_that_is_returned_as_it_is_is_not_read():
    loss = lambda t, ids: (jnp.sum(t[ids]), {"t": t, "called": jax.jit(lambda x: x)(t)})
    table = jax.ShapeDtypeStruct((10**5, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((512,), jnp.int32)
    indices = lambda *batch: jmask.grad(loss, has_aux=True)(*batch)[0].indices
    compiled = jax.jit(indices).lower(table, ids).compile()
    assert compiled.cost_analysis()["flops"] < table.size / 2


@pytest.mark.parametrize("aux", AUX)
@pytest.mark.parametrize("loss", BESIDE)
def test_tables_are_written_after_what_the_loss_returns_beside_its_value(loss, aux):
    temporaries, table = step_with_aux(loss, aux)
    assert temporaries < table / 2
