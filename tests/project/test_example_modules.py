"""Modules of the examples beside NumPy in float64, and what they read."""

import gzip
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.project.test_examples import load  # noqa: F401

# Examples are written as programs are, which may promote ranks and dtypes.
pytestmark = [pytest.mark.sampled(15), pytest.mark.rank_promotion, pytest.mark.dtype_promotion]


# --- stand-alone programs ---------------------------------------------------------------


def test_hash_grid(load):  # noqa: F811
    """Rows of corners, hashed where the grid has more than the table, weighted bilinearly."""
    grid, size, T = load("hash_grid"), 40, 512
    table = np.random.default_rng(0).normal(size=(16, T, 2)).astype(np.float32)
    places = np.random.default_rng(1).random((7, 2)).astype(np.float32)
    sides, expected = grid.cells(size), np.zeros((7, 16, 2))
    assert (sides[0], sides[-1]) == (16, 40)
    assert ((sides + 1) ** 2 > T).any()
    assert ((sides + 1) ** 2 <= T).any()
    for i, place in enumerate(places):
        for level, side in enumerate(int(x) for x in sides):
            scaled = place * np.float32(side)
            for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
                y, x = (int(np.floor(s)) + c for s, c in zip(scaled, corner, strict=True))
                row = y * (side + 1) + x
                if (side + 1) ** 2 > T:
                    row = (y ^ (x * 2_654_435_761) % 2**32) % T
                weight = np.prod(1 - np.abs(np.float64(scaled) - (y, x)))
                expected[i, level] += weight * table[level, row]
    found = jax.jit(grid.encoded, static_argnums=2)(table, places, size)
    np.testing.assert_allclose(found, expected.reshape(7, -1), atol=1e-4)


def test_sequences(load):  # noqa: F811
    """Ranks, no item is known before it is there, and a row-sparse gradient."""
    sequences = load("sequences")
    scores, wanted = np.array([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]), np.array([1, 2])
    hits, ndcg = sequences.measures(scores, wanted)
    assert (hits, round(ndcg, 4)) == (1, round((1 / np.log2(3) + 1) / 2, 4))
    assert sequences.measures(np.arange(30), np.array([29, 3])) == (0.5, 0.5)

    data = load("common.interactions").make_sequences(200, 50, 5, sequences.LENGTH + 1, 0)
    params, batch = (sequences.init_params(50, 4, 0), sequences.batch_of_step(data, 0, 1))
    np.testing.assert_array_equal(batch["items"][:, 1:], batch["next"][:, :-1])
    changed = np.array(batch["items"])
    changed[:, 9] = (changed[:, 9] + 1) % 50
    apart = np.abs(sequences.states(params, batch["items"]) - sequences.states(params, changed))
    assert (apart[:, :9] == 0).all()
    assert (apart[:, 9:].max((1, 2)) > 1e-4).all()
    follows = data.successor[data.items[:, :-1]] == data.items[:, 1:]
    assert 0.45 < follows.mean() < 0.75, "half of the time, and by chance"


# --- what is read -----------------------------------------------------------------------


def test_identifiers_and_imports(load):  # noqa: F811
    source = (
        'def total(rows, x1):  # sum of "them"\n'
        '    """Add the\n    rows."""\n'
        "    return accumulate(r'a\\'b', f\"{x}\", 0x1F, rows) + '''one\n'two''' + x1\n"
    )
    expected = ["total", "rows", "x1", "accumulate", "rows", "x1"]
    corpus = load("common.python_corpus")
    assert corpus.identifiers(source) == expected
    assert list(islice(corpus.python_files(), 50)) == list(islice(corpus.python_files(), 50))
    source = (
        "import os, numpy as np; x = 1\nfrom a.b import (c,\n d)\n"
        "from . import e\n    import f.g  # no\nimportant = 3\n"
    )
    assert load("light_gcn.graph").imported(source) == {"os", "numpy", "a.b", "f.g"}


