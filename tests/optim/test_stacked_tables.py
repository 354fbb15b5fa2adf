"""Optimizers of stacked tables (M, V, D), held against M tables that are stepped on their own.

Gradients have ids that repeat and are out of range, tables without any, and no ids at all; the
sizes of a stack coincide, and it has one table, or many rows. Rows that no id names keep their
bits. Row-wise optimizers are held against NumPy in float64, too.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jmask
from tests import numpy_optimizers
from tests.expressions import functions
from tests.optimizers import NOT_LAZY, OPTIMIZERS
from tests.oracle import assert_close
from tests.stored_tables import STEPS, mesh_of, stepped

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

RNG = np.random.default_rng(0)
# Those of few rows are updated densely, the last by its ids.
SHAPES = [(3, 7, 2), (4, 4, 4), (1, 5, 2), (2, 3, 1), (2, 3, 5, 2), (3, 700, 4)]
OTHERS = {
    "with averages": optax.chain(jmask.rowwise_adagrad(0.1), jmask.ema(0.5)),
    "lazy of a rule": jmask.lazy(
        optax.chain(optax.clip_by_global_norm(1.0), jmask.rowwise_adam(0.1))
    ),
    "scheduled": optax.chain(
        jmask.rowwise_adagrad(optax.linear_schedule(0.1, 0.01, 3)), jmask.max_row_norm(2.0)
    ),
    "injected": optax.inject_hyperparams(jmask.rowwise_adagrad)(learning_rate=0.1),
    "rows unless not finite": jmask.skip_nonfinite(jmask.adam(0.1, count="per_row")),
    "every other step": None,
    "for each table": optax.partition(
        {"t": jmask.rowwise_adagrad(0.3), "w": optax.sgd(0.1)}, {"t": "t", "w": "w"}
    ),
}
LAZY = OPTIMIZERS | OTHERS
OF_ROWS = ["rowwise adagrad", "rowwise adam", "adam per row", "with averages", "lazy of a rule"]


def gradients(shape, dtype=np.float32):
    """Gradients of three steps: (ids of tables, ids of rows, values)."""
    *stack, rows, size = shape
    tables = int(np.prod(stack))
    for n in (6, 0, 4):
        numbers = RNG.integers(0, tables, n) // 2 * 2  # each other table has none
        ids = RNG.integers(0, min(rows, 4), n)
        ids[3:4] = rows  # padding
        yield numbers, ids, RNG.normal(size=(n, size)).astype(dtype)


def stacked(shape, numbers, ids, values):
    index = np.where(ids < shape[-2], numbers * shape[-2] + ids, np.prod(shape[:-1]))
    return jmask.RowSparse(index, jnp.asarray(values), shape, leading=len(shape) - 1)


def separate(shape, numbers, ids, values):
    """The same gradient for each table of the stack."""
    tables = np.prod(shape[:-2])
    return [
        jmask.RowSparse(np.where(numbers == m, ids, shape[-2]), jnp.asarray(values), shape[-2:])
        for m in range(tables)
    ]


def trained(tx, params, steps, step, jit):
    tx = tx or jmask.multi_steps(jmask.rowwise_adagrad(0.1), 2, like=steps[0])
    return stepped(tx, params, steps, step, jax.jit if jit else lambda f: f)


def joined(tree, shape):
    """The stack of all that is a list of tables."""

    def stack(x):
        if not isinstance(x, list):
            return x
        arrays = [np.asarray(y) for y in x]
        return np.stack(arrays).reshape(*shape[:-2], *arrays[0].shape)

    return jax.tree.map(stack, tree, is_leaf=lambda x: isinstance(x, list))


@pytest.mark.parametrize(("step", "jit"), [("apply_gradients", True), ("update", False)])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *itertools.product(LAZY, [SHAPES[0], SHAPES[-1]]),
        *itertools.product(["adam", "rowwise adam", "with averages"], SHAPES[1:-1]),
    ],
    ids=str,
)
def test_as_tables_of_their_own(name, shape, step, jit):
    table = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    steps = list(gradients(shape))
    if LAZY[name] is None:  # has room for as many rows as the first gradient
        steps = [steps[0], steps[2]]
    dense = jnp.asarray(RNG.normal(size=3), jnp.float32)
    with_dense = lambda rows: [{"t": x, "w": dense * (k + 1)} for k, x in enumerate(rows)]
    start = {"t": table, "w": dense}
    params, state = trained(
        LAZY[name], start, with_dense(stacked(shape, *x) for x in steps), step, jit
    )
    tables = [*table.reshape(-1, *shape[-2:])]
    expected, states = trained(
        LAZY[name],
        {"t": tables, "w": dense},
        with_dense(separate(shape, *x) for x in steps),
        step,
        jit,
    )
    assert_close(params, joined(expected, shape), rtol=1e-5, atol=1e-6)
    if LAZY[name] is not None:
        assert_close(state, joined(states, shape), rtol=1e-5, atol=1e-6)
    touched = np.zeros(shape[:-1], bool).reshape(-1, shape[-2])
    for numbers, ids, _ in steps:
        touched[numbers[ids < shape[-2]], ids[ids < shape[-2]]] = True
    inactive = ~touched.reshape(shape[:-1])
    np.testing.assert_array_equal(params["t"][inactive], table[inactive])


@pytest.mark.parametrize(
    ("name", "dtype", "rtol"),
    [
        *((name, "float32", 1e-5) for name in NOT_LAZY),
        *itertools.product(OF_ROWS[:4], ["complex64", "bfloat16"], [2e-2]),
    ],
)
def test_densely_and_of_other_dtypes(name, dtype, rtol):
    """All rows move, or those of other dtypes, as those of tables of their own."""
    tx, shape = (LAZY | NOT_LAZY)[name], SHAPES[0]
    start, steps = jnp.asarray(RNG.normal(size=shape), dtype), [*gradients(shape, dtype)]
    params, _ = trained(tx, start, [stacked(shape, *x) for x in steps], "update", True)
    grads = [separate(shape, *x) for x in steps]
    expected, _ = trained(tx, [*start], grads, "update", True)
    np.testing.assert_allclose(params, jnp.stack(expected), rtol=rtol, atol=1e-6)


ROWWISE = (jmask.rowwise_adagrad, numpy_optimizers.RowwiseAdagrad)
MODELS = {
    "rowwise_adagrad": (*ROWWISE, {}),
    "decayed": (*ROWWISE, {"weight_decay": 0.5}),
    "not lazy": (*ROWWISE, {"lazy_update": False}),
    "rowwise_adam": (jmask.rowwise_adam, numpy_optimizers.RowwiseAdam, {"eps": 1e-3}),
    "adam": (jmask.adam, numpy_optimizers.Adam, {"count": "per_row", "eps": 1e-3}),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", [x for x in SHAPES if len(x) == 3], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_in_float64(name, shape, step):
    build, model, settings = MODELS[name]
    hyper = {"learning_rate": 0.1, **settings}
    start = RNG.normal(size=shape)
    is_lazy = hyper.get("lazy_update", True)
    models = [model(x, hyper, lazy=is_lazy) for x in start]
    steps = list(gradients(shape))
    grads = [stacked(shape, *x) for x in steps]
    params, state = trained(build(**hyper), jnp.float32(start), grads, step, True)
    for numbers, ids, values in steps:
        for m, x in enumerate(models):
            x.step(ids[numbers == m], values[numbers == m])
    np.testing.assert_allclose(params, [x.param for x in models], rtol=1e-4, atol=1e-5)
    for slot, expected in models[0].state.items():
        found = getattr(state, slot)
        assert found.shape == (shape[0], *expected.shape)
        wanted = [x.state[slot] for x in models]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adam", "rowwise adagrad", "with averages"])
@pytest.mark.parametrize("spec", [("x",), (None, "x"), (None, None, "x")], ids=str)
@pytest.mark.parametrize("axes", ["automatic", "explicit"])
def test_arrays_over_a_mesh(axes, spec, name):
    """Explicit axes over the rows of each table are refused; all else is the same."""
    mesh, tx = mesh_of(4, axes=axes), LAZY[name]
    table = jnp.asarray(RNG.normal(size=(4, 8, 4)), jnp.float32)
    out = NamedSharding(mesh, PartitionSpec(None, None)) if axes == "explicit" else None

    def step(table):
        lookup = lambda t: t.at[jnp.array([0, 2, 0]), jnp.array([1, 3, 1])].get(
            out_sharding=out
        )
        gradient = jmask.grad(lambda t: jnp.sum(jnp.sin(lookup(t))))(table)
        return jmask.apply_gradients(tx, gradient, tx.init(table), table)

    spec = PartitionSpec(*spec, *(None,) * (3 - len(spec)))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(table, NamedSharding(mesh, spec))
        if axes == "explicit" and spec[1]:
            with pytest.raises(ValueError, match=r"by the rows of each.*`tables\.reshape"):
                step(sharded)
            return
        found, out = jax.jit(step)(sharded), None
    assert_close(found, step(table), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [jmask.rowwise_adagrad, jmask.rowwise_adam])
def test_rows_of_several_dimensions_have_one_number(make):
    """Lookups of whole rows (F, D) of a table (V, F, D): as of the rows (F D,)."""
    shape, tx = (9, 3, 2), make(0.1)
    start, ids = jnp.asarray(RNG.normal(size=shape), jnp.float32), [1, 8, 1, 9]
    values = jnp.asarray(RNG.normal(size=(4, 3, 2)), jnp.float32)
    flat = jmask.RowSparse(ids, values.reshape(4, 6), (9, 6))
    expected, flat_state = trained(tx, start.reshape(9, 6), [flat] * 3, "update", True)
    params, state = trained(
        tx, start, [jmask.RowSparse(ids, values, shape)] * 3, "update", True
    )
    np.testing.assert_allclose(params.reshape(9, 6), expected, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(flat_state), strict=True):
        np.testing.assert_allclose(
            x.reshape(y.shape) if x.size == y.size else x[..., 0],
            y if x.size == y.size else np.broadcast_to(y, (9, 3)),
            rtol=1e-6,
        )


@pytest.mark.parametrize("shape", [(7, 5), (3, 7, 5), (700, 3)], ids=str)
@pytest.mark.parametrize("name", OF_ROWS)
def test_entries_move_their_rows(name, shape):
    """`table[s, a]` of (V, A): as the row of zeros that it is part of."""
    tx = LAZY[name]
    table = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    at = tuple(jnp.array([0, 2, 0, size - 1]) for size in shape)
    entries, rows = [], []
    for _ in range(3):
        weights = jnp.asarray(RNG.normal(size=4), jnp.float32)
        entries.append(jmask.grad(lambda t, w=weights: jnp.sum(t[at] * w))(table))
        several = lambda t, w=weights: jnp.sum(t[at[:-1]][jnp.arange(4), at[-1]] * w)
        rows.append(jmask.grad(several)(table))
    assert [x.leading for x in (entries[0], rows[0])] == [len(shape), len(shape) - 1]
    found, expected = (trained(tx, table, x, "apply_gradients", True) for x in (entries, rows))
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_averages_are_read():
    ema, t = jmask.ema(0.5), jnp.zeros((2, 3, 1))
    tx = optax.chain(jmask.sgd(1.0), ema)
    state, dense, average = tx.init(t), np.zeros((2, 3, 1)), np.zeros((2, 3, 1))
    for i in (0, 1, 1):
        gradient = jmask.grad(lambda t, i=i: -4 * t[i, jnp.array([2])].sum())(t)
        t, state = jmask.apply_gradients(tx, gradient, state, t)
        dense[i, 2] += 4
        average = (average + dense) / 2
    np.testing.assert_allclose(t, dense)
    np.testing.assert_allclose(ema.average(state, t), average)


@pytest.mark.parametrize("at", [(1, jnp.array([0, 2])), (jnp.array([0, 1]), 2, jnp.array([0]))])
def test_arrays_of_a_gradient_come_back(at):
    gradient = jmask.grad(lambda t: jnp.sum(t[at]))(jnp.ones((2, 3, 1)))
    again = jmask.from_arrays(jmask.to_arrays(gradient), gradient)
    assert again.leading == gradient.leading
    np.testing.assert_array_equal(again.todense(), gradient.todense())


def by_ndim(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


# What looks at the number of dimensions, or at whole rows.
OF_THE_TABLE = functions("", {**vars(optax), "jmask": jmask, "by_ndim": by_ndim})("""
    jmask.adamw(0.1, weight_decay=0.5, mask=by_ndim);
    jmask.lazy(adamw(0.1, weight_decay=0.5, mask=by_ndim));
    jmask.lazy(chain(masked(adam(0.1), by_ndim), scale(0.5)));
    jmask.lazy(partition({True: adam(0.1), False: set_to_zero()}, by_ndim));
    jmask.lazy(chain(centralize(), adam(0.1)));
    chain(jmask.sgd(0.1), jmask.max_row_norm(0.5));
    chain(jmask.clip_by_row_norm(0.5), jmask.sgd(0.1))
