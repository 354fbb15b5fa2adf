"""LightGCN on made-up imports: the graph that is read, ways that agree, a whole run."""

import re
from importlib import import_module

import jax
import numpy as np
import pytest

import jmask
from tests.project.test_examples import load  # noqa: F401

# Examples are written as programs are, which may promote ranks.
pytestmark = [pytest.mark.sampled(15), pytest.mark.rank_promotion, pytest.mark.dtype_promotion]


@pytest.fixture
def example(load, monkeypatch):  # noqa: F811
    module = load("light_gcn")
    monkeypatch.setattr(module, "MEASURE_EVERY", 40)
    return module


@pytest.fixture
def sources(tmp_path):
    """Files of four kinds, of which each imports most of ten modules of its own."""
    rng = np.random.default_rng(0)
    for i in range(80):
        chosen = rng.choice(10, size=7, replace=False)
        lines = [f"import kind{i % 4}.module{k}" for k in chosen]
        (tmp_path / f"{i}.py").write_text("\n".join(lines))
    return sorted(tmp_path.glob("*.py"))


def test_reads_imports(example):
    graph = import_module("import_graph")
    source = (
        "import os, numpy as np; x = 1\nfrom a.b import (c,\n d)\n"
        "from . import e\n    import f.g  # no\nimportant = 3\n"
    )
    assert graph.imported(source) == {"os", "numpy", "a.b", "f.g"}


def test_graph(example, sources):
    graph = import_module("import_graph")
    found = graph.read_imports(sources)
    assert (found.files, found.modules, len(found.edges)) == (80, 40, 80 * 6)
    known = graph.imports_of(found)
    assert all(found.held_out[file] not in known[file] for file in known)
    for side in (0, 1):
        ids, begins = graph.neighbours(found, side)
        for node in range(begins.size - 1):
            mine = found.edges[found.edges[:, side] == node, 1 - side]
            np.testing.assert_array_equal(ids[begins[node] : begins[node + 1]], mine)
    with pytest.raises(graph.GraphError, match="0 files with imports are too few"):
        graph.read_imports(sources[:3])


def test_drawn_neighbours_are_right_on_the_average(example, sources):
    graph = import_module("import_graph").read_imports(sources)
    params = example.init_params(graph, 4, 0)
    batches = example.random_batches(graph, 0)
    whole = [example.WholeGraph(graph).all_vectors(params, side) for side in (0, 1)]
    sums = [np.zeros(x.shape) for x in whole]
    counts = [np.zeros(len(x)) for x in whole]
    for _ in range(60):
        batch = next(batches)
        for name, side in (("file", 0), ("module", 1), ("other", 1)):
            rows = example.sampled(params, batch, name, side)
            np.add.at(sums[side], batch[name], np.asarray(rows))
            np.add.at(counts[side], batch[name], 1)
    for total, count, expected in zip(sums, counts, whole, strict=True):
        np.testing.assert_allclose(total / count[:, None], expected, atol=0.02)


def test_gradients(example, sources):
    """Of each way that of JAX; of those that read rows, rows."""
    graph = import_module("import_graph").read_imports(sources)
    params, batch = example.init_params(graph, 4, 0), next(example.random_batches(graph, 0))
    for vectors in (example.factorized, example.sampled):
        loss_fn = example.loss_of(vectors)
        with jmask.strict():
            grads = jax.jit(jmask.grad(loss_fn))(params, batch)
        expected = jax.grad(loss_fn)(params, batch)
        for name, gradient in grads.items():
            assert isinstance(gradient, jmask.RowSparse)
            np.testing.assert_allclose(gradient.todense(), expected[name], atol=1e-4)


def test_learns_and_compares(example, sources, tmp_path, capsys, monkeypatch):
    graph = import_module("import_graph").read_imports(sources)
    monkeypatch.setattr(example, "read_imports", lambda most: graph)
    png = tmp_path / "recall.png"
    run = ["--dim", "8", "--steps", "80", "--many", "500", "--plot", str(png)]
    example.main(run)
    printed = capsys.readouterr().out
    assert "80 files, 40 modules, 480 imports" in printed
    recalls = re.findall(r"│ (\d+\.\d)%", printed)
    assert len(recalls) == 3
    assert min(map(float, recalls)) > 80, "chance is 20 of 34"

    from matplotlib.image import imread

    assert imread(png).std() > 0.01
