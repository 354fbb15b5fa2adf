"""The examples: each is run whole, refuses wrong arguments, stops at Ctrl-C, and goes on.

The notebook runs from its first cell to its last.
"""

import importlib
import json
import os
import random
import re
import signal
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.expressions import rows
from tests.later import later

pytestmark = [pytest.mark.sampled(15), pytest.mark.rank_promotion, pytest.mark.dtype_promotion]


ocp = later("orbax.checkpoint")

# Examples are written as programs are, which may promote ranks and dtypes.

EXAMPLES = Path(__file__).parents[2] / "examples"
APPLICATIONS = sorted(path.parent.name for path in EXAMPLES.glob("*/train.py"))

# For each program arguments with which it takes some seconds, the measure that it prints, and
# what that is between. TEXT, LABELS and GRAPH are made below.
_RUNS = r"""
    low_precision | --steps 100 | stochastic +│ 0\.706 │ (0\.\d+) | 0.3 0.65
    masked_adagrad |  | adagrad, csr +│ 2 +│ \[\[0.0, 1.0, ([\d.]+) | 1.8329 1.8329
    dense_equivalent | --rows 300 --dim 4 --steps 60 |
        deferred +│ +[\d.]+ ms │ +[\d.]+ │ +(\S+) │ | 0 1e-4
    hash_grid | --size 64 --log2-rows 10 --batch 256 --steps 60 |
        jmask[^│]*│ 60 +│ ([\d.]+) dB | 12 40
    open_vocabulary | --rows 128 --alive 500 --steps 60 |
        open vocabulary +│ 144 +│ ([\d.]+) | 0.4 0.7
    sequences | --users 2000 --items 200 --groups 10 --dim 16 --steps 120 |
        jmask +│ 120 +│ ([\d.]+)% | 12 100
    sparse_linear | LABELS --columns 4096 --epochs 15 --largest 6 --dense 32 |
        Adam +│ ([\d.]+)% | 95 100
    table_on_disk | TEXT --rows 1e4 --steps 100 | 10,000 rows +│ 100 +│ ([\d.]+) | 0.5 5
    word2vec | TEXT --steps 150 --dim 16 | loss [\d.]+ -> ([\d.]+) | 0.1 6
    ngram_memory |
        TEXT --seconds 0.3 --timing 0.1 --memory 2000 --rows 1e3 --width 16 --dtype bfloat16 |
        with memory, jmask +│ +\d+ s │ +\d+ │ +([\d.]+) | 0.5 8
    dlrm | --rows 2000 --dim 4 --steps 50 --values 3 | 50 steps.*AUC ([\d.]+) | 0.6 0.9
    two_tower | --users 1000 --items 1000 --groups 20 --steps 150 | recall@50 ([\d.]+)% | 25 100
    knowledge_graph | --graph GRAPH --dim 32 --steps 400 --many 2000 |
        held out: MRR ([\d.]+) | 0.6 1
    light_gcn | --dim 8 --steps 60 --many 500 --most 300 |
        8 neighbours[^│]*│[^│]*│ ([\d.]+)% | 50 100
"""
RUNS = {
    name: (line, measure, *map(float, bounds.split()))
    for name, line, measure, bounds in rows(_RUNS)
}

WRONG = [
    ("masked_adagrad", "--steps 0", "argument --steps: 0 is not positive"),
    ("low_precision", "--steps 1", "argument --steps: 1 is less than 50"),
    ("dense_equivalent", "--rows 1", "argument --rows: 1 is less than 2"),
    ("hash_grid", "--plot nowhere/x.png", "--plot: nowhere/x.png is not a file in a directory"),
    ("open_vocabulary", "--rows 8", "argument --rows: 8 is less than the 16 ways of a set"),
    ("sequences", "--items 5", "argument --items: 5 is less than one for each group"),
    ("sparse_linear", "--columns 99999999", "--columns: 99999999 is more than 16777216"),
    ("table_on_disk", "--rows 10", "argument --rows: 10 is no number of rows from 1000"),
    ("word2vec", "--seconds nan", "argument --seconds: nan is not positive"),
    ("ngram_memory", "--rows 1.5", "argument --rows: 1.5 is no number of rows"),
    ("dlrm", "--values two", "argument --values: invalid"),
    ("two_tower", "--items 20", "argument --items: 20 items are too few for 50 groups"),
    ("knowledge_graph", "--rate -1", "argument --rate: -1 is not positive"),
    ("light_gcn", "--dim 0", "argument --dim: 0 is not positive"),
    ("sharded_embedding", "--processes 3", "8 devices are not for 3 processes alike"),
    ("sharded_embedding", "--process 1", "--process and --coordinator belong together"),
    ("sharded_embedding", "--processes 2 --process 2 --coordinator x:1", "is not one of 2"),
]

