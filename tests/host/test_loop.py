"""The loop of `jmask.host`: threads, loops that are left, padding, files, and wrong calls."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.host_runs import on_device, on_host

IDS = {"table": lambda batch: batch["ids"]}


def tables(rows=10):
    return {"table": np.zeros((rows, 2), np.float32), "w": jnp.zeros(())}


def offloaded(params=None, **options):
    return jmask.host.offload(tables() if params is None else params, jmask.sgd(0.1), **options)


def batches(*ids):
    return [{"ids": np.asarray(x)} for x in ids]


def add_one(params):
    """A step: rows that are looked up, and what is behind them, grow by one."""
    return {"table": params["table"] + 1, "w": params["w"] + 1}


def train(host, loader, ids=IDS, steps=None, **options):
    for k, (_, params, state) in enumerate(host.steps(loader, ids=ids, **options)):
        host.commit(add_one(params), state)
        if k + 1 == steps:
            break
    return host.params["table"][:, 0]


# --- rows and positions -------------------------------------------------------------------


def test_rows_are_distinct_ascending_and_padded_with_zeros():
    host = offloaded()
    host.params["table"][:] = np.arange(10)[:, None]
    (batch, params, _), *_ = _one(host, np.array([[7, 2], [9, 7]]))
    assert batch["ids"].tolist() == [[1, 0], [2, 1]]
    assert batch["ids"].dtype == np.int32
    assert params["table"][:, 0].tolist() == [2, 7, 9]
    (_, params, _), *_ = _one(host, np.arange(5))
    assert params["table"][:, 0].tolist() == [0, 1, 2, 3, 4, 0]


def _one(host, ids):
    """The first of `steps`, committed as it is."""
    for step in host.steps(batches(ids), ids=IDS):
        host.commit(*step[1:])
        yield step


def test_few_programs_for_many_sizes():
    """They have the rows of batches alone, and capacities of which there are few."""
    rng = np.random.default_rng(0)
    loader = batches(*(99_700 + rng.integers(0, 300, n) for n in range(1, 200)))
    sizes, host = set(), offloaded(tables(100_000))
    for batch, params, state in host.steps(loader, ids=IDS):
        capacity = max(x.shape[0] for x in jax.tree.leaves((params, state)) if x.ndim)
        assert capacity <= max(16, 2 * batch["ids"].size)
        sizes.add(capacity)
        host.commit(params, state)
    assert len(sizes) <= 15


def test_padding_stays_padding():
    host = offloaded()
    (batch, params, _), *_ = _one(host, [[3, -1], [-1, 5]])
    assert batch["ids"].tolist() == [[0, -1], [-1, 1]]
    rows = jmask.embedding_lookup(params["table"] + 1, batch["ids"], padding_id=-1)
    assert rows[..., 0].tolist() == [[1, 0], [0, 1]]
    for batch, *step in host.steps(batches(np.arange(11)), ids=IDS, padding_id=10):
        assert batch["ids"].tolist() == list(range(11))  # the table has 10 rows in the step
        host.commit(*step)


def test_batches_without_ids():
    host = offloaded()
    assert train(host, batches([2]), {"table": lambda batch: []}).tolist()[:3] == [0, 0, 0]
    assert train(host, [{"ids": jnp.array([3])}, {"ids": np.array(4)}])[3:5].tolist() == [1, 1]
    assert host.count == 3


def test_tables_of_other_sizes_share_a_leaf():
    """The larger one has ids of its own, which are no rows of the smaller."""
    params = {"a": np.zeros((20, 1), np.float32), "b": np.zeros((5, 1), np.float32)}
    host = jmask.host.offload(params, jmask.sgd(0.1))
    ids = {"a": lambda x: [x["one"], x["two"]], "b": lambda x: x["two"]}
    loader = [{"one": np.array([19, 3]), "two": np.array([4, 0])}]
    for batch, rows, state in host.steps(loader, ids=ids):
        assert batch["one"].tolist() == [3, 1]
        assert batch["two"].tolist() == [2, 0]
        added = {k: x.at[batch["two"]].add(1.0) for k, x in rows.items()}
        host.commit(added, state)
    assert (
        np.flatnonzero(params["a"]).tolist() == np.flatnonzero(params["b"]).tolist() == [0, 4]
    )


@pytest.mark.dtype_promotion
def test_files(tmp_path):
    """A memmap trains as an array does; its slots are beside it, or where `directory` is."""
    tx, ids = jmask.lazy(optax.adam(0.1)), {"table": lambda batch: batch}
    loss = lambda params, ids: jnp.sum((params["table"][ids] - 1) ** 2)
    loader = [np.array([1, 5, 5]), np.array([5, 7, 1])] * 2
    given = {"table": np.zeros((9, 2), np.float32)}
    params, state, _ = on_device(tx, given, loader, loss)
    for options in ({}, {"directory": tmp_path / "slots"}):
        file = np.memmap(tmp_path / "table.bin", np.float32, "w+", shape=(9, 2))
        host, _ = on_host(tx, {"table": file}, loader, ids, loss, **options)
        mu = host.state[0].mu["table"]
        assert isinstance(mu, np.memmap)
        np.testing.assert_allclose(mu, state[0].mu["table"], rtol=1e-6)
        stored = np.fromfile(tmp_path / "table.bin", np.float32).reshape(9, 2)
        np.testing.assert_allclose(stored, params["table"], rtol=1e-6)
    assert (tmp_path / "table.bin.1-state-0-mu-table.slot").exists()
    assert (tmp_path / "slots" / "1-state-0-mu-table.slot").exists()


def test_each_slot_has_a_file_of_its_own(tmp_path):
    """Also where names differ in characters that no file has."""
    params = {name: np.zeros((3, 1), np.float32) for name in ("a.b", "a-b", "a/b")}
    state = jmask.host.offload(params, jmask.adam(0.1), directory=tmp_path).state
    slots = [x for x in jax.tree.leaves(state) if isinstance(x, np.memmap)]
    assert len(slots) == len({x.filename for x in slots}) == 6


_LARGE = """
import sys, jax, jax.numpy as jnp, numpy as np, jmask
folder, rows = sys.argv[1], 100_000_000
table = np.memmap(f"{folder}/table.bin", np.float32, "w+", shape=(rows, 16))
host = jmask.host.offload({"table": table}, jmask.adagrad(0.1))

