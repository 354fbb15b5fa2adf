"""The n-gram memory: its hashes, its model and its step beside dense JAX, and a whole run."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.oracle import is_row_sparse
from tests.project.test_examples import load  # noqa: F401

# Examples are written as programs are, which may promote ranks.
pytestmark = [pytest.mark.sampled(15), pytest.mark.rank_promotion, pytest.mark.dtype_promotion]

TINY = ["--seconds", "0.3", "--timing", "0.1", "--memory", "2000", "--width", "16"]
ROWS = 1000


@pytest.fixture
def example(load):  # noqa: F811
    return load("ngram_memory")


@pytest.fixture
def sizes(example):
    return example.Sizes(vocabulary=50, width=16, layers=2, heads=2, length=12, row=4)


@pytest.fixture
def tokens(sizes):
    return np.random.default_rng(0).integers(sizes.vocabulary, size=(3, 13)).astype(np.int32)


@pytest.fixture
def source(tmp_path):
    """Lines of a few kinds, so that three tokens say much of the fourth."""
    rng = np.random.default_rng(0)
    names = [f"{a}{b}" for a in ("total", "count", "value") for b in "abcd"]
    lines = [f"    {x} = compute({x}, {y})\n" for x, y in rng.choice(names, (3000, 2))]
    path = tmp_path / "source.py"
    path.write_text("".join(lines))
    return path


def test_ids_are_those_of_the_last_tokens(example, sizes, tokens):
    """Equal n-grams read equal rows, others others, and each hash has a part of its own."""
    import ngram_model

    parts = ngram_model.parts_of(sizes, ROWS)
    assert len(set(parts)) == sizes.lookups == 8
    assert all(p > ROWS // 8 and all(p % d for d in range(2, p)) for p in parts)
    ids = np.asarray(ngram_model.ngram_ids(jnp.asarray(tokens), sizes, ROWS))
    assert ids.shape == (*tokens.shape, 8)
    starts = np.cumsum([0, *parts])
    assert (ids >= starts[:-1]).all()
    assert (ids < starts[1:]).all()

    moved = np.array(tokens)
    moved[:, 5] = (moved[:, 5] + 1) % sizes.vocabulary
    other = np.asarray(ngram_model.ngram_ids(jnp.asarray(moved), sizes, ROWS))
    differs = (ids != other).mean((0, 2))
    assert not differs[[*range(5), *range(8, 13)]].any(), "of 3 tokens at most"
    assert (differs[5:7] > 0.9).all()
    assert not (ids != other)[:, 7, :4].any(), "2-grams"
    assert (ids != other)[:, 7, 4:].mean() > 0.9, "3-grams"


def test_hash_in_integers(example, sizes, tokens):
    """The hash of one place line by line, in Python's integers."""
    import ngram_model

    ids = ngram_model.ngram_ids(jnp.asarray(tokens), sizes, ROWS)
    parts = ngram_model.parts_of(sizes, ROWS)
    factors = np.random.default_rng(0).integers(0, 2**31, (8, 8)) * 2 + 1
    for number, place in ((0, 4), (3, 0), (7, 9)):
        order, mixed = (2, 2, 2, 2, 3, 3, 3, 3)[number], 0
        for back in range(order):
            token = int(tokens[1, place - back]) + 1 if place >= back else 0
            mixed ^= token * int(factors[number, back]) % 2**32
        mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % 2**32
        mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
        mixed ^= mixed >> 16
        assert int(ids[1, place, number]) == sum(parts[:number]) + mixed % parts[number]


