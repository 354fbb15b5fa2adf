"""The ranker on click logs: its data, its model, and runs that are stopped and go on."""

import gzip
import re
from importlib import import_module
from itertools import islice

import jax
import numpy as np
import pytest

import jmask
from tests.later import later
from tests.oracle import is_row_sparse
from tests.project.test_examples import load  # noqa: F401

ocp = later("orbax.checkpoint")

# Examples are written as programs are, which may promote ranks.
pytestmark = [pytest.mark.sampled(15), pytest.mark.rank_promotion, pytest.mark.dtype_promotion]

SMALL = ["--rows", "2000", "--dim", "4"]
GOOD = b"\t".join([b"1", b"5", b"", b"-2", *[b"7"] * 10, b"68fd1e64,05db", b"", *[b"a0"] * 24])


@pytest.fixture
def dlrm(load, monkeypatch):  # noqa: F811
    example = load("dlrm")
    monkeypatch.setattr(example, "MEASURE_EVERY", 2)
    monkeypatch.setattr(example, "KEEP_EVERY", 2)
    return example


@pytest.fixture
def criteo(load):  # noqa: F811
    return load("criteo")


@pytest.fixture
def logs(dlrm, tmp_path):
    """Five batches and a bit, compressed."""
    path = tmp_path / "day_0.gz"
    lines = islice(dlrm.StandIn(0).lines(), 5 * dlrm.BATCH + 7)
    path.write_bytes(gzip.compress(b"".join(lines), 1))
    return path


def final_state(folder, step):
    with ocp.CheckpointManager(folder) as manager:
        assert manager.latest_step() == step
        kept = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    return kept.state


@pytest.mark.slow
def test_goes_on_with_the_same_bits(dlrm, logs, tmp_path, capsys, monkeypatch):
    """Stopped after three batches of five, and then twice at the end of the data."""
    drawn = []
    monkeypatch.setattr(dlrm, "save_curves", lambda path, *curves: drawn.append(curves))
    run = ["--data", str(logs), *SMALL, "--checkpoint"]
    dlrm.main([*run, str(tmp_path / "whole")])
    dlrm.main([*run, str(tmp_path / "parts"), "--steps", "2"])
    dlrm.main([*run, str(tmp_path / "parts")])
    dlrm.main([*run, str(tmp_path / "parts")])
    printed = capsys.readouterr().out
    for step in (2, 5):
        assert f"going on after step {step}" in printed
    whole, _, parts, again = drawn
    assert whole[0] == (2, 4, 5)
    np.testing.assert_equal(parts, whole)
    np.testing.assert_equal(again, whole)
    one, other = (final_state(tmp_path / name, 5) for name in ("whole", "parts"))
    assert len(jax.tree.leaves(one)) > 26 * 2
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("values", [1, 4])
def test_learns_from_the_stand_in(dlrm, tmp_path, capsys, values):
    """The AUC rises above chance, and not above that of who knows the odds."""
    png = tmp_path / "curve.png"
    dlrm.main([*SMALL, "--steps", "50", "--plot", str(png), "--values", str(values)])
    printed = capsys.readouterr().out
    assert "50 steps" in printed
    auc, best = (float(x) for x in re.findall(r"AUC (0\.\d+)\n", printed))
    assert 0.62 < auc < best < 0.9

    from matplotlib.image import imread

    assert imread(png).std() > 0.01


@pytest.mark.parametrize("values", [1, 4])
def test_model(dlrm, values):
    """Log-odds line by line in float64; the gradient of a table has the rows of its bags."""
    model = import_module("dlrm_model")
    params, _ = model.create(50, 4, 0)
    batch = next(dlrm.batches(dlrm.StandIn(0, values).lines(), 50, 0, "x"))
    lines = 64
    bags = {
        name: np.split(bag.ids, bag.offsets[1:-1])[:lines]
        for name, bag in batch["bags"].items()
    }
    batch = {name: batch[name][:lines] for name in ("labels", "counts")}
    batch["bags"] = jmask.pad_bags(bags)
    with jmask.strict():
        grads, scores = jax.jit(jmask.grad(model.loss_fn, has_aux=True))(params, batch)

    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    expected = []
    for line, counts in enumerate(batch["counts"]):
        vectors = [mlp(params["bottom"], np.log1p(np.maximum(np.float64(counts), 0)))]
        vectors += [params["tables"][f"C{i}"][bags[f"C{i}"][line]].sum(0) for i in range(1, 27)]
        products = [vectors[i] @ vectors[j] for i in range(27) for j in range(i + 1, 27)]
        expected += mlp(params["top"], np.array([*vectors[0], *products])).tolist()
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)

    assert len(grads["tables"]) == 26
    for name, bag in bags.items():
        gradient = grads["tables"][name]
        assert is_row_sparse(gradient)
        assert gradient.nse < 2 * lines * values
        assert any(len(ids) == 0 for ids in bag), "some categories are missing: empty bags"
        stored = np.unique(gradient.indices)
        np.testing.assert_array_equal(stored[stored < 50], np.unique(np.concatenate(bag)))


def mlp(layers, x):
    for i, layer in enumerate(layers):
        x = (np.maximum(x, 0) if i else x) @ layer["kernel"] + layer["bias"]
    return x


