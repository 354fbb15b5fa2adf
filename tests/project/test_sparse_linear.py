"""The sparse-features example: run whole on a small text, its texts, batches and errors."""

import random
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from tests.project.test_examples import load  # noqa: F401

# Examples are written as programs are, which may promote ranks.
pytestmark = [pytest.mark.sampled(15), pytest.mark.rank_promotion, pytest.mark.dtype_promotion]

WORDS = {"animals": ["cat", "dog", "horse"], "colours": ["red", "green", "blue"]}
SMALL = ["--columns", "4096", "--epochs", "15", "--largest", "4"]


@pytest.fixture
def example(load):  # noqa: F811
    return load("sparse_linear")


@pytest.fixture
def labelled(load):  # noqa: F811
    return load("labelled_texts")


@pytest.fixture
def text(tmp_path):
    """Some animals or some colours in each line, among words that say nothing."""
    rng = random.Random(0)
    lines = []
    for _ in range(400):
        label = rng.choice(list(WORDS))
        words = rng.choices(WORDS[label], k=2) + rng.choices(["see", "the", "old"], k=3)
        lines.append(f"{label}\t{' '.join(rng.sample(words, 5))} {rng.random():.6f}")
    path = tmp_path / "text.tsv"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_learns_and_compares(example, text, capsys):
    example.main([str(text), *SMALL])
    printed = capsys.readouterr().out
    assert re.search(r"400 texts, \d+ of them held out; labels: animals, colours", printed)
    for name in ("SGD", "Adagrad", "Adam"):
        accuracy, loss = re.search(rf"│ {name} +│ +([\d.]+)% │ +([\d.]+) │", printed).groups()
        assert float(accuracy) > 95
        assert float(loss) < 0.3
    for label, words in WORDS.items():
        telling = re.search(rf"│ {label} +│ (.*?) *│", printed)[1].split()
        assert set(telling[:3]) == set(words)
    ours, stock, ratio, apart = re.search(
        r"│ +16 │ +([\d.]+) ms │ +([\d.]+) ms │ +([\d.]+)x │ +(\S+) │", printed
    ).groups()
    assert min(float(ours), float(stock), float(ratio)) >= 0
    assert float(apart) < 1e-4


def test_batches_have_one_shape_and_every_text_once(example):
    texts = ["a b c d", "", "e f", "a " * 50, *(f"x{i} y{i} z" for i in range(300))]
    features = example.hashed(texts)
    batches = example.Batches(features, np.arange(len(texts)))
    order = np.random.default_rng(0).permutation(len(texts))
    made = list(batches.of(order, 1000))
    assert len({tuple(x.shape for x in (b["x"].data, b["x"].indptr)) for b in made}) == 1
    seen = np.concatenate([b["labels"][b["is_text"]] for b in made])
    np.testing.assert_array_equal(seen, order)
    for batch in made:
        wanted = features[batch["labels"][batch["is_text"]]].tocoo()
        dense = np.zeros((example.ROWS, 1000))
        np.add.at(dense, (wanted.row, wanted.col % 1000), wanted.data)
        result = example.jmask.dot(batch["x"], np.eye(1000, dtype=np.float32))
        np.testing.assert_allclose(result, dense, atol=1e-6)


def test_functions_of_packages(labelled, tmp_path, monkeypatch):
    """Functions by package, without what names one, held out by file."""
    site = tmp_path / "site"
    body = "".join(f"    import alpha\n    x{i} = BETA_{i} + np.y\n" for i in range(4))
    for package in ("alpha", "beta"):
        (site / package / "_vendor").mkdir(parents=True)
        (site / package / "_vendor" / "copy.py").write_text(f"def copy():\n{body}")
        for i in range(20):
            source = f"def f_{package}{i}(\n    a,\n):\n{body}\n\nclass C:\n  def short(): 1\n"
            (site / package / f"m{i}.py").write_text(source)
    monkeypatch.setattr(labelled, "python_files", lambda: sorted(site.rglob("*.py")))
    monkeypatch.setattr(
        labelled.sysconfig, "get_paths", lambda: {"purelib": site, "platlib": site}
    )
    texts = labelled.texts_from_python(2)
    assert sorted(texts.names) == ["alpha", "beta"]
    assert np.bincount(texts.labels).tolist() == [20, 20]
    assert len(texts.texts) == 40
    for text in texts.texts:
        assert re.match(r"def f_\d+\(\n    a,\n\):\n", text)
        assert text.count("x") == 4
        assert not re.search("alpha|beta|import|np|short|copy", text, re.IGNORECASE)
    assert 0 < texts.held_out.sum() < 40


def test_equal_lines_are_on_one_side(labelled, tmp_path):
    path = tmp_path / "text.tsv"
    path.write_text("".join(f"{'ab'[i % 2]}\ttext {i % 40}\n\n" for i in range(200)))
    texts = labelled.texts_from_file(path)
    sides = {text: set() for text in texts.texts}
    for text, held_out in zip(texts.texts, texts.held_out, strict=True):
        sides[text].add(bool(held_out))
        assert held_out == (zlib.crc32(text.encode()) % 5 == 0)
    assert all(len(side) == 1 for side in sides.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read .*text\.tsv: No such file"),
        ("", r"text\.tsv is empty: there are no texts"),
        (" \n\n", r"text\.tsv is empty"),
        ("a\tone\nb\n", r"text\.tsv, line 2: expected a label, a tab and a text"),
        ("a\t \n", "line 1: expected"),
        ("\tone\n", "line 1: expected"),
        ("".join(f"a\tt{i}\n" for i in range(50)), "two labels or more are needed, got 1"),
        ("a\ttext 1\nb\ttext 2\n", "2 texts are too few to hold some out"),
        ("a\ttext 1\nb\ttext 3\n", "2 texts are too few to hold some out"),
    ],
)
def test_bad_files(example, tmp_path, content, message):
    path = tmp_path / "text.tsv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=message) as error:
        example.main([str(path)])
    assert error.value.code not in (0, None)


def test_help_names_what_the_file_is(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--help"])
    assert "lines of: label, tab, text" in capsys.readouterr().out
    assert Path(example.__file__).name in example.__doc__