def test_gradient_is_that_of_jax(example, sizes, tokens):
    loss = lambda params: example.loss_fn(params, tokens, sizes, ROWS)
    params = example.init_params(sizes, ROWS, seed=0)
    rng = np.random.default_rng(1)
    shape = params["memory"].shape
    params["memory"] = jnp.asarray(rng.normal(size=shape), jnp.float32)
    with jmask.strict():
        value, grads = jax.jit(jmask.value_and_grad(loss))(params)
    expected, dense = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert is_row_sparse(grads["memory"])
    assert is_row_sparse(grads["tokens"])
    assert grads["memory"].nse == 3 * 12 * 8
    grads = jax.tree.map(
        lambda g: g.todense() if is_row_sparse(g) else g, grads, is_leaf=is_row_sparse
    )
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_no_token_sees_the_next(example, sizes, tokens):
    """What is said of a token depends on those before it alone, through the memory too."""
    import ngram_model

    params = example.init_params(sizes, ROWS, seed=0)
    rng = np.random.default_rng(1)
    params["memory"] = jnp.asarray(rng.normal(size=params["memory"].shape), jnp.float32)
    changed = np.array(tokens)
    changed[:, 8] = (changed[:, 8] + 1) % sizes.vocabulary
    losses = jax.jit(lambda tokens: ngram_model.losses(params, tokens, sizes, ROWS))
    apart = np.abs(losses(tokens) - losses(changed))
    assert apart.shape == (3, 12)
    assert (apart[:, :7] < 1e-5).all(), "a loss is that of the next token"
    assert (apart[:, 7:10] > 1e-5).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_leave_rows_that_are_not_read(example, sizes, tokens, dtype):
    import ngram_model

    model = example.make_model(example.WITH, sizes, ROWS, 0, jnp.dtype(dtype))
    assert model.state[0]["memory"].dtype == dtype
    before, losses = model.state[0]["memory"], []
    shape = before.shape
    state = model.state
    for _ in range(5):
        state, loss = model.step(state, tokens)
        losses.append(float(loss))
    assert before.is_deleted(), "donated"
    assert losses[-1] < losses[0]
    read = np.unique(ngram_model.ngram_ids(jnp.asarray(tokens[:, :-1]), sizes, ROWS))
    moved = np.flatnonzero(np.asarray(state[0]["memory"], np.float32).any(1))
    np.testing.assert_array_equal(moved, read)
    assert state[0]["memory"].shape == shape
    assert int(state[2]) == 5


def test_pieces_put_together_are_the_text(load, source, tmp_path):  # noqa: F811
    pieces = load("source_pieces")
    text = "def naïve(x):\n\treturn x2 == '10' # ok\n\n"
    assert "".join(pieces.split_text(text)) == text
    other = tmp_path / "other.py"
    other.write_text(text)
    read = pieces.read_text([source, other], 10**9, 400)
    whole = source.read_text() + text
    said = b"".join(
        bytes([n]) if n < 256 else read.pieces[n - 256].encode()
        for n in (*read.train, *read.held_out)
    )
    assert said.decode() == whole
    assert read.held_out_bytes == len(whole[-len(whole) // 10 :].encode())
    assert read.train.max() < read.vocabulary <= 400


def test_a_run(example, source, tmp_path, capsys, monkeypatch):
    """Trains, times and draws; what needs more memory than there is is left out."""
    monkeypatch.setattr(example, "free_bytes", lambda: 5 * 4 * 16 * 100_000)
    small = partial(example.Sizes, layers=2, length=16)
    monkeypatch.setattr(example, "Sizes", small)
    png = tmp_path / "plot.png"
    example.main([str(source), *TINY, "--rows", "1e5", "--plot", str(png)])
    printed = capsys.readouterr().out
    bits = re.findall(r"(with\S* [^│]*?) +│ +\d+ s │ +[\d,]+ │ +([\d.]+) │", printed)
    assert [name for name, _ in bits] == [example.WITHOUT, example.WITH, example.STOCK]
    assert all(0 < float(x) < 8 for _, x in bits)
    times = re.findall(r"(with[^│]*?) +│ +([\d,]*) │ +[\d.]+ ms │ +([\d.]+) │", printed)
    assert times[0] == (example.WITHOUT, "", "1.00")
    assert [row[:2] for row in times[1:]] == [(example.WITH, "100,000")]
    assert "stock optax, 100,000 rows: left out, it needs 0 GB" in printed

    from matplotlib.image import imread

    assert imread(png).std() > 0.01


def test_memory_that_is_left(load, tmp_path, monkeypatch):  # noqa: F811
    """The least of what the system and the container say; without a word, no limit."""
    said = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 7 kB\n"}

    class Files(type(tmp_path)):
        def read_text(self):
            if str(self) not in said:
                raise FileNotFoundError(self)
            return said[str(self)]

    free_memory = load("free_memory")
    monkeypatch.setattr(free_memory, "Path", Files)
    assert free_memory.free_bytes() == 7 * 1024
    said |= {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "5\n"}
    assert free_memory.free_bytes() == 7 * 1024
    said["/sys/fs/cgroup/memory.max"] = "105\n"
    assert free_memory.free_bytes() == 100
    said.clear()
    assert free_memory.free_bytes() == float("inf")


def test_refuses_a_short_text(example, tmp_path):
    path = tmp_path / "short.py"
    path.write_text("x = 1\n")
    with pytest.raises(SystemExit, match="6 characters are too little text"):
        example.main([str(path)])
    path.write_text("x = 1\n" * 300)
    with pytest.raises(SystemExit, match="tokens are too little text"):
        example.main([str(path)])
    with pytest.raises(SystemExit, match=r"cannot read .*nowhere"):
        example.main([str(tmp_path / "nowhere.py")])
