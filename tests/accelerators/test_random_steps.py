"""Random steps, compiled for a CPU, and for a TPU and a GPU that are only described.

A table of random dtype and width, or a stack of them; an optimizer of the tests, wrapped or
not; a loss that looks rows up in one of the ways of users, some also for `aux`. What a compiler
refuses fails here, and so does what it would copy: on one device, and on a mesh of eight, of
which each has some rows, or all.
"""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from tests.accelerators.test_gpu import gpu, gpus
from tests.accelerators.test_tpu import device, devices
from tests.compiled_step import shapes
from tests.optimizers import OPTIMIZERS
from tests.sampling import chosen

pytestmark = [pytest.mark.dtype_promotion, pytest.mark.rank_promotion]
SEEDS = pytest.mark.parametrize("seed", chosen(range(3), range(60)))

ROWS, COUNT = 400_000, 512

LOSSES = {
    "rows": lambda look, bag, ids: jnp.sum(look(ids) ** 2),
    "negated": lambda look, bag, ids: -jnp.sum(look(ids)),
    "two lookups": lambda look, bag, ids: jnp.sum(look(ids) * look(ids[::-1])),
    "softmax": lambda look, bag, ids: jnp.sum(jax.nn.logsumexp(look(ids), 0)),
    "a scan": lambda look, bag, ids: jnp.sum(
        jax.lax.map(lambda i: jnp.sum(jnp.sin(look(i))), ids.reshape(4, -1))
    ),
    "branches": lambda look, bag, ids: jax.lax.cond(
        ids[0] > 3, lambda: jnp.sum(look(ids) ** 2), lambda: jnp.sum(jnp.sin(look(ids + 1)))
    ),
    **{
        f"bags, {combiner}": lambda look, bag, ids, combiner=combiner: jnp.sum(
            jnp.tanh(bag(ids.reshape(-1, 4), combiner=combiner, padding_id=3))
        )
        for combiner in ("sum", "mean", "max")
    },
    "weighted bags": lambda look, bag, ids: jnp.sum(
        bag(ids.reshape(-1, 4), weights=jnp.cos(ids).reshape(-1, 4)) ** 2
    ),
    "segments": lambda look, bag, ids: jnp.sum(
        bag(ids, segment_ids=ids // 30_000, num_segments=20) ** 2
    ),
}
AUX = {
    "none": lambda look, ids: None,
    "the rows": lambda look, ids: look(ids),
    "other rows": lambda look, ids: jnp.mean(look(ids + 1) > 0, 0),
}
WRAPPED = {
    "alone": lambda tx: tx,
    "skipped": jmask.skip_nonfinite,
    "averaged": lambda tx: optax.chain(tx, jmask.ema(0.9)),
    "touched": lambda tx: optax.chain(tx, jmask.touched()),
    "clipped": lambda tx: optax.chain(jmask.lazy(optax.clip_by_global_norm(1.0)), tx),
    "clipped by rows": lambda tx: optax.chain(jmask.clip_by_row_norm(1.0), tx),
    "bounded": lambda tx: optax.chain(tx, jmask.max_row_norm(1.0)),
    "in parts": lambda tx: optax.partition(
        {"t": tx, "w": jmask.sgd(0.1)}, {"t": "t", "w": "w"}
    ),
}


def drawn(seed):
    """A table, names of an optimizer, its wrapper, a loss and what it returns beside."""
    draw = random.Random(seed)
    dtype = draw.choice(["float32", "float32", "bfloat16", "float16"])
    width, stacked = draw.choice([128, 256]), draw.random() < 0.25
    shape = (8, ROWS // 8, width) if stacked else (ROWS, width)
    names = (draw.choice(list(x)) for x in (OPTIMIZERS, WRAPPED, LOSSES, AUX))
    return jax.ShapeDtypeStruct(shape, dtype), *names


def placed(seed, devices):
    """A mesh of devices, by what it shards the rows of a table and the ids, and its name."""
    draw = random.Random(-1 - seed)
    types = draw.choice([AxisType.Explicit, AxisType.Auto])
    mesh = Mesh(np.array(devices).reshape(2, 4), ("a", "b"), axis_types=(types, types))
    axes = [None, "a", ("a", "b")]
    return mesh, draw.choice(axes), draw.choice(axes)


def check(where, table, optimizer, wrapper, loss, aux):
    """The step is compiled, and has no temporary of the size of what a device has of a table.

    `where` is the sharding of one device, or what `placed` returns.
    """
    tx = WRAPPED[wrapper](OPTIMIZERS[optimizer])
    params = {"t": table, "w": jax.ShapeDtypeStruct((table.shape[-1],), jnp.float32)}
    arguments = params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((COUNT,), "int32")
    mesh, rows, of_ids = where if isinstance(where, tuple) else (None, None, None)
    out = None
    if mesh is None:
        arguments = shapes(arguments, where)
    else:
        if loss == "a scan" or table.ndim > 2:  # JAX takes neither apart where it is sharded
            rows, of_ids = (None, None) if table.ndim > 2 else (rows, None)
        at = lambda axes, x: shapes(x, NamedSharding(mesh, P(axes) if axes else P()))
        of_table = lambda x: at(rows if x.shape[:1] == table.shape[:1] else None, x)
        *trained, ids = arguments
        arguments = *jax.tree.map(of_table, trained), at(of_ids, ids)
        out = NamedSharding(mesh, P(of_ids)) if mesh.explicit_axes else None

    def loss_fn(params, ids):
        stacked = params["t"].ndim == 3
        first = params["t"][0] if stacked else params["t"]

        def read(i):
            if stacked:
                return params["t"].at[i % 8, i // 8].get(out_sharding=out)
            return params["t"][i] if out is None else jmask.embedding_lookup(first, i)

        look = lambda i: read(i).astype(jnp.float32) * params["w"]
        bag = lambda *of, **how: jmask.embedding_bag(first, *of, **how).astype(jnp.float32)
        return LOSSES[loss](look, bag, ids), AUX[aux](look, ids)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        (value, beside), grads = jmask.value_and_grad(loss_fn, has_aux=True)(params, ids)
        return *jmask.apply_gradients(tx, grads, state, params), value, beside

    memory = step.lower(*arguments).compile().memory_analysis()
    shards = {None: 1, "a": 2}.get(rows, 8)
    size = table.size * table.dtype.itemsize / shards
    assert memory.alias_size_in_bytes >= size
    what = table, optimizer, wrapper, loss, aux, where
    assert memory.temp_size_in_bytes < size / 3, what


def drawn_for_cpus(seed):
    table, *names = drawn(seed)
    if jax.__version_info__ < (0, 11, 2) and table.dtype == jnp.bfloat16:
        pytest.skip("this XLA has no bfloat16 scatter on CPUs, and widens the table")
    return table, *names


@pytest.mark.of_cpus
@SEEDS
def test_on_a_cpu(seed):
    check(None, *drawn_for_cpus(seed))


@pytest.mark.of_cpus
@SEEDS
def test_on_cpus(seed):
    *names, _ = drawn_for_cpus(seed)
    # Rows in `aux` come from a copy: an order would cost a sum over all devices.
    check(placed(seed, jax.devices()[:8]), *names, "none")


@pytest.mark.needs(what="libtpu")
@SEEDS
def test_on_a_tpu(seed):
    check(device("v5e:2x2"), *drawn(seed))


@pytest.mark.needs(what="libtpu")
@SEEDS
def test_on_tpus(seed):
    check(placed(seed, devices("v5e:2x4")), *drawn(seed))


@pytest.mark.needs(what="jax_cuda12_plugin")
@SEEDS
def test_on_a_gpu(seed):
    check(gpu("H100"), *drawn(seed))


@pytest.mark.needs(what="jax_cuda12_plugin")
@SEEDS
def test_on_gpus(seed):
    check(placed(seed, gpus("H100", 8)), *drawn(seed))
