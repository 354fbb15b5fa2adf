"""Which gradients are dense, and what is said of it: remedies, fixed slices, layers of a graph.

neighbours = zeros.at[to].add(table[from])          LightGCN
((table + neighbours) / 2)[ids]
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmask
from tests.expressions import functions
from tests.lookup_programs import TABLE

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
        lax.fori_loop(0, 3, lambda k, t: t.at[k].set(0), t)[IDS] -> t.at[0].set(0)[IDS];
        lax.cond(t[0, 0] > 0, jnp.sin, jnp.cos, t)[IDS] -> jnp.sin(t[IDS]);
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
    r"logits.*sampled.*jmask.densify": """
        t[IDS] @ t.T -> t[IDS] @ t[IDS + 1].T;
        (t @ SQUARE)[IDS] @ (t @ SQUARE).T -> (t @ SQUARE)[IDS] @ (t @ SQUARE)[IDS + 1].T
    """,
    r"sharded by the `shard_map`.*`jmask\.embedding_lookup\(jmask\.sharded\(table": (
        "in_parts(lambda t: t[IDS], t)"
    ),
    r"one-hot matrix.*`table\[ids\]`": """
        jax.nn.one_hot(IDS, V) @ t -> t[IDS];
        jax.vmap(lambda i: jnp.float32(i == jnp.arange(V)) @ t)(IDS) -> t[IDS]
    """,
    KEEP_ROWS: """
        t.reshape(D, V)[:, IDS]; stack(t)[0].T[IDS % D]; stack(t)[..., IDS % D];
        stack(t)[0][:, IDS % 2]; columns(stack(t)[0])
    """
    + "; jax.new_ref(t)[IDS]" * (jax.__version_info__ >= (0, 11)),
    KEEP_ROWS + r".*columns after that, `table\[ids\]\[:, j\]`": """
        t.reshape(V, 2, -1)[IDS, 1] -> t.reshape(V, 2, -1)[IDS][:, 1]
    """,
}
CASES = [(words, line) for words, text in REWRITES.items() for line in text.split(";")]
# Dense, and nothing to say of it.
SILENT = {
    "a one-hot matrix of experts, of which all are read": (
        (V, D), lambda t: jax.nn.one_hot(jnp.arange(9) % 8, 8) @ t.reshape(8, -1),
    ),
    "labels, beside logits of all rows": (
        (V, D), lambda t: jax.nn.log_softmax(jnp.ones((4, D)) @ t.T) * jax.nn.one_hot(IDS, V),
    ),
    "one-hot ids, then logits": ((V, D), lambda t: jax.nn.one_hot(IDS, V) @ t @ t.T),
    "vectors, of which the greatest are taken": ((V * D,), lambda v: jnp.sort(v)[IDS]),
    "vectors that are scaled": ((V * D,), lambda v: v * 2),
    "vectors that are summed up": ((V * D,), lambda v: jnp.cumsum(v)[IDS]),
    # Transitions between tags, as a conditional random field counts and sums them.
    "no more rows than lookups": ((5, 5), lambda t: (t[TAGS], jnp.exp(t))),
    "no more pairs than lookups": ((5, 5), lambda t: (t[TAGS[1:], TAGS[:-1]], t @ t)),
    "weights of layers": ((3, 600, 600), lambda w: jnp.tanh(w[0] @ w[1].T) @ w[2]),
    "a row of a small table": ((500, 4), lambda t: t[0]),
    "an entry of a stack of weights": ((16, 40_000), lambda t: t[0, 0]),
    # What is looked up is an activation.
    "the bias of logits": ((V,), lambda b: of_labels(jnp.ones((4, V)) + b[None])),
    "logits of one example": ((V, D), lambda w: of_labels((w @ jnp.ones(D))[None])),
    "a bias of one example": ((V,), lambda b: of_labels((jnp.ones(V) + b)[None])),
    "positions of sequences, then the last of each": (
        (40, D), lambda t: last_of(jnp.ones((9, 20, D)) + t[None, :20]),
    ),
    "all positions, then the last of each": (
        (40, D), lambda t: last_of(jnp.ones((2, 40, D)) + t[None]),
    ),
    "large positions": ((V, D), lambda t: last_of(jnp.ones((2, V, D)) + t[None])),
    "the state that a loop over lookups begins with": (
        (D,), lambda h: lax.scan(lambda h, i: (jnp.tanh(h * SQUARE[i, 0]), h), h, IDS % D),
    ),
    "what a solver permutes": ((5, 3), lambda b: jnp.linalg.solve(jnp.eye(5) + 0.1, b)),
}  # fmt: skip
of_labels = lambda x: (jnp.exp(x).sum(1), jnp.take_along_axis(x, IDS[: len(x), None], 1))
last_of = lambda x: jnp.tanh(x)[jnp.arange(len(x)), 7] + jnp.sin(x).sum(1)
SQUARE, TAGS = jnp.linspace(-1, 1, D * 3).reshape(D, 3), jnp.arange(30) % 5
stack = lambda t: t.reshape(4, V // 4, D)
columns = lambda t: jax.vmap(lambda i: lax.dynamic_slice_in_dim(t, i, 1, axis=1))(IDS % 2)


@jax.custom_vjp
def custom(x):
    return jnp.sin(x)


custom.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.cos(x) * ct,))
in_parts = lambda f, t: jax.shard_map(
    f,
    mesh=jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)),
    in_specs=P("x"),
    out_specs=P("x"),
)(t)


def said_of(loss, *args):
    """The gradient, and what was said of it."""
    with warnings.catch_warnings(record=True, action="always") as found:
        gradient = jmask.grad(loss)(*args)
    assert all(issubclass(x.category, jmask.StorageFallbackWarning) for x in found)
    return gradient, [str(x.message) for x in found]


@pytest.mark.each
@pytest.mark.parametrize(("words", "line"), CASES)
def test_the_remedy_is_named_and_row_sparse(words, line):
    found = functions("t", globals())(line.replace("->", ";"))
    dense, *rewritten = map(of_squares, found.values())
    table = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
    with pytest.warns(jmask.StorageFallbackWarning, match=f"(?s){words}") as said:
        gradient = jmask.grad(dense)(table)
    assert isinstance(gradient, jax.Array)
    assert len(said) == 1
    assert f"{__file__}:" in str(said[0].message)
    with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match=f"(?s){words}"):
        jmask.grad(dense)(table)
    for loss in rewritten:  # a warning is an error
        assert isinstance(jmask.grad(loss)(table), jmask.RowSparse)


def test_what_is_dense_and_not_reported():
    for name, (shape, function) in SILENT.items():  # a warning is an error
        assert isinstance(jmask.grad(of_squares(function))(jnp.ones(shape)), jax.Array), name


def test_parameters_with_more_rows_than_lookups_are_reported():
    """Those with as many are not."""
    with pytest.warns(jmask.StorageFallbackWarning, match=PENALTY):
        jmask.grad(of_squares(lambda t: (t[TAGS[:4]], jnp.exp(t))))(jnp.ones((5, 5)))


@pytest.mark.parametrize("rows", [1000, 999])
def test_each_of_several_tables_is_reported_by_its_name(rows):
    """Of one shape or of others; beside a table with rows nothing is said of it."""
    params = {"a": jnp.ones((1000, 8)), "b": jnp.ones((rows, 8)), "c": jnp.ones((1000, 8))}
    tied = lambda t: square(t[IDS] @ t.T)
    gradient, said = said_of(
        lambda p: tied(p["a"]) + tied(p["b"]) + square(p["c"][IDS]), params
    )
    assert len(said) == 2
    assert all(f"`p['{name}']`" in text for name, text in zip("ab", said, strict=True))
    assert isinstance(gradient["c"], jmask.RowSparse)
    gradient, said = said_of(lambda p: square(p["a"][IDS]) + square(p["c"]), params)
    assert isinstance(gradient["a"], jmask.RowSparse)
    assert isinstance(gradient["c"], jax.Array)
    assert not said


def test_what_is_printed_is_no_use():
    def loss(table):
        jax.debug.callback(lambda *given: None, table, 2 * table)
        return square(table[IDS[:3]])

    with jmask.strict():
        assert jmask.grad(loss)(TABLE).nse == 3


# --- fixed slices ------------------------------------------------------------------------

LARGE = jnp.linspace(-1, 1, 8000 * 64, dtype=jnp.float32).reshape(8000, 64)
# Slices, and the rows of a `RowSparse` gradient, or None where it is dense.
SLICES = {
    "a row": (lambda t: t[3], [3]),
    "the last row": (lambda t: t[-1], [7999]),
    "the first rows": (lambda t: t[:512], range(512)),
    "the last rows": (lambda t: t[-5:], range(7995, 8000)),
    "with steps": (lambda t: t[5:50:3], range(5, 50, 3)),
    "lax.slice": (lambda t: lax.slice_in_dim(t, 2, 9), range(2, 9)),
    "two of them": (lambda t: t[:2] * t[4:6], [0, 1, 4, 5]),
    "as many as may be": (lambda t: t[:1000], range(1000)),
    "too many": (lambda t: t[:1001], None),
    "one with a new dimension": (lambda t: t[3][None], [3]),
    "stacked": (lambda t: jnp.stack([t[1], t[9], jnp.ones(64)]), [1, 9]),
    "in front of each": (lambda t: (jnp.tile(t[0], (2, 3, 1)), t[IDS]), [0, 2, 7, 30]),
    "a few of a part": (lambda t: jnp.split(t, 2)[1][3:5], [4003, 4004]),
    "all of it in parts": (lambda t: jnp.concatenate(jnp.split(t, 16)), None),
    "all of it, part by part": (lambda t: lax.map(jnp.sin, t.reshape(16, 500, 64)), None),
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


# --- the gradient, the warning and `explain` -----------------------------------------------

SOURCES, TARGETS = np.random.default_rng(0).integers(0, 5000, (2, 10_000))
passed_on = lambda table: jnp.zeros_like(table).at[TARGETS].add(table[SOURCES])


def on_the_host(table):
    if jax.__version_info__ < (0, 11):
        with compute_on("device_host"):
            return jax.jit(lambda t: t[IDS])(table)
    where = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Device}
    return compute_on(lambda t: t[IDS], **where)(table)


def of_a_root(t):
    solve = lambda f, start: start + f(start)
    start = jnp.zeros((len(IDS), t.shape[1]))
    return lax.custom_root(lambda x: t[IDS] - x, start, solve, lambda f, y: -y)


PROGRAMS = {
    "neighbours alone": lambda t: passed_on(t)[IDS],
    "one layer": lambda t: ((t + passed_on(t)) / 2)[IDS],
    "two layers": lambda t: (t + passed_on(t) + passed_on(passed_on(t)))[IDS],
    "segments": lambda t: (t + jax.ops.segment_sum(t[SOURCES], TARGETS, 5000))[IDS],
    "a layer of all": lambda t: (t @ jnp.ones((64, 64)) + passed_on(t))[IDS],
    # The last state of each sequence is looked up in what positions are added to.
    "positions": lambda t: jnp.tanh(1 + jnp.stack([t, t]))[jnp.arange(2), IDS[:2]],
    "on the host": on_the_host,
    "of a root": of_a_root,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_truth(name):
    """The gradient, what `grad` warns of and what `explain` says agree."""
    table = jax.random.normal(jax.random.key(0), (5000, 64))
    loss = of_squares(PROGRAMS[name])
    gradient, said = said_of(loss, table)
    is_sparse = isinstance(gradient, jmask.RowSparse)
    explained = jmask.explain(loss, table).parameters[0]
    dense = gradient.todense() if is_sparse else gradient
    np.testing.assert_allclose(dense, jax.grad(loss)(table), rtol=2e-4, atol=1e-4)
    assert explained.is_sparse == is_sparse
    assert len(said) == (not is_sparse)
    assert all("became dense" in text for text in said)
    if is_sparse:
        assert explained.nse == gradient.nse
        assert ("`jmask.densify()`" in explained.note) == (gradient.nse > len(table))
