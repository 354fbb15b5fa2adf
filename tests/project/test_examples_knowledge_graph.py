"""TransE on a small graph: it is learned, lengths stay one, ranks are right, errors clear."""

import re
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.project.test_examples import load  # noqa: F401

# Examples are written as programs are, which may promote ranks.
pytestmark = [pytest.mark.sampled(15), pytest.mark.rank_promotion, pytest.mark.dtype_promotion]

FAMILIES = 20


@pytest.fixture
def example(load, monkeypatch):  # noqa: F811
    module = load("knowledge_graph")
    monkeypatch.setattr(module, "MEASURE_EVERY", 100)
    return module


@pytest.fixture
def families(tmp_path):
    """Mothers and theirs."""
    triples = [
        (f"{head}{i}", relation, f"{tail}{i}")
        for i in range(FAMILIES)
        for head, relation, tail in (
            ("child", "mother", "mother"),
            ("mother", "mother", "grandmother"),
            ("child", "grandmother", "grandmother"),
        )
    ]
    text = "".join("\t".join(triple) + "\n" for triple in triples)
    for part in ("train", "valid", "test"):  # what it has seen, so that few steps are enough
        (tmp_path / f"{part}.txt").write_text(text)
    return tmp_path


@pytest.mark.slow
def test_learns_and_compares(example, families, tmp_path, capsys):
    png = tmp_path / "curve.png"
    run = ["--graph", str(families), "--dim", "32", "--steps", "400", "--many", "2000"]
    example.main([*run, "--plot", str(png)])
    printed = capsys.readouterr().out
    assert f"{3 * FAMILIES} entities, 2 relations" in printed
    assert float(re.search(r"held out: MRR ([\d.]+)", printed)[1]) > 0.6
    assert re.search(r"[\d.]+x as fast as stock optax", printed)

    from matplotlib.image import imread

    assert imread(png).std() > 0.01


def test_step(example):
    """Entities have length one, and only those of the batch are touched; as stock optax."""
    params = example.init_params(500, 3, 8, 0)
    triples = np.random.default_rng(0).integers(3, size=(50, 3), dtype=np.int32)
    batch = next(example.random_batches(triples, 200, 0))
    tx = example.optimizer(0.1)
    ours, stock = (
        example.make_step(tx, grad)
        for tx, grad in (
            (jmask.lazy(tx), jmask.value_and_grad),
            (tx, jax.value_and_grad),
        )
    )
    copy = lambda: jax.tree.map(jnp.copy, (params, tx.init(params)))
    with jmask.strict():
        new, _, loss = ours(*copy(), batch)
    dense, _, expected = stock(*copy(), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(new["entities"][:200], dense["entities"][:200], atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(new["entities"], axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(new["entities"][200:], params["entities"][200:])


def test_ranks(example):
    triples = import_module("triples")
    none = np.zeros((0, 3), np.int32)
    known = np.array([[0, 0, 1], [0, 0, 2], [3, 0, 1]], np.int32)
    graph = triples.Graph(list("abcd"), ["r"], known, none, none)
    tails = np.array([[0.0, 5.0, 9.0, 6.0]])  # 2 is right too, 3 is better
    heads = np.array([[1.0, 1.0, 0.0, 9.0]])  # 3 is right too, 1 is level
    assert triples.ranks(graph, known[:1], tails, heads).tolist() == [[2.0], [1.5]]


def test_errors(example, families, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"cannot read .*nowhere/train\.txt: No such file"):
        example.main(["--graph", "nowhere"])
    (families / "valid.txt").write_text("a\tb\tc\na b c\n")
    with pytest.raises(SystemExit, match=r"valid\.txt, line 2: expected head, relation and"):
        example.main(["--graph", str(families)])
    (families / "valid.txt").write_text("")
    with pytest.raises(SystemExit, match=r"valid\.txt is empty"):
        example.main(["--graph", str(families)])

    def missing(_):
        raise import_module("importlib.metadata").PackageNotFoundError

    monkeypatch.setattr(import_module("triples"), "files", missing)
    with pytest.raises(SystemExit, match="pip install --no-deps pykeen"):
        example.main([])
