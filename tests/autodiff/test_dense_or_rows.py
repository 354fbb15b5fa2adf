"""Which gradients are dense, and what is said of it: remedies, fixed slices, layers of a graph.

neighbours = zeros.at[to].add(table[from])          LightGCN
((table + neighbours) / 2)[ids]
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmask
from tests.expressions import functions

IDS = jnp.array([7, 2, 7, 30])
V, D = 40_000, 8  # more than a megabyte
LOOK_UP_FIRST = "Look rows up first"
KEEP_ROWS = "Keep rows last, ids first"
PENALTY = "A penalty is on the rows that are looked up"
square = lambda x: jnp.sum(x * x)
of_squares = lambda f: lambda t: sum(map(square, jax.tree.leaves(f(t))))
# By the words of the remedy: what is dense, and what to write instead, where there is a way.
REWRITES = {
    LOOK_UP_FIRST: """
        jnp.sort(t, 0)[IDS] -> jnp.sort(t[IDS], 0);
        jax.lax.fori_loop(0, 3, lambda k, t: t.at[k].set(0), t)[IDS] -> t.at[0].set(0)[IDS];
        jax.lax.cond(t[0, 0] > 0, jnp.sin, jnp.cos, t)[IDS] -> jnp.sin(t[IDS]);
        custom(t)[IDS] -> custom(t[IDS]);
        jax.nn.softplus(t)[IDS] -> jax.nn.softplus(t[IDS]);
        jax.nn.relu(t @ SQUARE)[IDS] -> jax.nn.relu(t[IDS] @ SQUARE);
        jnp.abs(jnp.fft.rfft(t))[IDS] -> jnp.abs(jnp.fft.rfft(t[IDS]))
    """,
    PENALTY: """
        (t[IDS], 0.03 * t) -> (t[IDS], 0.03 * t[IDS]);
        (t[IDS], 0.03 * t[1:]) -> (t[IDS], 0.03 * t[1:][IDS]);
        (t[IDS], t[1:] - t[:-1]) -> (t[IDS], t[IDS + 1] - t[IDS])
    """,
    r"sharded by the `shard_map`.*`jmask\.embedding_lookup\(jmask\.sharded\(table": (
        "in_parts(lambda t: t[IDS], t)"
    ),
    r"one-hot matrix.*`table\[ids\]`": """
        jax.nn.one_hot(IDS, V) @ t -> t[IDS];
        jax.vmap(lambda i: jnp.float32(i == jnp.arange(V)) @ t)(IDS) -> t[IDS]
    """,
    KEEP_ROWS: "t.reshape(D, V)[:, IDS]",
    KEEP_ROWS + r".*columns after that, `table\[ids\]\[:, j\]`": """
        t.reshape(V, 2, -1)[IDS, 1] -> t.reshape(V, 2, -1)[IDS][:, 1]
    """,
}
CASES = [((V, D), *case) for case in REWRITES.items()]
# Lookups in what is computed from all of a table, row by row: rows all the same.
COMPUTED = """
    jax.nn.sigmoid(t)[IDS]; jnp.exp(t[:, :1])[IDS]; (t / norms(t))[IDS] + 1;
    jnp.repeat(t, 2, 0)[IDS]; jnp.broadcast_to(t, (2, V, D))[1][IDS]; jnp.tile(t, (2, 1))[IDS];
    jnp.tile(t, (1, 2))[IDS]; either(lambda i: t[i], IDS); steps(lambda i: t[i], IDS);
    jnp.where(frozen, jax.lax.stop_gradient(t), t)[IDS]; t.T.T[IDS]; (t @ SQUARE)[IDS];
    (t * jnp.arange(1.0, V + 1)[:, None])[IDS];
    jnp.einsum("m,mvd->vd", WEIGHTS, halves(t))[IDS];
    (t + jnp.flip(t, 0))[IDS]; jax.nn.softmax(t)[IDS];
    (t - t.mean(-1, keepdims=True))[IDS]; jnp.exp(t.reshape(-1))[IDS]
