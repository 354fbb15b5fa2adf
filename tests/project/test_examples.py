"""The examples: word2vec run whole on a small text, small ones, and what all of them refuse."""

import importlib.util
import itertools
import random
import re
import sys
from pathlib import Path

import pytest

# Examples are written as programs are, which may promote ranks.
pytestmark = [pytest.mark.sampled(15), pytest.mark.rank_promotion]

EXAMPLES = Path(__file__).parents[2] / "examples"
ANIMALS = ["cat", "dog", "horse", "cow"]
COLOURS = ["red", "green", "blue", "yellow"]
SMALL = ["--steps", "150", "--dim", "16"]


REFUSED = [
    ("word2vec", "--steps 0", "argument --steps: 0 is not positive"),
    ("word2vec", "--seconds -1", "argument --seconds: -1 is not"),
    ("word2vec", "--seconds nan", "argument --seconds: nan is not"),
    ("word2vec", "--map nowhere/map.png", "argument --map: nowhere/map.png "),
    ("dense_equivalent", "--rows 1", "less than 2"),
    ("dense_equivalent", "--plot nowhere/x.png", "not a file"),
    ("dlrm", "--rows 0", "argument --rows: 0 is not positive"),
    ("dlrm", "--values 0", "argument --values: 0 is not positive"),
    ("dlrm", "--steps -1", "argument --steps: -1 is not positive"),
    ("dlrm", "--plot nowhere/x.png", "argument --plot: nowhere/x.png is not a file"),
    ("knowledge_graph", "--dim 0", "argument --dim: 0 is not positive"),
    ("knowledge_graph", "--plot nowhere/x.png", "argument --plot: nowhere/x.png is not a file"),
    ("light_gcn", "--dim 0", "argument --dim: 0 is not positive"),
    ("light_gcn", "--plot nowhere/x.png", "argument --plot: nowhere/x.png is not a file"),
    ("low_precision", "--steps 1", "must be at least 50"),
    ("ngram_memory", "--seconds 0", "argument --seconds: 0 is not positive"),
    ("ngram_memory", "--rows 1.5", "argument --rows: 1.5 is no number of rows"),
    ("ngram_memory", "--width 12", "argument --width: 12 is not a multiple of 8"),
    ("ngram_memory", "--row 0", "argument --row: 0 is not positive"),
    ("ngram_memory", "--vocabulary 256", "--vocabulary: 256 is not more than 256 bytes"),
    ("ngram_memory", "--plot nowhere/x.png", "nowhere/x.png is not a file in a dir"),
    ("sharded_embedding", "--processes 3", "8 devices are not for 3 processes alike"),
    ("sharded_embedding", "--process 1", "--process and --coordinator belong together"),
    ("sharded_embedding", "--processes 2 --process 2 --coordinator x:1", "is not one of 2"),
    ("sharded_embedding", "--words 9", "is less than one for each of 10 groups"),
    ("sharded_embedding", "--steps -1", "argument --steps: -1 is negative"),
    ("sharded_embedding", "--export nowhere/x.npz", "--export: nowhere is not a folder"),
    ("sharded_embedding", "--dim 0", "argument --dim: 0 is not positive"),
    ("sparse_linear", "--epochs 0", "argument --epochs: 0 is not positive"),
    ("sparse_linear", "--columns 99999999", "--columns: 99999999 is more than 16777216"),
    ("sparse_linear", "--largest 30", "argument --largest: 30 is not between 4 and 24"),
    ("sparse_linear", "--packages two", "argument --packages: invalid"),
    ("two_tower", "--steps 0", "argument --steps: 0 is not positive"),
    ("two_tower", "--items 20", "argument --items: 20 items are too few for 50 groups"),
    ("two_tower", "--framework torch", "argument --framework: invalid choice: 'torch'"),
    ("two_tower", "--plot nowhere/x.png", "nowhere/x.png is not a file in a dir"),
]