# What a program says of data that it cannot use. The file is named by FILE.
BAD_DATA = [
    ("word2vec FILE", None, "cannot read .*FILE: No such file"),
    ("word2vec FILE", "  \n", "FILE is empty"),
    ("word2vec FILE", "same " * 100, "1 different words are too few"),
    ("ngram_memory FILE", "x = 1\n", "6 characters are too little text"),
    ("table_on_disk FILE", None, "cannot read .*FILE: No such file"),
    ("table_on_disk FILE", "x = 1\n", "6 bytes are too little text"),
    ("sparse_linear FILE", "a\tone\nb\n", "line 2: expected a label, a tab and a text"),
    ("sparse_linear FILE", "a\ttext 1\nb\ttext 3\n", "2 texts are too few to hold some out"),
    ("knowledge_graph --graph nowhere", None, "cannot read nowhere/train.txt: No such"),
    ("dlrm --data FILE", "1\n", "line 1: expected 40 fields with tabs between them, got 1"),
    ("dlrm --data FILE", "2" + "\t" * 39, "line 1: expected the label 0 or 1, got '2'"),
    ("dlrm --data FILE", "1\t-" + "\t" * 38, "expected an integer in field 2, got '-'"),
    ("dlrm --data FILE", "1" + "\t" * 39 + "xyz", "expected hexadecimal numbers .*in field 40"),
    ("dlrm --data FILE", "1" + "\t" * 39, "fewer than the 1024 lines of a batch"),
]


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Imports a program by name, or a module "dlrm.criteo"; it runs in a folder of its own."""
    for package in ("matplotlib", "rich", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.chdir(tmp_path)
    return lambda name: importlib.import_module(
        f"{name}.train" if name in APPLICATIONS else name
    )


@pytest.fixture
def arguments(tmp_path):
    """The arguments of a table, with the paths of files that are made here."""
    rng = random.Random(0)
    words = (["cat", "dog", "horse"], ["red", "green", "blue"], [*"abcdefgh"])
    texts = [" ".join(rng.choices(rng.choice(words), k=40)) for _ in range(500)]
    (tmp_path / "text.txt").write_text("\n".join(texts))
    labels = []
    for _ in range(300):
        label = rng.randrange(2)
        text = rng.choices(words[label], k=2) + rng.choices(["see", "the", "old"], k=3)
        labels.append(f"{label}\t{' '.join(rng.sample(text, 5))} {rng.random():.6f}")
    (tmp_path / "labels.tsv").write_text("\n".join(labels))
    known = "".join(
        f"child{i}\tmother\tmother{i}\nmother{i}\tmother\tgran{i}\nchild{i}\tgran\tgran{i}\n"
        for i in range(20)
    )
    for part in ("train", "valid", "test"):  # what it has seen, so that few steps are enough
        (tmp_path / f"{part}.txt").write_text(known)
    paths = {"TEXT": "text.txt", "LABELS": "labels.tsv", "GRAPH": "."}
    return lambda line: [paths.get(word, word) for word in line.split()]


FRAMEWORKS = [("two_tower", f"--framework {x}") for x in ("linen", "nnx", "equinox")]


@pytest.mark.parametrize(("name", "more"), [*((name, "") for name in RUNS), *FRAMEWORKS])
def test_runs(name, more, load, arguments, capsys):
    """It prints a measure that is as it should be, and writes a picture."""
    line, measure, low, high = RUNS[name]
    load(name).main(arguments(f"{line} {more}"))
    printed = capsys.readouterr().out
    found = re.search(measure, printed)
    assert found, printed
    assert low <= float(found[1]) <= high, printed
    assert f"{name}.png" in printed

    from matplotlib.image import imread

    assert imread(f"{name}.png").std() > 0.01


@pytest.mark.parametrize("name", [*RUNS, "sharded_embedding"])
def test_help(name, load, capsys):
    """All have the same style: the docstring, `--seed`, `--plot` and defaults in brackets."""
    program = load(name)
    with pytest.raises(SystemExit) as error:
        program.main(["--help"])
    assert error.value.code == 0
    printed = capsys.readouterr().out
    assert program.__doc__.strip() in printed
    assert f"usage: {name} " in printed
    path = f"{name}/train.py" if name in APPLICATIONS else f"{name}.py"
    assert f"python examples/{path}" in printed
    assert re.search(r"--seed N +seed of the random numbers \(0\)", printed)
    assert re.search(rf"--plot PNG +picture to write \({name}\.png\)", printed)


@pytest.mark.parametrize(("name", "line", "message"), WRONG)
def test_refuses_wrong_arguments(name, line, message, load, capsys):
    program = load(name)
    with pytest.raises(SystemExit) as error:
        program.main(line.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("line", "content", "message"), BAD_DATA)
def test_names_bad_data(line, content, message, load, tmp_path):
    if content is not None:
        (tmp_path / "FILE").write_text(content)
    name, *args = line.split()
    with pytest.raises(SystemExit, match=f"^{name}: .*{message}"):
        load(name).main(args)


@pytest.mark.parametrize("name", RUNS)
def test_ctrl_c(name, load, arguments, capsys, monkeypatch, tmp_path):
    """It ends after the step, in one line, and what there is has been saved."""
    program, handler = load(name), signal.getsignal(signal.SIGINT)
    bar = program.Program.bar

    @contextmanager
    def interrupted(self, *args):
        with bar(self, *args) as show:

            def shown(*args, **fields):
                show(*args, **fields)
                if self._in_loop and not self.stopped:
                    os.kill(os.getpid(), signal.SIGINT)

            yield shown

    monkeypatch.setattr(program.Program, "bar", interrupted)
    line = re.sub(r"--(steps|seconds) \S+", r"--\1 5000", RUNS[name][0])
    has_checkpoint = hasattr(program, "Checkpoints")
    with pytest.raises(SystemExit) as error:
        program.main(arguments(line) + ["--checkpoint", "run"] * has_checkpoint)
    assert error.value.code == 130
    saved = rf"checkpoint run/\d+, {name}\.png" if has_checkpoint else rf"{name}\.png"
    assert re.fullmatch(rf"{name}: stopped; {saved} written\n", capsys.readouterr().err)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert signal.getsignal(signal.SIGINT) is handler  # ignored, where tests run in background


def test_ctrl_c_before_anything_is_there(load, capsys):
    with pytest.raises(SystemExit) as error, load("common.program").Program("x"):
        os.kill(os.getpid(), signal.SIGINT)
    assert error.value.code == 130
    assert capsys.readouterr().err == "x: stopped; nothing written\n"


def final_state(folder):
    with ocp.CheckpointManager(Path(folder).absolute()) as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        return manager.restore(manager.latest_step(), args=args).state


@pytest.mark.slow
@pytest.mark.of_cpus  # a GPU adds equal ids in any order
@pytest.mark.parametrize("name", ["dlrm", "two_tower", "word2vec", "ngram_memory"])
def test_goes_on_from_a_checkpoint(name, load, arguments, capsys):
    """A run in two parts ends with the bits of the run in one; other settings are refused."""
    program, line = load(name), RUNS[name][0]
    is_timed = name == "ngram_memory"
    option = "--seconds" if is_timed else "--steps"
    run = [*arguments(re.sub(rf"{option} \S+", "", line)), "--checkpoint"]
    program.main([*run, "parts", option, "0.2" if is_timed else "4"])
    program.main([*run, "parts", option, "0.4" if is_timed else "9"])
    assert re.search(r"parts: going on after step \d+\n", capsys.readouterr().out)
    if not is_timed:
        program.main([*run, "whole", option, "9"])
        one, other = (jax.tree.leaves(final_state(x)) for x in ("whole", "parts"))
        assert len(one) > 3
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(x, y)
    with pytest.raises(SystemExit, match=r"a run with other settings: .*seed was 0, now 1"):
        program.main([*run, "parts", "--seed", "1"])


def test_at_most_ten_small_programs():
    """Programs that stand alone have at most 200 lines; the table in README has all."""
    programs = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert len(programs) <= 10
    assert {path.stem for path in programs.values()} | set(APPLICATIONS) == {
        *RUNS,
        "sharded_embedding",
    }
    for path in programs.values():
        assert len(path.read_text().splitlines()) <= 200, path
    table = (EXAMPLES / "README.md").read_text()
    makefile = (EXAMPLES.parent / "Makefile").read_text()
    for name in [*programs, *APPLICATIONS]:
        assert f"[{name}]" in table, name
        target = name.replace("_", "-").replace("sharded-embedding", "sharded")
        assert re.search(rf"^([\w-]+ )*{target}( [\w-]+)*:", makefile, re.M), target


# --- the notebook -----------------------------------------------------------------------


@pytest.mark.slow
def test_notebook(monkeypatch):
    """Its cells run one after the other, and the pictures that they show are stored in it."""
    import matplotlib.pyplot as plt

    shown, names = [], {}
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    for cell in cells:
        exec("".join(cell["source"]), names)
    outputs = [x.get("data", {}) for cell in cells for x in cell["outputs"]]
    assert len([x for x in outputs if "image/png" in x]) == len(shown) == 2
    plt.close("all")