def test_batches(criteo, monkeypatch):
    """Labels, counts and bags as the lines give them; from a later batch on, too."""
    monkeypatch.setattr(criteo, "BATCH", 2)
    lines = [GOOD + b"\n", b"0" + b"\t" * 39 + b"\r\n", b"0" + GOOD[1:] + b"\n", GOOD, GOOD]
    both = list(criteo.batches(lines, 100, 0, "x"))
    assert len(both) == 2, "the line left over is left out"
    first = both[0]
    assert {first[name].dtype.name for name in ("labels", "counts")} == {"float32"}
    assert first["labels"].tolist() == [1, 0]
    assert first["counts"].tolist() == [[5, 0, -2, *[7] * 10], [0] * 13]
    hashed = {"C1": [0x68FD1E64 % 100, 0x05DB % 100], "C2": []}
    for name, bag in first["bags"].items():
        expected = hashed.get(name, [0xA0 % 100])
        assert bag.ids[: bag.offsets[-1]].tolist() == expected
        assert bag.offsets.tolist() == [0, len(expected), len(expected)]
    assert len(first["bags"]) == 26
    (later,) = criteo.batches(lines, 100, 1, "x")
    for x, y in zip(*map(jax.tree.leaves, (later, both[1])), strict=True):
        np.testing.assert_array_equal(x, y)


def test_reads_compressed_and_plain_files(criteo, tmp_path):
    lines = [b"%d\n" % i for i in range(5)]
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"".join(lines)))
    (tmp_path / "x.txt").write_bytes(b"".join(lines))
    for name in ("x.gz", "x.txt"):
        assert list(criteo.lines_of_file(tmp_path / name)) == lines


def test_stand_in(dlrm, criteo):
    """Lines are well formed and always the same; categories follow Zipf's law."""
    lines = list(islice(dlrm.StandIn(3).lines(), 3000))
    assert lines == list(islice(dlrm.StandIn(3).lines(), 3000))
    assert lines[:9] != list(islice(dlrm.StandIn(4).lines(), 9))
    assert all(map(criteo._LINE.fullmatch, lines))
    fields = [line.rstrip(b"\n").split(b"\t") for line in lines]
    last = [f[-1] for f in fields]
    missing = last.count(b"") / len(last)
    assert 0.05 < missing < 0.15
    _, counts = np.unique([x for x in last if x], return_counts=True)
    first, second, third = np.sort(counts)[::-1][:3]
    assert 1.5 < first / second < 2.5
    assert 2.2 < first / third < 4
    assert 0.2 < np.mean([f[0] == b"1" for f in fields]) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (GOOD[2:], "expected 40 fields with tabs between them, got 39"),
        (b"", "expected 40 fields with tabs between them, got 1"),
        (GOOD + b"\t", "expected 40 fields with tabs between them, got 41"),
        (b"2" + GOOD[1:], "expected the label 0 or 1, got '2'"),
        (GOOD.replace(b"-2", b"1.5"), "expected an integer in field 4, got '1.5'"),
        (GOOD.replace(b"-2", b"-"), "expected an integer in field 4, got '-'"),
        (
            GOOD.replace(b"05db", b"68fd1e64f"),
            "expected hexadecimal numbers of up to 8 digits in field 15, got "
            "'68fd1e64,68fd1e64f'",
        ),
        (
            GOOD.replace(b",05db", b","),
            "expected hexadecimal numbers of up to 8 digits in field 15, got '68fd1e64,'",
        ),
        (
            GOOD.replace(b"68fd1e64,05db", b"xyz\xff"),
            r"expected hexadecimal numbers of up to 8 digits in field 15, got 'xyz\\xff'",
        ),
    ],
)
def test_names_the_line_that_is_wrong(dlrm, tmp_path, line, message):
    path = tmp_path / "logs.txt"
    path.write_bytes(b"\n".join([GOOD] * 1030 + [line, GOOD, b""]))
    with pytest.raises(SystemExit) as error:
        dlrm.main(["--data", str(path), *SMALL, "--plot", str(tmp_path / "x.png")])
    assert error.value.code == f"dlrm: {path}, line 1031: {message}"


def test_names_files_that_cannot_be_read(dlrm, tmp_path):
    broken, short = tmp_path / "broken.gz", tmp_path / "short.txt"
    packed = gzip.compress(GOOD + b"\n")
    broken.write_bytes(packed[: len(packed) // 2])
    short.write_bytes(GOOD + b"\n")
    for path, message in (
        (tmp_path / "nowhere.txt", r"cannot read .*nowhere\.txt: No such file"),
        (tmp_path, f"cannot read {re.escape(str(tmp_path))}: Is a directory"),
        (broken, r"cannot read .*broken\.gz: Compressed file ended before"),
        (short, r"short\.txt has fewer than the 1024 lines of a batch"),
    ):
        with pytest.raises(SystemExit, match=message):
            dlrm.main(["--data", str(path), *SMALL])


def test_refuses_checkpoints_of_other_runs(dlrm, logs, tmp_path):
    folder = tmp_path / "run"
    run = ["--data", str(logs), "--steps", "1", "--checkpoint", str(folder)]
    run += ["--plot", str(tmp_path / "x.png")]
    dlrm.main([*run, *SMALL])
    with pytest.raises(SystemExit, match=r"run holds a run with other settings: rows was 2000"):
        dlrm.main([*run, "--rows", "2001", "--dim", "4"])
    with pytest.raises(SystemExit, match=r"data was day_0\.gz, now made-up logs\. Give"):
        dlrm.main([*run[2:], *SMALL])
    with pytest.raises(SystemExit, match=r"cannot write to .*day_0\.gz: File exists"):
        dlrm.main([*run[:4], "--checkpoint", str(logs), *SMALL])
    (folder / "1" / "run" / "metadata").write_text("{")
    with pytest.raises(
        SystemExit, match=r"step 1 that cannot be read \(.*\): remove .*run/1 to"
    ):
        dlrm.main([*run, *SMALL])