@jax.jit
def step(params, state, ids):
    grads = jmask.grad(lambda p: jnp.sum((p["table"][ids] - 1) ** 2))(params)
    return jmask.apply_gradients(jmask.adagrad(0.1), grads, state, params)

draw = np.random.default_rng(0)
loader = (draw.integers(0, 1000, 8192) * 100_000 for _ in range(20))
for ids, params, state in host.steps(loader, ids={"table": lambda batch: batch}):
    host.commit(*step(params, state, ids))
host.flush()
lines = open("/proc/self/status").read().splitlines()
own = next(x.split()[1] for x in lines if x.startswith("RssAnon"))
print(table[::100_000].all(1).sum(), own)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a process")
def test_tables_that_are_larger_than_memory(tmp_path):
    """10^8 rows of 16 with Adagrad, 12.8 GB of files: the process has less than 1 GB."""
    command = [sys.executable, "-c", _LARGE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    trained, kilobytes = map(int, run.stdout.split())
    assert trained == 1000
    assert kilobytes < 1_000_000
    files = [x for x in tmp_path.iterdir() if x.stat().st_size == 6_400_000_000]
    assert len(files) == 2


def test_slots_that_begin_with_the_rows():
    """They are read from the table, block by block."""
    copies = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: 2 * x, params), lambda u, s, params=None: (u, s)
    )
    tx = optax.chain(jmask.sgd(0.1), copies)
    params = {"table": np.random.default_rng(0).normal(size=(100_000, 50)).astype(np.float32)}
    state = jmask.host.offload(params, tx).state
    np.testing.assert_array_equal(state[1]["table"], 2 * params["table"])


