"""The sharded example: one process or two, more devices or fewer, killed or not."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

# Examples are written as programs are, which may promote ranks.
pytestmark = [
    pytest.mark.sampled(15),
    pytest.mark.rank_promotion,
    pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="needs orbax"),
]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "sharded_embedding.py"
SMALL = "--words 203 --dim 8 --batch 64 --steps 30 --keep-every 15 --print-every 1"
LIMIT = 120  # seconds, which a run that hangs would exceed


def run(*arguments, kill=None, at=16):
    """The exit code and what was printed; process `kill` is killed after step `at`."""
    command = [sys.executable, str(PROGRAM), *SMALL.split(), *map(str, arguments)]
    printed = []
    # In a session of its own, so that it can be ended with all processes that it started.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as program:
        end = threading.Timer(LIMIT, os.killpg, (program.pid, signal.SIGKILL))
        end.start()
        for line in program.stdout:
            printed.append(line)
            if kill is not None and re.match(rf"step +{at} ", line):
                ids = re.search(r"process ids: ([\d ]+)", "".join(printed))[1].split()
                os.kill(int(ids[kill]), signal.SIGKILL)
                end.cancel()
                end = threading.Timer(60, os.killpg, (program.pid, signal.SIGKILL))
                end.start()
        code = program.wait()
        end.cancel()
    printed = "".join(printed)
    assert code != -signal.SIGKILL, f"hangs:\n{printed}"
    return code, printed


def losses(printed):
    return {int(step): float(x) for step, x in re.findall(r"step +(\d+) +loss (\S+)", printed)}


def assert_same(path, other):
    with np.load(path) as a, np.load(other) as b:
        assert set(a) == set(b) == {"words", "contexts", "bias"}
        assert a["words"].shape == (203, 8)
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Undisturbed, in one process with 8 devices: its folder and losses."""
    folder = tmp_path_factory.mktemp("whole")
    code, printed = run("--checkpoint", folder / "run", "--export", folder / "end.npz")
    assert code == 0, printed
    assert "processes: 1  devices: 8  rows on each: 26\n" in printed
    return folder, losses(printed)


def test_learns(whole):
    _, of_step = whole
    assert sorted(of_step) == list(range(1, 31))
    assert of_step[1] == pytest.approx(5 * np.log(2), rel=0.05)
    assert of_step[30] < 0.9 * of_step[1]


def test_two_processes_do_what_one_does(whole, tmp_path):
    folder, of_step = whole
    code, printed = run("--processes", 2, "--export", tmp_path / "end.npz")
    assert code == 0, printed
    assert "processes: 2  devices: 8  rows on each: 26\n" in printed
    assert losses(printed) == pytest.approx(of_step, rel=1e-5)
    assert_same(tmp_path / "end.npz", folder / "end.npz")


@pytest.mark.parametrize(("devices", "placement", "rows"), [(2, "mod", 102), (1, "div", 203)])
def test_goes_on_with_fewer_devices(devices, placement, rows, whole, tmp_path):
    folder, of_step = whole
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "30")
    code, printed = run(
        *("--devices", devices, "--placement", placement),
        *("--checkpoint", tmp_path / "run", "--export", tmp_path / "end.npz"),
    )
    assert code == 0, printed
    assert f"devices: {devices}  rows on each: {rows}\n" in printed
    assert "going on after step 15\n" in printed
    after = {step: loss for step, loss in of_step.items() if step > 15}
    assert losses(printed) == pytest.approx(after, rel=1e-5)
    assert_same(tmp_path / "end.npz", folder / "end.npz")


@pytest.mark.parametrize("kill", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_goes_on_after_a_process_was_killed(kill, whole, tmp_path):
    folder, _ = whole
    again = ("--processes", 2, "--checkpoint", tmp_path / "run")
    code, printed = run(*again, kill=kill)
    assert code == 1
    assert f"process {kill} of 2 was killed by SIGKILL (exit code -9)" in printed
    assert "did not end by themselves" not in printed, "the other one noticed"
    assert "The same command goes on from the last checkpoint." in printed
    assert 30 not in losses(printed)

    code, printed = run(*again, "--export", tmp_path / "end.npz")
    assert code == 0, printed
    assert "going on after step 15\n" in printed
    assert_same(tmp_path / "end.npz", folder / "end.npz")


def test_refuses_the_checkpoint_of_another_run(whole):
    folder, _ = whole
    code, printed = run("--checkpoint", folder / "run", "--dim", 4)
    assert code == 1
    assert "holds a run with other settings: dim was 8, now 4" in printed
    assert "Traceback" not in printed
