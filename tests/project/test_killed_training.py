"""A run that is killed (SIGKILL) goes on from its checkpoint and ends with the same bits."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sampled(15)

PROGRAM = Path(__file__).parents[1] / "training_to_kill.py"
STEPS = 40


def run(folder, kill_at=None):
    """The lines printed; the process is killed once it has printed step `kill_at`."""
    command = [sys.executable, str(PROGRAM), str(folder), str(STEPS)]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append(line.strip())
            if kill_at is not None and lines[-1] == f"step {kill_at}":
                process.kill()
                break
    if kill_at is None:
        assert process.returncode == 0
    else:
        assert process.returncode == -9
    return lines


@pytest.mark.slow
def test_killed_at_a_random_step(tmp_path):
    whole = run(tmp_path / "whole")
    assert whole[:STEPS] == [f"step {i}" for i in range(STEPS)]
    kill_at = random.SystemRandom().randrange(8, STEPS - 2)
    run(tmp_path / "killed", kill_at)
    resumed = run(tmp_path / "killed")
    first = int(resumed[0].split()[1])
    assert 0 < first <= kill_at + 1, "it goes on from a checkpoint"
    assert resumed[STEPS - first :] == whole[STEPS:], f"killed at step {kill_at}"
    assert len(whole) > STEPS