""")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", OF_THE_TABLE)
def test_the_optimizer_sees_the_shape_of_the_table(name, step):
    """Of a stack, one table of rows (1, D); of entries (V, D), the rows that hold them."""
    tx = OF_THE_TABLE[name]()
    table = jnp.asarray(RNG.normal(size=(3, 20, 4)), jnp.float32)
    values = jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32)
    stack = jmask.RowSparse([1, 45, 7], values, table.shape, leading=2)
    rows = jmask.RowSparse([1, 45, 7], values[:, None], (60, 1, 4))
    found = stepped(tx, table, [stack] * 2, step)
    expected = stepped(tx, table.reshape(60, 1, 4), [rows] * 2, step)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x.ravel(), y.ravel(), rtol=1e-6)

    entries = jmask.RowSparse([4, 14, 7], values[0, :3], (20, 4), leading=2)
    dense = entries.todense()
    rows = jmask.RowSparse([1, 3], dense[jnp.array([1, 3])], (20, 4))
    found, _ = stepped(tx, table[0], [entries], step)
    expected, _ = stepped(tx, table[0], [rows], step)
    moved = dense != 0 if any(x in name for x in ("adamw", "masked", "partition")) else True
    np.testing.assert_allclose(found, jnp.where(moved, expected, table[0]), rtol=1e-6)