# --- threads ------------------------------------------------------------------------------


def test_the_next_rows_are_read_while_the_step_runs():
    """By another thread: the second batch is loaded before the first is committed."""
    loaded, seen = threading.Event(), []

    def loader():
        yield from batches([1])
        seen.append(threading.current_thread() is threading.main_thread())
        loaded.set()
        yield from batches([1])

    host = offloaded()
    for _, params, state in host.steps(loader(), ids=IDS):
        assert loaded.wait(10)
        host.commit(add_one(params), state)
    assert host.params["table"][1, 0] == 2
    assert seen == [False]


def test_rows_are_never_stale():
    """Reads that come early, late, and between, of batches that overlap in every row.

    Their ids are of every dtype and shape, with padding, or none at all; what is no row of a
    batch keeps its bits, also rows of the capacity behind those of the batch.
    """
    rng, host = np.random.default_rng(0), offloaded(tables(20))
    table = host.params["table"]
    table[10:] = np.frombuffer(rng.bytes(80), np.float32).reshape(10, 2)
    before, expected, loader = table.copy(), np.zeros(10), []
    for k in range(200):
        ids = rng.integers(0, 10, rng.integers(0, 12))
        expected[np.unique(ids)] += 1
        dtype = (np.int8, np.uint8, np.int32, np.int64, np.uint64)[k % 5]
        padding = [-1] * (k % 3 * (np.dtype(dtype).kind == "i"))
        loader.append(np.array([*ids, *padding], dtype).reshape(1, -1))
    assert train(host, batches(*loader))[:10].tolist() == expected.tolist()
    assert table[10:].tobytes() == before[10:].tobytes()


def test_errors_of_other_threads_are_raised_in_the_loop():
    def loader():
        yield from batches([1], [1, 2])
        raise ZeroDivisionError("of the loader")

    host = offloaded()
    with pytest.raises(ZeroDivisionError, match="of the loader"):
        train(host, loader())
    assert host.params["table"][:3, 0].tolist() == [0, 2, 1]
    with pytest.raises(KeyError):
        train(host, [{"other": 1}])
    assert train(host, batches([1]))[:3].tolist() == [0, 3, 1]


