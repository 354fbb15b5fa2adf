"""Checkpoints of `jmask.host`: a run that is killed goes on where its last one was."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask

STEPS, EVERY = 400, 7


def new_run(folder):
    """Offload a table in a file and one in memory."""
    table = np.memmap(folder / "table.bin", np.float32, "w+", shape=(500, 3))
    table[:] = np.linspace(0, 1, 500)[:, None]
    params = {"table": table, "other": np.zeros((30, 2), jnp.bfloat16), "w": jnp.ones(3)}
    return jmask.host.offload(params, jmask.adam(0.01))


def batches(start):
    """Yield what the loader has from a step on."""
    for k in range(start, STEPS):
        rng = np.random.default_rng(k)
        yield {"ids": rng.integers(0, 500, 20), "others": rng.integers(0, 30, 4)}


@jax.jit
def step(params, state, batch):
    def loss(params):
        rows = params["table"][batch["ids"]] * params["w"][None]
        return jnp.sum((rows - 2) ** 2) + jnp.sum(params["other"][batch["others"]].astype("f4"))

    grads = jmask.grad(loss)(params)
    return jmask.apply_gradients(jmask.adam(0.01), grads, state, params)


def train(host, path=None, steps=STEPS):
    ids = {"table": lambda batch: batch["ids"], "other": lambda batch: batch["others"]}
    for batch, params, state in host.steps(batches(host.count), ids=ids):
        host.commit(*step(params, state, batch))
        if path is not None and host.count % EVERY == 0:
            host.checkpoint(path)
        if host.count == steps:
            break


def bits(host):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((host.params, host.state))]


def restored(path, folder):
    """The step and the bits of a checkpoint, read into a run in another folder."""
    folder.mkdir()
    shutil.copytree(path, folder / "run")
    other = new_run(folder)
    other.restore(folder / "run")
    return other.count, bits(other)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(tmp_path):
    """At random moments, also while a checkpoint is written: the same bits in the end."""
    (tmp_path / "whole").mkdir()
    whole = new_run(tmp_path / "whole")
    train(whole)
    folder, draw, killed = tmp_path / "killed", random.Random(os.urandom(8)), 0
    folder.mkdir()
    command = [sys.executable, "-m", "tests.host.test_snapshots", str(folder)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    while True:
        run = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE)
        assert run.stdout is not None
        if run.stdout.readline() and killed < 3:  # its steps begin
            time.sleep(draw.uniform(0.05, 0.5))
            run.send_signal(signal.SIGKILL)
            killed += 1
        code = run.wait()
        run.stdout.close()
        if code != -signal.SIGKILL:
            break
    assert code == 0
    last = new_run(folder)
    last.restore(folder / "run")
    assert killed == 3
    assert last.count == STEPS // EVERY * EVERY
    train(last)
    assert bits(last) == bits(whole)


@pytest.mark.parametrize("where", ["rename", "apply", "copy"])
def test_a_checkpoint_that_is_interrupted_is_the_one_before_or_this(
    where, tmp_path, monkeypatch
):
    """Wherever it stops: before its name, while its rows go into the copies."""
    host = new_run(tmp_path)
    train(host, steps=5)
    host.checkpoint(tmp_path / "run")
    first = bits(host)
    train(host, steps=9)
    second = bits(host)
    with monkeypatch.context() as patched:
        if where == "rename":
            patched.setattr(Path, "rename", lambda *_: 1 / 0)
        elif where == "apply":
            patched.setattr(jmask._host.snapshots, "_apply", lambda *_: 1 / 0)
        else:
            patched.setattr(np, "put", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            host.checkpoint(tmp_path / "run")
    last = (5, first) if where == "rename" else (9, second)
    assert restored(tmp_path / "run", tmp_path / "copy") == last
    # After the error the next checkpoint has all rows.
    train(host, steps=10)
    host.checkpoint(tmp_path / "run")
    assert restored(tmp_path / "run", tmp_path / "later") == (10, bits(host))


def test_only_rows_that_changed_are_written(tmp_path):
    host = new_run(tmp_path)
    host.checkpoint(tmp_path / "run")
    train(host, steps=1)
    host.checkpoint(tmp_path / "run")
    (changes,) = (tmp_path / "run").glob("changes-*")
    assert len(np.load(changes / "0.npy")) <= 30
    rows = len(np.load(changes / "1.npy"))
    assert rows == len(np.unique(next(batches(0))["ids"]))
    assert (changes / "1-0.rows").stat().st_size == rows * 12
    assert not list((tmp_path / "run").glob("*.new"))


def test_zeros_take_no_space(tmp_path):
    """Neither in slots nor in the copy: files of tables that were never touched are sparse."""
    table = np.memmap(tmp_path / "table.bin", np.float32, "w+", shape=(1_000_000, 16))
    host = jmask.host.offload({"table": table}, jmask.adagrad(0.1))
    host.checkpoint(tmp_path / "run")
    files = [x for x in tmp_path.rglob("*") if x.is_file()]
    assert sum(x.stat().st_size for x in files) > 250e6
    assert sum(x.stat().st_blocks * 512 for x in files) < 1e6


def test_what_is_on_the_device_comes_back(tmp_path):
    """Keys of random numbers, 16 bits, scalars; also where it was donated and lost."""
    keys = optax.GradientTransformation(
        lambda params: (jax.random.key(7), jnp.int8(3)), lambda u, s, params=None: (u, s)
    )

    def offloaded():
        params = {"table": np.ones((4, 2), np.float32), "b": jnp.full(3, 0.5, jnp.bfloat16)}
        return jmask.host.offload(params, optax.chain(jmask.sgd(0.1), keys))

    host = offloaded()
    ids = {"table": lambda batch: batch}
    for _, rows, (first, (key, number)) in host.steps([np.array([1])], ids=ids):
        new = first, (jax.random.fold_in(key, 1), number + 1)
        host.commit({**rows, "b": rows["b"] * 3}, new)
    host.checkpoint(tmp_path / "run")
    other = offloaded()
    for x in jax.tree.leaves((other.params["b"], other.state)):
        if isinstance(x, jax.Array):
            x.delete()
    other.restore(tmp_path / "run")
    assert other.params["b"].dtype == jnp.bfloat16
    assert other.params["b"].tolist() == [1.5] * 3
    key, number = other.state[1]
    assert key == jax.random.fold_in(jax.random.key(7), 1)
    assert (number.dtype, int(number)) == (jnp.int8, 4)


def test_wrong_folders(tmp_path):
    host = new_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"`path` .*run holds no checkpoint"):
        host.restore(tmp_path / "run")
    host.checkpoint(tmp_path / "run")
    with pytest.raises(FileExistsError, match=r"`path` .*host\.restore"):
        new_run(tmp_path).checkpoint(tmp_path / "run")
    for params, words in (
        ({"table": np.zeros((500, 4), np.float32)}, r"float32\[500, 3\].*float32\[500, 4\]"),
        ({"table": np.zeros((500, 3), np.float16)}, r"float32\[500, 3\].*float16"),
        ({"table": np.zeros((500, 3), np.float32), "x": jnp.ones(1)}, "nothing else, .*'x'"),
    ):
        rest = {"other": np.zeros((30, 2), jnp.bfloat16), "w": jnp.ones(3)}
        other = jmask.host.offload({**params, **rest}, jmask.adam(0.01))
        with pytest.raises(ValueError, match=f"`path` .*run holds .*{words}"):
            other.restore(tmp_path / "run")
    rest["w"] = jnp.ones(4)
    table = {"table": np.zeros((500, 3), np.float32)}
    other = jmask.host.offload({**table, **rest}, jmask.adam(0.01))
    with pytest.raises(ValueError, match=r"`path` .*w'\]`: \[3\].*this run has .*w'\]`: \[4\]"):
        other.restore(tmp_path / "run")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    main = new_run(place)
    if (place / "run").exists():
        main.restore(place / "run")
    print(main.count, flush=True)
    train(main, place / "run")