"""
SQUARE, WEIGHTS = jnp.linspace(-1, 1, D * 3).reshape(D, 3), jnp.array([0.5, -2.0])
halves = lambda t: t.reshape(2, V // 2, D)


@jax.custom_vjp
def custom(x):
    return jnp.sin(x)


custom.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.cos(x) * ct,))
norms = lambda x: jnp.linalg.norm(x, axis=1, keepdims=True)
frozen = jnp.arange(V)[:, None] < 5
frozen_rows = lambda rows: jnp.where(frozen[IDS], jax.lax.stop_gradient(rows), rows)
# `vmap` copies what the branches of a `cond` read, also inside a scan.
branch = lambda f: lambda i, x: jax.lax.cond(i > 5, f, lambda _: jnp.zeros(D), x)
either = lambda f, x: jax.vmap(branch(f))(IDS, x)
steps = lambda f, x: jax.vmap(lambda *pair: jax.lax.map(lambda p: branch(f)(*p), pair))(
    IDS[None], x[None]
)
in_parts = lambda f, t: jax.shard_map(
    f,
    mesh=jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)),
    in_specs=P("x"),
    out_specs=P("x"),
)(t)


@pytest.mark.parametrize(
    ("shape", "words", "line"),
    [(shape, words, line) for shape, words, text in CASES for line in text.split(";")],
)
def test_the_remedy_is_named_and_row_sparse(shape, words, line):
    found = functions("t", globals())(line.replace("->", ";"))
    dense, *rewritten = map(of_squares, found.values())
    table = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    with pytest.warns(jmask.StorageFallbackWarning, match=words) as said:
        gradient = jmask.grad(dense)(table)
    assert isinstance(gradient, jax.Array)
    assert len(said) == 1
    with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match=words):
        jmask.grad(dense)(table)
    for loss in rewritten:  # a warning is an error
        assert isinstance(jmask.grad(loss)(table), jmask.RowSparse)


@pytest.mark.parametrize("name", functions("t", globals())(COMPUTED))
def test_rows_of_what_is_computed_from_a_table(name):
    loss = of_squares(functions("t", globals())(COMPUTED)[name])
    table = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
    with jmask.strict():
        gradient = jax.jit(jmask.grad(loss))(table)
    assert gradient.nse <= 2 * len(IDS)
    np.testing.assert_allclose(gradient.todense(), jax.grad(loss)(table), rtol=1e-4, atol=1e-5)


def test_a_parameter_that_scales_a_table_has_its_own_gradient():
    loss = lambda params: square((params["s"] * params["t"])[IDS])
    params = {"s": jnp.float32(3), "t": jnp.ones((V, D))}
    gradient, dense = jmask.grad(loss)(params), jax.grad(loss)(params)
    np.testing.assert_allclose(gradient["s"], dense["s"], rtol=1e-5)
    np.testing.assert_allclose(gradient["t"].todense(), dense["t"], rtol=1e-5)


def test_one_hot_matrices_that_read_no_rows_are_not_reported():
    """Of experts, of which all are read, of labels, and beside logits of all rows."""
    for f in (
        lambda t: jax.nn.one_hot(jnp.arange(9) % 8, 8) @ t.reshape(8, -1),
        lambda t: jax.nn.log_softmax(jnp.ones((4, D)) @ t.T) * jax.nn.one_hot(IDS, V),
        lambda t: jax.nn.one_hot(IDS, V) @ t @ t.T,
    ):
        jmask.grad(of_squares(f))(jnp.ones((V, D)))


def test_vectors_that_are_no_tables_are_not_reported():
    """The greatest of all, say."""
    for f in (lambda v: jnp.sort(v)[IDS], lambda v: v * 2, lambda v: jnp.cumsum(v)[IDS]):
        jmask.grad(of_squares(f))(jnp.ones(V * D))


def test_positions_that_a_batch_shares_are_not_reported():
    """The last state of each sequence is looked up in what they are added to."""

    def loss(positions, hidden, last):
        states = jnp.tanh(hidden + positions[None])
        return square(states[jnp.arange(2), last])

    jmask.grad(loss)(jnp.ones((V, D)), jnp.ones((2, V, D)), jnp.array([3, 4]))


def test_parameters_with_no_more_rows_than_lookups_are_not_reported():
    """Transitions between tags, as a conditional random field counts and sums them."""
    tags = jnp.arange(30) % 5
    for f in (lambda t: (t[tags], jnp.exp(t)), lambda t: (t[tags[1:], tags[:-1]], t @ t)):
        jmask.grad(of_squares(f))(jnp.ones((5, 5)))
    with pytest.warns(jmask.StorageFallbackWarning, match=PENALTY):
        jmask.grad(of_squares(lambda t: (t[tags[:4]], jnp.exp(t))))(jnp.ones((5, 5)))


LARGE = jnp.linspace(-1, 1, 8000 * 64, dtype=jnp.float32).reshape(8000, 64)

# Slices, and the rows of a `RowSparse` gradient, or None where it is dense.
SLICES = {
    "a row": (lambda t: t[3], [3]),
    "the last row": (lambda t: t[-1], [7999]),
    "the first rows": (lambda t: t[:512], range(512)),
    "the last rows": (lambda t: t[-5:], range(7995, 8000)),
    "with steps": (lambda t: t[5:50:3], range(5, 50, 3)),
    "lax.slice": (lambda t: jax.lax.slice_in_dim(t, 2, 9), range(2, 9)),
    "two of them": (lambda t: t[:2] * t[4:6], [0, 1, 4, 5]),
    "as many as may be": (lambda t: t[:1000], range(1000)),
    "too many": (lambda t: t[:1001], None),
    "a few of a part": (lambda t: jnp.split(t, 2)[1][3:5], [4003, 4004]),
    "all of it in parts": (lambda t: jnp.concatenate(jnp.split(t, 16)), None),
    "columns": (lambda t: t[:, :3], None),
    "half of it, but for one": (lambda t: (t[IDS], t[:3999]), range(3999)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("jit", [False, True])
def test_slice(name, jit):
    f, rows = SLICES[name]
    gradient = jmask.grad(of_squares(f))
    gradient = (jax.jit(gradient) if jit else gradient)(LARGE)
    dense = jax.grad(of_squares(f))(LARGE)
    assert isinstance(gradient, jmask.RowSparse) == (rows is not None)
    if rows is not None:
        assert sorted(set(np.asarray(gradient.indices).tolist())) == list(rows)
        gradient = gradient.todense()
    np.testing.assert_allclose(gradient, dense, rtol=1e-6)


def test_small_tables_and_stacks_of_weights_stay_dense():
    """So does a slice of what has few rows, however large they are."""
    for shape in ((500, 4), (16, 40_000)):
        for loss in (lambda t: jnp.sum(t[0] ** 2), lambda t: t[0, 0]):
            assert isinstance(jmask.grad(loss)(jnp.ones(shape)), jax.Array)


SOURCES, TARGETS = np.random.default_rng(0).integers(0, 5000, (2, 10_000))
TABLE = jax.random.normal(jax.random.key(0), (5000, 64))
passed_on = lambda table: jnp.zeros_like(table).at[TARGETS].add(table[SOURCES])
LAYERS = {
    "neighbours alone": lambda t: passed_on(t),
    "one layer": lambda t: (t + passed_on(t)) / 2,
    "two layers": lambda t: t + passed_on(t) + passed_on(passed_on(t)),
    "segments": lambda t: t + jax.ops.segment_sum(t[SOURCES], TARGETS, 5000),
    "dense": lambda t: t @ jnp.ones((64, 64)) + passed_on(t),
}


@pytest.mark.parametrize("name", LAYERS)
def test_one_truth(name):
    """The gradient, what `grad` warns of and what `explain` says agree."""
    loss = lambda table: jnp.sum(LAYERS[name](table)[IDS] ** 2)
    with warnings.catch_warnings(record=True, action="always") as found:
        gradient = jmask.grad(loss)(TABLE)
    said = [str(x.message) for x in found]
    is_sparse = isinstance(gradient, jmask.RowSparse)
    explained = jmask.explain(loss, TABLE).parameters[0]
    dense = gradient.todense() if is_sparse else gradient
    np.testing.assert_allclose(dense, jax.grad(loss)(TABLE), rtol=2e-4, atol=1e-4)
    assert explained.is_sparse == is_sparse
    assert len(said) <= 1
    for text in said:
        assert "became dense" in text
    assert bool(said) == (not is_sparse) == ("needs all of it" in explained.note)
    if is_sparse:
        assert explained.nse == gradient.nse > len(TABLE)
        assert "`jmask.densify()`" in explained.note