@pytest.fixture
def load(monkeypatch):
    """Imports an example by name, as if run from its folder."""
    for package in ("matplotlib", "rich", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("COLUMNS", "100")

    def load(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def word2vec(load):
    return load("word2vec")


@pytest.fixture
def text(tmp_path):
    """Animals stand near animals, colours near colours."""
    rng = random.Random(0)
    groups = [ANIMALS, COLOURS, [f"{a}{b}" for a in "xyz" for b in "abcdefgh"]]
    lines = [" ".join(rng.choices(rng.choice(groups), k=40)) for _ in range(500)]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_trains_maps_and_compares(word2vec, text, tmp_path, capsys):
    png = tmp_path / "map.png"
    word2vec.main([str(text), "--map", str(png), *SMALL])
    printed = capsys.readouterr().out

    first, last = re.search(r"loss ([\d.]+) -> ([\d.]+)", printed).groups()
    assert float(last) < 0.9 * float(first)
    assert "150 steps" in printed
    assert float(re.search(r"([\d.]+)x as fast as stock optax", printed)[1]) > 0
    assert float(re.search(r"differ by at most (\S+)", printed)[1]) < 1e-4
    neighbours = re.search(r"│ red +│ (.*?) *│", printed)[1].split(", ")
    assert set(neighbours[:3]) == set(COLOURS) - {"red"}

    from matplotlib.image import imread

    picture = imread(png)
    assert picture.shape[0] > 500
    assert picture.std() > 0.01


def test_trains_for_the_given_seconds(word2vec):
    step = lambda params, opt_state, batch: (params, opt_state, batch)
    console = word2vec.Console(quiet=True)
    batches = itertools.repeat(4096.0)
    trained = word2vec.train(step, {}, (), batches, None, 0.05, console)
    assert 0.05 <= trained.seconds < 1
    assert trained.steps > 1
    assert set(trained.losses) == {1.0}


def test_names_a_missing_file(word2vec, tmp_path):
    with pytest.raises(SystemExit, match=r"cannot read .*nowhere\.txt: No such file"):
        word2vec.main([str(tmp_path / "nowhere.txt")])


def test_names_an_unreadable_file(word2vec, tmp_path):
    with pytest.raises(SystemExit, match=f"cannot read {re.escape(str(tmp_path))}: "):
        word2vec.main([str(tmp_path)])


def test_names_an_empty_file(word2vec, text, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("  \n")
    with pytest.raises(SystemExit, match=r"empty\.txt is empty"):
        word2vec.main([str(text), str(empty)])


def test_refuses_a_text_of_one_word(word2vec, tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("same " * 100)
    with pytest.raises(SystemExit, match="1 different words are too few"):
        word2vec.main([str(path)])


def test_identifiers_leave_out_comments_strings_and_keywords(word2vec):
    import python_corpus

    source = (
        'def total(rows, x1):  # sum of "them"\n'
        '    """Add the\n    rows."""\n'
        "    return accumulate(r'a\\'b', f\"{x}\", 0x1F, rows) + '''one\n'two''' + x1\n"
    )
    expected = ["total", "rows", "x1", "accumulate", "rows", "x1"]
    assert python_corpus.identifiers(source) == expected


def test_finds_the_standard_library_in_order(word2vec):
    import python_corpus

    files = list(python_corpus.python_files())
    assert any(file.name == "argparse.py" for file in files)
    assert files == list(python_corpus.python_files())


def test_masked_adagrad(load, capsys):
    """The numbers of the tutorial, on every storage."""
    load("masked_adagrad").main()
    printed = capsys.readouterr().out
    first = "[[0.0, 1.0, 1.9027, 3.0], [3.9015, 5.0, 5.901, 7.0]]"
    second = "[[0.0, 1.0, 1.8329, 3.0], [3.8314, 5.0, 5.8306, 7.0]]"
    assert printed.count(first) == 4
    assert printed.count("[[0.5, 0.5, 9.5, 0.5], [16.5, 0.5, 25.5, 0.5]]") == 4
    assert printed.count(second) == 8


@pytest.mark.dtype_promotion
def test_dense_equivalent(load, tmp_path, capsys):
    """Deferred tables end where the dense ones do, lazy ones elsewhere."""
    example, png = load("dense_equivalent"), tmp_path / "curves.png"
    arguments = ["--rows", "300", "--dim", "4", "--steps", "60", "--plot", str(png)]
    example.main(arguments)
    printed = capsys.readouterr().out
    rows = re.findall(r"│ (\w+) +│ +[\d.]+ ms │ +([\d.]+) │ +(\S+) │", printed)
    loss, distance = ({name: float(row[i]) for name, *row in rows} for i in (0, 1))
    assert loss["deferred"] == pytest.approx(loss["dense"], abs=2e-5)
    assert distance["deferred"] < 1e-4 < 0.01 < distance["lazy"]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_low_precision(load, tmp_path, capsys):
    low_precision = load("low_precision")
    png = tmp_path / "curves.png"
    low_precision.main(["--steps", "100", "--plot", str(png)])
    printed = capsys.readouterr().out
    rows = re.findall(r"(\w+)[^│]*│ +(0\.\d+) │ +(0\.\d+)", printed)
    assert [name for name, _, _ in rows] == ["float32", "bfloat16", "bfloat16"]
    assert all(float(end) < float(start) for _, start, end in rows)
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_refuses_wrong_arguments(load, name, arguments, message, capsys):
    program = load(name)
    with pytest.raises(SystemExit) as error:
        getattr(program, "parsed", program.main)(arguments.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err
