"""`jmask.vocabulary` beside a model of its policy in plain Python.

The model has lists of places, one key after the other, and none of what the library does on
arrays. Random batches are drawn so that all of the policy is met: few sets and many keys, keys
that come several times, more new keys in a set than rows, counts and clocks at their limits.
"""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jmask import vocabulary
from tests.compiled_step import vocabulary_in_place
from tests.later import later
from tests.sampling import chosen

ocp, serialization = later("orbax.checkpoint"), later("flax.serialization")

LIMIT = 2**32


def mixed(x):
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13), (1, 16)):
        x = (x ^ (x >> shift)) * factor % LIMIT
    return x


def hash_of(key):
    """The hash of an integer of 64 bits, by two rounds of fmix32."""
    high, low = (key >> 32) % LIMIT, key % LIMIT
    return mixed((mixed((low + 0x9E3779B9) % LIMIT) + high) % LIMIT)


class Model:
    """The policy: sets of places [key, used, seen], the first `ways` of them with rows."""

    def __init__(self, capacity, ways, admit_after, evict, shared_rows):
        self.count, self.ways = -(-capacity // ways), ways
        self.admit_after, self.evict, self.shared = admit_after, evict, shared_rows
        places = ways * (1 if admit_after == 1 else 2)
        self.sets = [[[None, 0, 0] for _ in range(places)] for _ in range(self.count)]
        self.clock = 0
        self.counters = dict.fromkeys(("hits", "new", "evicted", "waiting"), 0)

    def rows_of(self, keys):
        """The rows of a batch, and which of them are recycled."""
        if not keys:
            return [], set()
        self.clock = (self.clock + 1) % LIMIT
        times = {key: keys.count(key) for key in keys}
        rows, recycled = {}, set()
        by_set = {}
        for key in sorted(times, key=lambda key: (hash_of(key), key % 2**64)):
            by_set.setdefault(hash_of(key) * self.count // LIMIT, []).append(key)
        for number, members in by_set.items():
            self._set(number, members, times, rows, recycled)
        capacity = self.count * self.ways
        shared = lambda key: capacity + hash_of(key) % self.shared
        return [rows.get(key, shared(key)) for key in keys], recycled

    def _set(self, number, members, times, rows, recycled):
        places = self.sets[number]
        place_of = {x[0]: i for i, x in enumerate(places) if x[2] > 0 and x[0] in times}
        busy, ways = set(place_of.values()), self.ways
        seen = {}
        for key in members:
            before = places[place_of[key]][2] if key in place_of else 0
            seen[key] = min(before + times[key], LIMIT - 1)
            if place_of.get(key, ways) < ways:
                rows[key] = number * ways + place_of[key]
                self.counters["hits"] += times[key]

        def turn(i, is_row):
            _, used, count = places[i]
            age = min((self.clock - used) % LIMIT, LIMIT - 2)
            recent = 0 if count == 0 else LIMIT - 1 - age
            return (count, recent, i) if is_row and self.evict == "lfu" else (recent, i)

        free_rows = sorted((i for i in range(ways) if i not in busy), key=lambda i: turn(i, 1))
        free = (i for i in range(ways, len(places)) if i not in busy)
        free_places = sorted(free, key=lambda i: turn(i, 0))
        for key in members:
            if key not in rows and seen[key] >= self.admit_after and free_rows:
                i = free_rows.pop(0)
                self.counters["new"] += 1
                self.counters["evicted"] += places[i][2] > 0
                if key in place_of:
                    places[place_of[key]][2] = 0
                rows[key], place_of[key] = number * ways + i, i
                recycled.add(rows[key])
        for key in members:
            if key not in rows:
                self.counters["waiting"] += times[key]
                if key not in place_of and free_places:
                    place_of[key] = free_places.pop(0)
            if key in place_of:
                places[place_of[key]][:] = key, self.clock, seen[key]


step = jax.jit(vocabulary.rows_of, donate_argnums=0)


def compare(vocab, model, batches):
    """Run both, and hold all that comes out against each other."""
    for keys in batches:
        rows, vocab, recycled = step(vocab, vocabulary.words_of(keys))
        expected, new = model.rows_of(keys.tolist())
        assert rows.tolist() == expected
        rest = [x for x in recycled.tolist() if x != vocab.table_rows]
        assert len(rest) == len(new)
        assert set(rest) == new
        assert set(rest) <= set(expected)
    assert vocab.counters() == model.counters
    return vocab


CASES = {
    "lru": (64, 4, 2, "lru"),
    "lfu": (64, 4, 2, "lfu"),
    "at first sight": (64, 8, 1, "lru"),
    "at third sight, lfu": (96, 16, 3, "lfu"),
    "one set": (4, 4, 2, "lru"),
    "one way": (16, 1, 2, "lfu"),
    "not whole sets": (50, 16, 5, "lru"),
    "ranked in rounds": (96, 48, 2, "lru"),
    "ranked in rounds, lfu": (64, 64, 1, "lfu"),
}


def batches_of(rng, count, size, most):
    """Batches whose keys come again, drawn from a slowly moving window of 64-bit numbers."""
    spread = np.int64(0x1E3779B97F4A7C15)
    for k in range(count):
        ids = (rng.random(size) ** 2 * most).astype(np.int64) + k // 8
        yield np.where(ids % 3 == 0, -ids, ids * spread)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operations", chosen([10_000], [150_000]))
def test_the_model(case, operations):
    """All nine of the slow tier are more than 10⁶ keys."""
    capacity, ways, admit_after, evict = CASES[case]
    rng = np.random.default_rng(len(case))
    vocab = vocabulary.create(capacity, ways, admit_after, evict, shared_rows=3)
    model = Model(capacity, ways, admit_after, evict, 3)
    for size, most in ((1, 40), (7, 100), (50, 300), (50, 30), (200, 1000)):
        count = max(operations // 5 // size, 2) if size > 1 else 40
        vocab = compare(vocab, model, batches_of(rng, count, size, most))
    counters = vocab.counters()
    assert min(counters.values()) > 0
    assert counters["evicted"] < counters["new"]


# --- edges -------------------------------------------------------------------------------


def colliding(keys):
    """For each key another one with the same hash."""
    low = keys % LIMIT
    other = (low + 12345) % LIMIT
    high = [
        (mixed((x + 0x9E3779B9) % LIMIT) + h - mixed((y + 0x9E3779B9) % LIMIT)) % LIMIT
        for x, y, h in zip(low.tolist(), other.tolist(), (keys >> 32).tolist(), strict=True)
    ]
    return np.array([(h << 32) + y for h, y in zip(high, other.tolist(), strict=True)], "u8")


def test_keys_with_the_same_hash():
    """All of a batch, mixed with each other, with repetitions, and with what is no key."""
    rng = np.random.default_rng(0)
    vocab = vocabulary.create(64, 4, shared_rows=2)
    model = Model(64, 4, 2, "lru", 2)
    ids = rng.integers(0, 2**63, 40, dtype=np.uint64)
    every = np.concatenate([ids, colliding(ids)])
    assert [hash_of(int(x)) for x in every[:40]] == [hash_of(int(x)) for x in every[40:]]
    masked = jax.jit(lambda vocab, keys, where: vocabulary.rows_of(vocab, keys, where=where))
    for k in range(30):
        keys = rng.choice(every, 60)
        if k % 2:
            vocab = compare(vocab, model, [keys])
        else:
            where = rng.random(60) < 0.5
            rows, vocab, _ = masked(vocab, vocabulary.words_of(keys), where)
            expected, _ = model.rows_of(keys[where].tolist())
            assert rows[where].tolist() == expected
            assert (np.asarray(rows)[~where] == vocab.table_rows).all()
    assert vocab.counters() == model.counters


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_counts_and_clock_at_their_limits(evict):
    """Counts stop at 2³² - 1, the clock goes on at 0, and counters go on above 2³²."""
    vocab, model = vocabulary.create(32, 4, 2, evict), Model(32, 4, 2, evict, 16)
    rng = np.random.default_rng(1)
    batches = lambda: batches_of(rng, 20, 20, 40)
    vocab = compare(vocab, model, batches())
    lines = np.array(vocab.lines).reshape(-1, 4, vocab.places)
    # As if all keys had been seen often, and 2³² - 15 batches had gone by.
    offset = LIMIT - 15 - int(vocab.clock)
    lines[:, 2] += np.uint32(offset)
    lines[:, 3] = np.where(lines[:, 3] > 0, LIMIT - 1 - lines[:, 3] % 5, 0)
    for number, places in enumerate(model.sets):
        for i, place in enumerate(places):
            place[1:] = [int(x) for x in lines[number, 2:, i]]
    model.clock = LIMIT - 15
    counts = np.array(vocab.counts)
    counts[:, 1] = LIMIT - 1
    counters = dict.fromkeys(model.counters, LIMIT - 1)
    vocab = jax.tree.unflatten(
        jax.tree.structure(vocab),
        [jnp.asarray(lines.reshape(len(lines), -1)), jnp.uint32(LIMIT - 15), counts],
    )
    assert vocab.counters() == counters
    model.counters = counters
    vocab = compare(vocab, model, batches())
    assert int(vocab.clock) == 5
    assert (np.asarray(vocab.lines)[:, -vocab.places :] == LIMIT - 1).any()


def test_empty_batches():
    vocab = vocabulary.create(8, 4)
    _, vocab, _ = step(vocab, jnp.array([1, 1]))
    before = jax.tree.map(np.asarray, vocab)
    for empty in (
        np.zeros(0, np.int64),
        jnp.zeros((0, 2), jnp.uint32),
        [],
        np.zeros((3, 0), int),
    ):
        rows, vocab, recycled = vocabulary.rows_of(vocab, empty)
        assert rows.size == recycled.size == 0
    rows, after, recycled = vocabulary.rows_of(vocab, jnp.arange(3), where=jnp.zeros(3, bool))
    assert rows.tolist() == recycled.tolist() == [vocab.table_rows] * 3
    for have in (vocab, after):
        np.testing.assert_array_equal(have.lines, before.lines)
        assert have.counters() == before.counters()


def test_keys_of_all_kinds():
    """The same key in each dtype that holds it, under jit too, with x64 and on the host."""
    for numbers, kinds in (
        ([0, 1, 127], ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")),
        ([-1, -128, 5], ("i1", "i2", "i4", "i8")),
        ([2**40, 2**63 - 1, 7], ("i8", "u8")),
        ([2**64 - 1, 2**63], ("u8",)),
    ):
        expected = [[(x >> 32) % LIMIT, x % LIMIT] for x in numbers]
        for kind in kinds:
            keys = np.array(numbers, kind)
            assert vocabulary.words_of(keys).tolist() == expected
            with jax.enable_x64(True):
                assert jax.jit(vocabulary.words_of)(jnp.asarray(keys)).tolist() == expected
    words = vocabulary.hash_strings(["a", b"a", "b", "ü", ""])
    assert words.dtype == np.uint32
    assert len({tuple(x) for x in words.tolist()}) == 4
    assert vocabulary.words_of(words) is words
    assert vocabulary.hash_strings([]).shape == (0, 2)
    rows, _, _ = vocabulary.rows_of(vocabulary.create(8, 4), words.reshape(5, 1, 2))
    assert rows.shape == (5, 1)


# --- as any pytree of arrays ---------------------------------------------------------------


def test_sizes_that_are_integers_of_numpy():
    """No sum or product of them is cut to 8 bits, and a program that is exported holds none."""
    vocab = vocabulary.create(np.int16(100), np.int8(16), np.uint8(2), shared_rows=np.int64(16))
    assert_equal(vocab, vocabulary.create(100, 16, 2, shared_rows=16))
    assert export.export(jax.jit(vocabulary.rows_of))(vocab, KEYS).serialize()


def used():
    vocab = vocabulary.create(64, 4, 2, "lfu", shared_rows=3)
    for keys in batches_of(np.random.default_rng(2), 10, 30, 60):
        _, vocab, _ = step(vocab, vocabulary.words_of(keys))
    return vocab


KEYS = jnp.arange(40, dtype=jnp.int32) % 23


def assert_equal(have, want):
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_step_of_a_vocabulary_that_was_moved(tmp_path):
    """Through a file, a process or a program for batches of any size it is the same."""
    vocab = used()
    expected = step(jax.tree.map(jnp.copy, vocab), KEYS)
    assert_equal(step(pickle.loads(pickle.dumps(vocab)), KEYS), expected)
    empty = vocabulary.create(64, 4, 2, "lfu", shared_rows=3)
    stored = serialization.to_bytes({"vocab": vocab})
    assert_equal(
        step(serialization.from_bytes({"vocab": empty}, stored)["vocab"], KEYS), expected
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "vocab", vocab)
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda: vocabulary.create(64, 4, 2, "lfu", shared_rows=3))
        assert_equal(step(checkpointer.restore(tmp_path / "vocab", like), KEYS), expected)
    any_size = jax.ShapeDtypeStruct(export.symbolic_shape("b"), jnp.int32)
    for keys in (KEYS, any_size):
        exported = export.export(jax.jit(vocabulary.rows_of))(vocab, keys).serialize()
        assert_equal(export.deserialize(exported).call(vocab, KEYS), expected)

    def body(vocab, keys):
        rows, vocab, recycled = vocabulary.rows_of(vocab, keys)
        return vocab, (rows, recycled)

    batches = jnp.stack([KEYS, KEYS + 5, KEYS * 3])
    scanned, results = jax.jit(lambda v: jax.lax.scan(body, v, batches))(used())
    vocab, in_turn = used(), []
    for keys in batches:
        vocab, result = body(vocab, keys)
        in_turn.append(result)
    assert_equal((scanned, results), (vocab, tuple(map(jnp.stack, zip(*in_turn, strict=True)))))


@pytest.mark.parametrize("evict", ["lru", "lfu"])
@pytest.mark.parametrize("n", [1, 512])
def test_in_place(evict, n):
    small, large = (vocabulary_in_place(x, keys=n, evict=evict) for x in (10**5, 10**7))
    sizes = [x.memory_analysis().temp_size_in_bytes for x in (small, large)]
    assert sizes[0] == sizes[1]


# --- sharded -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["explicit", "automatic"])
@pytest.mark.parametrize("spread", [False, True])
def test_sharded_by_set(kind, spread):
    """As on one device, with keys on all devices or sharded; lines stay where they are."""
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("x",), (axis,))
    vocab = vocabulary.create(128, 4, mesh=mesh, shared_rows=3)
    alone = vocabulary.create(128, 4, shared_rows=3)
    where = vocab.lines.sharding
    assert where.spec[0] == "x"
    sharded_step = jax.jit(vocabulary.rows_of, donate_argnums=0)
    for keys in batches_of(np.random.default_rng(0), 12, 64, 300):
        words = jnp.asarray(vocabulary.words_of(keys))
        expected, alone, new = step(alone, words)
        if spread:
            words = jax.device_put(words, NamedSharding(mesh, P("x", None)))
        rows, vocab, recycled = sharded_step(vocab, words)
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(recycled, new)
        assert vocab.lines.sharding.is_equivalent_to(where, 2)
    np.testing.assert_array_equal(vocab.lines, alone.lines)
    assert vocab.counters() == alone.counters()
    compiled = sharded_step.lower(vocab, words).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10**6
    size = vocab.lines.size
    lines = [x for x in compiled.as_text().splitlines() if f"[{size}" in x or ",32,32]" in x]
    assert not any("all-gather" in x for x in lines)
