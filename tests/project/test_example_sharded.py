"""The sharded example: one process or two, more devices or fewer, killed or told to stop."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.sampled(15),
    pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="needs orbax"),
]

PROGRAM = Path(__file__).parents[2] / "examples" / "sharded_embedding.py"
SMALL = "--words 203 --dim 8 --batch 64 --steps 30 --keep-every 15 --print-every 1"
LIMIT = 120  # seconds, which a run that hangs would exceed


def run(folder, *arguments, at=None, do=None):
    """The exit code and what was printed; after step `at`, `do` gets the process ids."""
    command = [sys.executable, str(PROGRAM), *SMALL.split(), *map(str, arguments)]
    printed = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
    ) as program:
        end = threading.Timer(LIMIT, program.kill)
        end.start()
        for line in program.stdout:
            printed.append(line)
            if at is not None and re.match(rf"step +{at} ", line):
                ids = re.search(r"process ids: ([\d ]+)", "".join(printed))[1].split()
                do(program.pid, *map(int, ids))
        code = program.wait()
        end.cancel()
    assert code != -signal.SIGKILL, f"hangs:\n{''.join(printed)}"
    return code, "".join(printed)


def losses(printed):
    return {int(step): float(x) for step, x in re.findall(r"step +(\d+) +loss (\S+)", printed)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Undisturbed, in one process with 8 devices: its folder and losses."""
    folder = tmp_path_factory.mktemp("whole")
    code, printed = run(folder, "--checkpoint", "run")
    assert code == 0, printed
    assert "processes: 1  devices: 8  rows on each: 128\n" in printed
    assert (folder / "sharded_embedding.png").read_bytes().startswith(b"\x89PNG")
    found = losses(printed)
    assert sorted(found) == list(range(1, 31))
    assert found[30] < 0.9 * found[1]
    return folder, found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--devices 1", "devices: 1  rows on each: 1,024\n"),
        ("--devices 2", "devices: 2  rows on each: 512\n"),
        ("--processes 2", "processes: 2  devices: 8  rows on each: 128\n"),
    ],
)
def test_goes_on_with_other_devices(arguments, message, whole, tmp_path):
    """From a checkpoint of eight devices: the losses are those of the run in one."""
    folder, expected = whole
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "30")
    code, printed = run(tmp_path, "--checkpoint", "run", *arguments.split())
    assert code == 0, printed
    assert message in printed
    assert "run: going on after step 15\n" in printed
    after = {step: loss for step, loss in expected.items() if step > 15}
    assert losses(printed) == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_goes_on_after_a_process_was_killed(number, whole, tmp_path):
    again = ("--processes", 2, "--checkpoint", "run")
    kill = lambda _, *ids: os.kill(ids[number], signal.SIGKILL)
    code, printed = run(tmp_path, *again, at=16, do=kill)
    assert code == 1
    assert f"process {number} of 2 was killed by SIGKILL (exit code -9)" in printed
    assert "did not end by themselves" not in printed, "the other one noticed"
    assert "The same command goes on from the last checkpoint." in printed
    assert 30 not in losses(printed)
    code, printed = run(tmp_path, *again)
    assert code == 0, printed
    assert "run: going on after step 15\n" in printed
    assert losses(printed)[30] == pytest.approx(whole[1][30], rel=1e-5)


def test_ctrl_c(tmp_path):
    """All processes stop after the same step, which is saved."""
    interrupt = lambda pid, *_: os.kill(pid, signal.SIGINT)
    options = ("--processes", 2, "--checkpoint", "run", "--steps", 100_000)
    code, printed = run(tmp_path, *options, at=5, do=interrupt)
    assert code == 130, printed
    last = max(losses(printed))
    saved = rf"checkpoint run/{last}, sharded_embedding\.png"
    assert re.search(rf"sharded_embedding: stopped; {saved} written\n", printed), printed
    assert "Traceback" not in printed
    assert last < 1000


def test_refuses_the_checkpoint_of_another_run(whole):
    code, printed = run(whole[0], "--checkpoint", "run", "--dim", 4)
    assert code == 1
    assert "holds a run with other settings: dim was 8, now 4" in printed
    assert "Traceback" not in printed
