"""SASRec: which item comes next, from sampled negatives, with row-sparse gradients.

    python examples/sequences.py
    python examples/sequences.py --items 1000000        a larger table

A transformer reads the items that a user took, one after the other, and its state after each is
a vector; the next item should fit it better than items drawn at random. Items are rows of one
table, and a step touches those of its batch alone:

    jmask.value_and_grad        where jax.value_and_grad was
    jmask.lazy(optax.adam)      where optax.adam was

The sequences are made up (see common/interactions.py): users take items of their own group,
and half of the time the one that follows the item before. The run trains with row-sparse and
with dense gradients, for the same time each, and prints how often the next item is among the
ten best of all items (hit rate), how high (NDCG), and the time of a step.

References:
    Kang and McAuley, "Self-Attentive Sequential Recommendation", 2018.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

import jmask
from common.interactions import Sequences, make_sequences
from common.learning_curve import save_curves
from common.program import Arguments, Program

LENGTH, BATCH, NEGATIVES = 20, 128, 4
LAYERS, HEADS, SHOWN, ASKED = 2, 2, 10, 500
POINTS = 4  # of a curve
OURS, STOCK = "SASRec, jmask", "SASRec, stock optax"

Params = dict[str, Any]
Batch = dict[str, np.ndarray]


def init_params(items: int, dim: int, seed: int) -> Params:
    items_key, places_key, *keys = jax.random.split(jax.random.key(seed), 2 + LAYERS)
    weight = lambda key, *shape: jax.random.normal(key, shape) * shape[0] ** -0.5

    def layer(key: jax.Array) -> Params:
        keys = iter(jax.random.split(key, 4))
        return {
            "attention": weight(next(keys), dim, 3 * dim),
            "output": weight(next(keys), dim, dim),
            "up": weight(next(keys), dim, dim),
            "down": weight(next(keys), dim, dim),
        }

    return {
        "items": 0.1 * jax.random.normal(items_key, (items, dim)),
        "places": 0.1 * jax.random.normal(places_key, (LENGTH, dim)),
        "layers": [layer(key) for key in keys],
    }


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def states(params: Params, items: jax.Array) -> jax.Array:
    """Return the state after each item (n, LENGTH): vectors (n, LENGTH, dim)."""
    x = params["items"][items] + params["places"]
    for layer in params["layers"]:
        parts = (normed(x) @ layer["attention"]).reshape(*x.shape[:2], 3, HEADS, -1)
        read = jax.nn.dot_product_attention(*jnp.moveaxis(parts, 2, 0), is_causal=True)
        x += read.reshape(x.shape) @ layer["output"]
        x += jax.nn.relu(normed(x) @ layer["up"]) @ layer["down"]
    return normed(x)


def loss_fn(params: Params, batch: Batch) -> jax.Array:
    """Return a loss: the next item should fit, and others should not."""
    x = states(params, batch["items"])
    right = jnp.einsum("bnd,bnd->bn", x, params["items"][batch["next"]])
    wrong = jnp.einsum("bnd,bnkd->bnk", x, params["items"][batch["others"]])
    return jnp.mean(jax.nn.softplus(-right)) + jnp.mean(jax.nn.softplus(wrong))


def make_step(tx: optax.GradientTransformation, value_and_grad: Callable[..., Any]) -> Any:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, opt_state: Any, batch: Batch) -> Any:
        loss, grads = value_and_grad(loss_fn)(params, batch)
        params, opt_state = jmask.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss

    return step


def batch_of_step(data: Sequences, seed: int, step: int) -> Batch:
    """Draw sequences, what came next at each place, and items at random."""
    rng = np.random.default_rng((seed, step))
    items = data.items[rng.integers(len(data.items), size=BATCH)]
    shape = (BATCH, LENGTH, NEGATIVES)
    others = rng.integers(len(data.successor), size=shape, dtype=np.int32)
    return {"items": items[:, :-1], "next": items[:, 1:], "others": others}


def measures(scores: jax.Array, wanted: np.ndarray) -> tuple[float, float]:
    """Return hit rate and NDCG of the wanted items (n,), by scores (n, items) or (items,)."""
    scores = np.broadcast_to(scores, (len(wanted), scores.shape[-1]))
    wanted_scores = np.take_along_axis(scores, wanted[:, None], axis=1)
    rank = np.sum(scores > wanted_scores, axis=1)
    shown = rank < SHOWN
    return float(np.mean(shown)), float(np.mean(np.where(shown, 1 / np.log2(rank + 2), 0)))


def measured(params: Params, data: Sequences) -> tuple[float, float]:
    x = jax.jit(states)(params, data.items[:ASKED, 1:])[:, -1]
    parts = [slice(i, i + 50) for i in range(0, len(x), 50)]  # all scores would be a gigabyte
    quality = [measures(x[i] @ params["items"].T, data.following[:ASKED][i]) for i in parts]
    return tuple(np.mean(quality, axis=0).tolist())


def train(
    name: str, data: Sequences, args: argparse.Namespace, program: Program
) -> tuple[list[tuple[int, float, float, float]], float]:
    """Train; return steps, loss, hit rate and NDCG, and the median seconds of a step."""
    tx, is_ours = optax.adam(args.rate), name == OURS
    step = make_step(
        jmask.lazy(tx) if is_ours else tx,
        jmask.value_and_grad if is_ours else jax.value_and_grad,
    )
    params = init_params(args.items, args.dim, args.seed)
    opt_state, curve, losses, seconds, number = tx.init(params), [], [], [0.0], 0

    def measure() -> None:
        nonlocal losses
        quality = measured(params, data)
        curve.append((number, float(np.mean(losses)), *quality))
        show(done, loss=curve[-1][1], hits=quality[0])
        losses = []

    fields = "loss {loss:.3f}  hit rate {hits:.1%}"
    total, done = args.steps or args.seconds, 0.0
    with program.bar(f"{name:<20}", total, fields) as show:
        for number in program.until_stopped(count(1)):
            batch, start = batch_of_step(data, args.seed, number), time.perf_counter()
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(float(loss))
            seconds.append(time.perf_counter() - start)
            done = number if args.steps else sum(seconds[2:])  # the first one compiles
            if done >= (len(curve) + 1) / POINTS * total:
                measure()
            else:
                show(done)
            if done >= total:
                break
        if losses:
            measure()
    return curve, float(np.median(seconds[2:] or seconds))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments("sequences", __doc__)
    parser.number("--users", 200_000, "each takes a sequence of items")
    parser.number("--items", 300_000, "of which they take some")
    parser.number("--groups", 300, "of users and items")
    parser.number("--dim", 32, "length of a vector", least=HEADS)
    parser.number("--seconds", 15.0, "how long to train, both ways")
    parser.number("--steps", None, f"so many batches of {BATCH} sequences instead")
    parser.number("--rate", 0.005, "learning rate")
    args = parser.parse_args(argv)
    if args.items < args.groups:
        parser.error(f"argument --items: {args.items} is less than one for each group")
    data = make_sequences(args.users, args.items, args.groups, LENGTH + 1, args.seed)
    counts = np.bincount(data.items.ravel(), minlength=args.items)
    popular = measures(counts, data.following[:ASKED])
    table = Table("", "steps", f"hit rate@{SHOWN}", f"NDCG@{SHOWN}", "time of a step")
    table.add_row("the most popular items", "", *(f"{x:.1%}" for x in popular), "")
    with Program("sequences") as program:
        for name in (OURS, STOCK):
            curve, seconds = train(name, data, args, program)
            steps, loss, hits, ndcg = zip(*curve, strict=True)
            row = f"{steps[-1]:,}", f"{hits[-1]:.1%}", f"{ndcg[-1]:.1%}"
            table.add_row(name, *row, f"{1e3 * seconds:.1f} ms")
            if name == OURS:
                lines = {"the most popular items": popular[0]}
                save_curves(args.plot, steps, loss, hits, f"hit rate@{SHOWN}", lines)
                program.wrote("learning curve", args.plot)
        program.print(table)


if __name__ == "__main__":
    main()
