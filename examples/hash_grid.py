"""instant-NGP's hash grid: a picture learned by one table (L, T, F) at the cost of the lookups.

    python examples/hash_grid.py
    python examples/hash_grid.py --log2-rows 14      a smaller table
    python examples/hash_grid.py --batch 8192        more pixels in a step

A place in the picture lies in one cell of each of L grids, from coarse to fine. The corners of
the cell are looked up in a table of T rows for each grid, by a hash where the grid has more
corners than that, and their rows are averaged by how near they are. A small network makes a
colour of the L averages. A step reads 4 L rows for each place; the table has L T, and two names
make the step cost what it reads:

    jmask.value_and_grad        where jax.value_and_grad was
    jmask.lazy(optax.adam)      where optax.adam was

The picture is a Julia set, computed for any size. The run trains with row-sparse gradients and
with dense ones, for the same time each, and prints the PSNR of the picture and the time of a
step. Where a batch reads about as many rows as there are, dense gradients are faster.

References:
    Müller et al., "Instant Neural Graphics Primitives with a Multiresolution Hash Encoding",
    2022.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.table import Table

import jmask
from common.program import Arguments, Program

LEVELS, FEATURES, HIDDEN = 16, 2, 64
COARSEST = 16  # cells of the first grid along a side; the last has those of the picture
RATE = 1e-2
CORNERS = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
PRIMES = np.array([1, 2_654_435_761], np.uint32)
OURS, STOCK = "jmask: row-sparse gradients", "stock optax: dense gradients"

Params = dict[str, Any]


@partial(jax.jit, static_argnums=0)
def julia_set(size: int) -> jax.Array:
    """Draw a picture (size, size, 3) with detail at all scales."""
    y, x = jnp.meshgrid(*[(jnp.arange(size) + 0.5) / size * 2.6 - 1.3] * 2, indexing="ij")

    def iterate(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        z, sums = state
        z = jnp.where(jnp.abs(z) < 8, z * z + (-0.79 + 0.15j), z)
        return z, sums + jnp.exp(-jnp.abs(z))

    _, sums = jax.lax.fori_loop(0, 60, iterate, (x + 1j * y, jnp.zeros_like(x)))
    phases = jnp.array([0.0, 0.7, 1.4])
    return 0.5 + 0.5 * jnp.sin(0.9 * sums[..., None] + phases)


def cells(size: int) -> np.ndarray:
    """Return the number of cells along a side, for each of the grids."""
    return np.geomspace(COARSEST, max(size, COARSEST), LEVELS).astype(np.int32)


def encoded(table: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """Return the features (n, L F) of places (n, 2) in the unit square."""
    sides, T = cells(size), table.shape[1]
    scaled = places[:, None] * sides[:, None].astype(np.float32)  # (n, L, 2)
    cell = jnp.floor(scaled)
    near = jnp.where(CORNERS == 1, (scaled - cell)[:, :, None], 1 - (scaled - cell)[:, :, None])
    corner = cell.astype(jnp.uint32)[:, :, None] + CORNERS.astype(np.uint32)  # (n, L, 4, 2)
    hashed = jnp.bitwise_xor(*jnp.moveaxis(corner * PRIMES, -1, 0)) % np.uint32(T)
    numbered = corner[..., 0] * (sides[:, None] + 1).astype(np.uint32) + corner[..., 1]
    fits = (sides.astype(np.int64) + 1) ** 2 <= T  # the grid: no corners collide
    ids = jnp.where(fits[:, None], numbered, hashed).astype(jnp.int32)
    rows = table[np.arange(LEVELS)[:, None], ids]  # (n, L, 4, F): an ordinary lookup
    return jnp.sum(rows * jnp.prod(near, -1)[..., None], axis=2).reshape(len(places), -1)


def colours(params: Params, places: jax.Array, size: int) -> jax.Array:
    x = encoded(params["table"], places, size)
    *hidden, last = params["layers"]
    for weight in hidden:
        x = jax.nn.relu(x @ weight)
    return x @ last


def init_params(rows: int, seed: int) -> Params:
    table_key, *keys = jax.random.split(jax.random.key(seed), 4)
    shape, widths = (LEVELS, rows, FEATURES), (LEVELS * FEATURES, HIDDEN, HIDDEN, 3)
    return {
        "table": jax.random.uniform(table_key, shape, minval=-1e-4, maxval=1e-4),
        "layers": [
            jax.random.normal(key, (before, after)) * (2 / before) ** 0.5
            for key, before, after in zip(keys, widths[:-1], widths[1:], strict=True)
        ],
    }


def make_step(tx: optax.GradientTransformation, value_and_grad: Callable[..., Any]) -> Any:
    """Make a step on random pixels of the picture."""

    @partial(jax.jit, donate_argnums=(0, 1), static_argnums=4)
    def step(params: Params, state: Any, picture: jax.Array, key: jax.Array, batch: int) -> Any:
        size = len(picture)
        pixels = jax.random.randint(key, (batch, 2), 0, size)
        places, wanted = (pixels + 0.5) / size, picture[pixels[:, 0], pixels[:, 1]]

        def loss_fn(params: Params) -> jax.Array:
            return jnp.mean(jnp.square(colours(params, places, size) - wanted))

        loss, grads = value_and_grad(loss_fn)(params)
        params, state = jmask.apply_gradients(tx, grads, state, params)
        return params, state, loss

    return step


@partial(jax.jit, static_argnums=1)
def rendered(params: Params, size: int) -> jax.Array:
    """Compute the picture, line by line."""
    middle = (jnp.arange(size) + 0.5) / size
    line = lambda y: colours(params, jnp.stack([jnp.full(size, y), middle], axis=1), size)
    return jnp.clip(jax.lax.map(line, middle), 0, 1)


def psnr(picture: jax.Array, learned: jax.Array) -> float:
    """Return the peak signal-to-noise ratio, in dB."""
    return float(-10 * jnp.log10(jnp.mean(jnp.square(picture - learned))))


def train(
    name: str, picture: jax.Array, args: argparse.Namespace, program: Program
) -> tuple[jax.Array, int, float]:
    """Train; return the picture learned, the number of steps, and the median time of one."""
    adam = optax.adam(RATE, eps=1e-15)  # of instant-NGP: gradients of rows are small
    is_ours = name == OURS
    tx = jmask.lazy(adam) if is_ours else adam
    step = make_step(tx, jmask.value_and_grad if is_ours else jax.value_and_grad)
    params, keys = init_params(2**args.log2_rows, args.seed), jax.random.key(args.seed)
    state, seconds = tx.init(params), [0.0]
    total = args.steps or args.seconds
    with program.bar(f"{name:<28}", total, "loss {loss:.5f}") as show:
        for number in program.until_stopped(count()):
            if number >= args.steps if args.steps else sum(seconds[2:]) >= args.seconds:
                break
            start, key = time.perf_counter(), jax.random.fold_in(keys, number)
            params, state, loss = step(params, state, picture, key, args.batch)
            loss = float(loss)
            seconds.append(time.perf_counter() - start)
            show(number + 1 if args.steps else sum(seconds[2:]), loss=loss)
    median = float(np.median(seconds[2:] or seconds))  # the first one compiles
    return rendered(params, args.size), len(seconds) - 1, median


def save_plot(path: Path, picture: jax.Array, learned: jax.Array) -> None:
    error = 4 * jnp.abs(picture - learned)
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.3), layout="constrained")
    titles = ("picture", f"learned, PSNR {psnr(picture, learned):.1f} dB", "error, 4 times")
    for axis, image, title in zip(axes, (picture, learned, error), titles, strict=True):
        axis.imshow(np.clip(image, 0, 1))
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments("hash_grid", __doc__)
    parser.number("--size", 1024, "pixels along a side of the picture")
    parser.number("--log2-rows", 19, "the table has 2**N rows for each of 16 grids", most=22)
    parser.number("--batch", 2048, "pixels in a step")
    parser.number("--seconds", 15.0, "how long to train, both ways")
    parser.number("--steps", None, "train for so many steps instead")
    args = parser.parse_args(argv)
    picture = julia_set(args.size)
    shape = f"({LEVELS}, {2**args.log2_rows}, {FEATURES})"
    results = Table(
        "gradients", "steps", "PSNR", "time of a step", title=f"Adam, a table {shape}"
    )
    with Program("hash_grid") as program:
        for name in (OURS, STOCK):
            learned, steps, seconds = train(name, picture, args, program)
            if name == OURS:
                save_plot(args.plot, picture, learned)
                program.wrote("picture, learned, error", args.plot)
            quality, time_of_step = psnr(picture, learned), f"{1e3 * seconds:.1f} ms"
            results.add_row(name, f"{steps:,}", f"{quality:.1f} dB", time_of_step)
        program.print(results)


if __name__ == "__main__":
    main()