def test_lines_of_criteo(load, tmp_path):  # noqa: F811
    """Labels, counts and bags as made-up lines give them, compressed or not, from any batch."""
    criteo, stand_in = load("dlrm.criteo"), load("dlrm.stand_in").StandIn(3, 2)
    lines = list(islice(stand_in.lines(), 2 * criteo.BATCH + 5))
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"".join(lines), 1))
    read = criteo.lines_of_file(tmp_path / "x.gz")
    first, second = criteo.batches(read, 100, 0, "x")
    fields = [line.rstrip(b"\n").split(b"\t") for line in lines]
    assert first["labels"].tolist() == [int(f[0]) for f in fields[: criteo.BATCH]]
    for line, f in enumerate(fields[: criteo.BATCH]):
        assert first["counts"][line].tolist() == [int(x or 0) for x in f[1:14]]
        bag = first["bags"]["C7"]
        ids = bag.ids[bag.offsets[line] : bag.offsets[line + 1]].tolist()
        assert ids == [int(x, 16) % 100 for x in f[20].split(b",") if x]
    (later,) = criteo.batches(lines, 100, 1, "x")
    for x, y in zip(jax.tree.leaves(later), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(x, y)


# --- models -----------------------------------------------------------------------------


def test_two_towers(load):  # noqa: F811
    """The loss masks equal items and corrects for frequency; recall counts the k best."""
    retrieval, rng = load("two_tower.retrieval"), np.random.default_rng(0)
    users, items = rng.normal(size=(2, 6, 4))
    ids = np.array([1, 2, 1, 3, 2, 2])
    items, frequency = items[ids], np.linspace(0.1, 0.4, 6)[ids]
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    scores = unit(users) @ unit(items).T / retrieval.TEMPERATURE - np.log(frequency)
    losses = [
        np.log(sum(np.exp(scores[i, j]) for j in range(6) if j == i or ids[j] != ids[i]))
        - scores[i, i]
        for i in range(6)
    ]
    batch = {"items": ids, "frequency": frequency}
    loss = jax.jit(retrieval.in_batch_softmax)(users, items, batch)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    wanted, eye = np.array([0, 1, 2, 0]), jnp.eye(4)
    assert [retrieval.recall(eye, eye, wanted, k) for k in (1, 2)] == [0.75, 1]


def test_knowledge_graph(load):  # noqa: F811
    """Entities stay of length one, others are not touched; ranks are filtered, ties half."""
    program, triples = load("knowledge_graph"), load("knowledge_graph.triples")
    params = program.init_params(500, 3, 8, 0)
    known = np.random.default_rng(0).integers(3, size=(50, 3), dtype=np.int32)
    batch, tx = next(program.random_batches(known, 200, 0)), program.optimizer(0.1)
    ours = program.make_step(jmask.lazy(tx), jmask.value_and_grad)
    stock = program.make_step(tx, jax.value_and_grad)
    copy = lambda: jax.tree.map(jnp.copy, (params, tx.init(params)))
    with jmask.strict():
        new, _, loss = ours(*copy(), batch)
    dense, _, expected = stock(*copy(), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(new["entities"][:200], dense["entities"][:200], atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(new["entities"], axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(new["entities"][200:], params["entities"][200:])

    none = np.zeros((0, 3), np.int32)
    known = np.array([[0, 0, 1], [0, 0, 2], [3, 0, 1]], np.int32)
    graph = triples.Graph(list("abcd"), ["r"], known, none, none)
    tails = np.array([[0.0, 5.0, 9.0, 6.0]])  # 2 is right too, 3 is better
    heads = np.array([[1.0, 1.0, 0.0, 9.0]])  # 3 is right too, 1 is level
    assert triples.ranks(graph, known[:1], tails, heads).tolist() == [[2.0], [1.5]]


def test_light_gcn(load, tmp_path):  # noqa: F811
    """Drawn neighbours are right on the average."""
    program, graph, rng = load("light_gcn"), load("light_gcn.graph"), np.random.default_rng(0)
    for i in range(80):
        modules = rng.choice(10, size=7, replace=False)
        text = "\n".join(f"import kind{i % 4}.module{k}" for k in modules)
        (tmp_path / f"{i}.py").write_text(text)
    found = graph.read_imports(sorted(tmp_path.glob("*.py")))
    assert (found.files, found.modules, len(found.edges)) == (80, 40, 80 * 6)
    assert all(found.held_out[file] not in x for file, x in graph.imports_of(found).items())

    params, batches = program.init_params(found, 4, 0), program.random_batches(found, 0)
    whole = [program.WholeGraph(found).all_vectors(params, side) for side in (0, 1)]
    sums, counts = [np.zeros(x.shape) for x in whole], [np.zeros(len(x)) for x in whole]
    for batch in islice(batches, 60):
        for name, side in (("file", 0), ("module", 1), ("other", 1)):
            rows = program.sampled(params, batch, name, side)
            np.add.at(sums[side], batch[name], np.asarray(rows))
            np.add.at(counts[side], batch[name], 1)
    for total, count, expected in zip(sums, counts, whole, strict=True):
        np.testing.assert_allclose(total / count[:, None], expected, atol=0.02)


def test_ngram_memory(load):  # noqa: F811
    """Ids are hashes of the last tokens, and no token sees the next."""
    model = load("ngram_memory.model")
    sizes = model.Sizes(vocabulary=50, width=16, layers=2, heads=2, length=12, row=4)
    tokens = np.random.default_rng(0).integers(50, size=(3, 13)).astype(np.int32)
    parts = model.parts_of(sizes, 1000)
    assert len(set(parts)) == sizes.lookups == 8
    ids = np.asarray(model.ngram_ids(jnp.asarray(tokens), sizes, 1000))
    factors = np.random.default_rng(0).integers(0, 2**31, (8, 8)) * 2 + 1
    for number, place in ((0, 4), (3, 0), (7, 9)):
        order, mixed = (2, 2, 2, 2, 3, 3, 3, 3)[number], 0
        for back in range(order):
            token = int(tokens[1, place - back]) + 1 if place >= back else 0
            mixed ^= token * int(factors[number, back]) % 2**32
        mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % 2**32
        mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
        mixed ^= mixed >> 16
        assert int(ids[1, place, number]) == sum(parts[:number]) + mixed % parts[number]

    params = model.init_params(sizes, 1000, seed=0)
    memory = np.random.default_rng(1).normal(size=params["memory"].shape)
    params["memory"] = jnp.asarray(memory, jnp.float32)
    changed = np.array(tokens)
    changed[:, 8] = (changed[:, 8] + 1) % 50
    losses = jax.jit(lambda tokens: model.losses(params, tokens, sizes, 1000))
    apart = np.abs(losses(tokens) - losses(changed))
    assert (apart[:, :7] < 1e-5).all(), "a loss is that of the next token"
    assert (apart[:, 7:10] > 1e-5).all()


def test_pieces_put_together_are_the_text(load, tmp_path):  # noqa: F811
    pieces = load("ngram_memory.pieces")
    (tmp_path / "x.py").write_text("def naïve(x):\n\treturn x2 == '10' # ok\n\n" * 50)
    read = pieces.read_text([tmp_path / "x.py"], 10**9, 280)
    numbers = (*read.train, *read.held_out)
    said = [bytes([n]) if n < 256 else read.pieces[n - 256].encode() for n in numbers]
    assert b"".join(said).decode() == (tmp_path / "x.py").read_text()
    assert read.train.max() < read.vocabulary <= 280