def test_a_write_that_fails_is_raised(monkeypatch):
    host = offloaded()
    host_rows = type(host._tables[0])
    monkeypatch.setattr(host_rows, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(host, batches([1], [1], [1]))


def test_leaving_the_loop_writes_what_was_committed():
    host = offloaded()
    table = host.params["table"]
    loader = batches([1], [2], [3], [4])
    for k, (_, params, state) in enumerate(host.steps(loader, ids=IDS)):
        if k == 2:
            break  # not committed
        host.commit(add_one(params), state)
    assert table[:, 0].tolist()[:5] == [0, 1, 1, 0, 0]
    with pytest.raises(RuntimeError, match="`commit` is for a step"):
        host.commit(params, state)
    assert train(host, loader, steps=1)[:3].tolist() == [0, 2, 1]
    loop = host.steps(loader, ids=IDS)  # kept, as a traceback would keep it
    _, params, state = next(loop)
    host.commit(add_one(params), state)
    host.flush()
    assert table[:3, 0].tolist() == [0, 3, 1]
    assert host.count == 4


def test_a_loader_that_never_ends_can_be_left():
    forever = threading.Event()

    def loader():
        yield from batches([1])
        forever.wait(20)

    host = offloaded()
    assert train(host, loader(), steps=1)[1] == 1
    forever.set()


def test_a_second_loop_ends_the_first():
    host = offloaded()
    first = host.steps(batches([1], [2]), ids=IDS)
    _, params, state = next(first)
    host.commit(add_one(params), state)
    assert train(host, batches([1], [3]))[:4].tolist() == [0, 2, 0, 1]
    with pytest.raises(RuntimeError, match="another loop has begun"):
        next(first)


def test_parameters_that_were_donated_and_lost(tmp_path):
    host = offloaded()
    for _, params, _ in host.steps(batches([1]), ids=IDS):
        jax.jit(lambda x: x, donate_argnums=0)(params["w"])
        params["w"].delete()
        with pytest.raises(RuntimeError, match=r"`params\['w'\]` was donated .*: commit it"):
            host.checkpoint(tmp_path / "run")
        break
    with pytest.raises(RuntimeError, match=r"`params\['w'\]` was donated .*restore"):
        host.steps(batches([1]), ids=IDS)


# --- wrong calls --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "options", "error", "words"),
    [
        (3, {}, TypeError, "`loader` must be iterable"),
        (batches([1]), {"ids": {}}, ValueError, r"`ids\['table'\]` must be a function"),
        (batches([1]), {"ids": {"table": [1]}}, ValueError, r"`ids\['table'\]` must be a func"),
        (batches([1]), {"ids": {**IDS, "x": len}}, ValueError, "and no others"),
        (batches([1]), {"padding_id": 3}, ValueError, "`padding_id` must be no row"),
        (batches([1]), {"padding_id": 1.5}, TypeError, "`padding_id` must be an integer"),
        (batches([1], [2, 10]), {}, IndexError, r"hold 10 at \[1\].*10 rows .*`padding_id`"),
        (batches([-2]), {}, IndexError, r"hold -2 at \[0\]"),
        (batches([-1]), {"padding_id": None}, IndexError, "hold -1"),
        (batches([1.0]), {}, TypeError, "must be integers, got float"),
        (batches([True]), {}, TypeError, "must be integers, got bool"),
        ([{"ids": 3}], {}, ValueError, "must return an array that is one leaf.*got 3"),
        ([{"ids": [3, 4]}], {}, ValueError, r"got 3: make an array of a list, np.asarray"),
        (
            [{"x": np.arange(3)}],
            {"ids": {"table": lambda b: b["x"] + 1}},
            ValueError,
            "0 leaves",
        ),
        ([[x := np.arange(3), x]], {"ids": {"table": lambda b: b[0]}}, ValueError, "2 leaves"),
    ],
)
def test_loops_that_are_refused(loader, options, error, words):
    host = offloaded()
    with pytest.raises(error, match=words):
        train(host, loader, **{"ids": IDS, **options})
    # What was committed before is there, and the next loop goes on.
    before = host.params["table"][1, 0]
    assert train(host, batches([1]))[1] == before + 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda p, s: (p, ()), ValueError, "in the structure that the step was given"),
        (lambda p, s: (s, p), ValueError, "host.commit"),
        (
            lambda p, s: ({**p, "table": p["table"][:1]}, s),
            ValueError,
            r"`params\['table'\]` was",
        ),
        (
            lambda p, s: ({**p, "table": p["table"].astype(jnp.bfloat16)}, s),
            *(ValueError, "bfloat16"),
        ),
        (lambda p, s: ({**p, "w": jnp.ones(2)}, s), ValueError, r"`params\['w'\]` was"),
        (lambda p, s: ({**p, "table": 1.0}, s), ValueError, r"'table'\]` was.* got 1.0"),
    ],
)
def test_commits_that_are_refused(change, error, words):
    host = offloaded()
    for _, params, state in host.steps(batches([1, 2]), ids=IDS):
        with pytest.raises(error, match=words):
            host.commit(*change(params, state))
        host.commit(add_one(params), state)  # nothing is lost
    assert host.params["table"][1, 0] == 1


def test_commits_that_are_missing_or_traced():
    host = offloaded()
    with pytest.raises(RuntimeError, match="`commit` is for a step"):
        host.commit(tables(), ())
    loop = host.steps(batches([1], [2]), ids=IDS)
    next(loop)
    with pytest.raises(RuntimeError, match="no commit came"):
        next(loop)
    for _, params, state in host.steps(batches([1]), ids=IDS):
        with pytest.raises(TypeError, match=r"`commit` is called outside of jax.jit"):
            jax.jit(host.commit)(params, state)
        host.commit(params, state)
