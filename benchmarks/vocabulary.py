"""An open vocabulary beside the best one of its size, and beside a step of Adam.

    make bench-vocabulary            three minutes

10⁷ keys drawn from 10⁸ by Zipf's law (exponent 1.05), in batches of 8,192, for 10⁵ rows: how
many of the later half have a row of their own, beside an LRU cache of 10⁵ keys that may give
any row away, and remembers a key from its first sight. Then the time for the keys of a batch,
with capacities of 10⁵ and 10⁷, beside a step of Adam on as many rows of 10⁶ x 64.
"""

import argparse
import collections
import functools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jmask

KEYS, EXPONENT, BATCH = 10**8, 1.05, 8192
# Admission after a key was seen so often, and eviction.
POLICIES = ((1, "lru"), (2, "lru"), (2, "lfu"))
step_of = lambda: jax.jit(jmask.vocabulary.rows_of, donate_argnums=0)


def batches(count: int, seed: int) -> Iterator[np.ndarray]:
    """Keys by Zipf's law, by inversion; their order says nothing of how frequent they are."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        u, e = rng.random(BATCH), 1 - EXPONENT
        ranks = ((1 + u * (KEYS**e - 1)) ** (1 / e)).astype(np.uint64)
        yield ranks * np.uint64(0x9E3779B97F4A7C15)


def hits_of_lru(capacity: int, count: int, seed: int) -> float:
    """The share of the later half of all keys that a cache of the last keys has."""
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    hits = 0
    for number, keys in enumerate(track(batches(count, seed), "LRU", count)):
        for key in keys.tolist():
            hits += key in cache and number >= count // 2
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits / (BATCH * (count - count // 2))


def hits_of_vocabulary(capacity: int, policy: tuple[int, str], count: int, seed: int) -> float:
    admit_after, evict = policy
    vocab, step = jmask.vocabulary.create(capacity, 16, admit_after, evict), step_of()
    before = 0
    for number, keys in enumerate(track(batches(count, seed), f"{policy}", count)):
        if number == count // 2:
            before = vocab.counters()["hits"]
        _, vocab, _ = step(vocab, jmask.vocabulary.words_of(keys))
    return (vocab.counters()["hits"] - before) / (BATCH * (count - count // 2))


def vocabulary_run(capacity: int, evict: str) -> Callable[[jax.Array], None]:
    held = [jmask.vocabulary.create(capacity, evict=evict)]
    step = step_of()

    def run(words: jax.Array) -> None:
        rows, held[0], recycled = step(held[0], words)
        jax.block_until_ready((rows, held[0], recycled))

    return run


def adam_run() -> Callable[[jax.Array], None]:
    tx, params = jmask.lazy(optax.adam(1e-3)), {"table": jnp.ones((10**6, 64))}
    held = [(params, tx.init(params))]
    loss = lambda params, ids: jnp.sum(params["table"][ids] ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, words):
        ids = (words[:, 1] % np.uint32(10**6)).astype(jnp.int32)
        return jmask.apply_gradients(tx, jmask.grad(loss)(params, ids), state, params)

    def run(words: jax.Array) -> None:
        held[0] = step(*held[0], words)
        jax.block_until_ready(held[0])

    return run


def timed(runs: dict[str, Callable[[jax.Array], None]], rounds: int, seed: int) -> Table:
    """The least seconds of each, by the clock and of all threads, in alternating rounds."""
    wall: dict[str, list[float]] = {name: [] for name in runs}
    threads: dict[str, list[float]] = {name: [] for name in runs}
    for number, keys in enumerate(track(batches(rounds + 3, seed), "timing", rounds + 3)):
        words = jax.block_until_ready(jnp.asarray(jmask.vocabulary.words_of(keys)))
        for name, run in runs.items():
            start = time.perf_counter(), time.process_time()
            run(words)
            if number >= 3:
                wall[name].append(time.perf_counter() - start[0])
                threads[name].append(time.process_time() - start[1])
    title = f"{BATCH:,} keys, or rows of 64"
    table = Table("", "least ms", "of Adam's", "CPU ms", "of Adam's", title=title)
    for name in runs:
        cells = [name]
        for seconds in (wall, threads):
            least = min(seconds[name])
            cells += [f"{least * 1e3:.1f}", f"{least / min(seconds['Adam']):.2f}"]
        table.add_row(*cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=10**7, help="drawn in all")
    parser.add_argument("--capacity", type=int, default=10**5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    count = max(args.keys // BATCH, 2)
    ideal = hits_of_lru(args.capacity, count, args.seed)
    table = Table("policy", "hits", "of those of an LRU", title="Keys with a row of their own")
    table.add_row("LRU over all rows", f"{ideal:.4f}", "")
    for policy in POLICIES:
        hits = hits_of_vocabulary(args.capacity, policy, count, args.seed)
        table.add_row(f"{policy[1]}, after {policy[0]}", f"{hits:.4f}", f"{hits / ideal:.3f}")
    console = Console()
    console.print(table)

    runs = {"Adam": adam_run()}
    for evict in ("lru", "lfu"):
        for capacity in (10**5, 10**7):
            runs[f"{evict}, capacity {capacity:,}"] = vocabulary_run(capacity, evict)
    console.print(timed(runs, args.rounds, args.seed))


if __name__ == "__main__":
    main()
