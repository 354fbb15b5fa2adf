"""Training runs on tables kept in other forms, and what must be the same as on arrays.

    trained(x, tx, step)                            a run on the array x (V, *row)
    trained(jmask.packed(x), tx, step, width=D)     the same run

A run makes three steps with ids that come twice, that are padding and that share lines.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmask
from tests.compilations import compilations
from tests.compiled_step import training_step
from tests.optimizers import OPTIMIZERS
from tests.oracle import assert_close

# The last of the ids is padding; rows touched share lines with rows that are not.
IDS = np.array([[1, 3, 3], [20, 9, 2], [5, 20, -1]])
TOUCHED = np.array([1, 2, 3, 5, 9, 20])


def update_and_apply(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return jmask.apply_updates(params, updates), state


STEPS = {"apply_gradients": jmask.apply_gradients, "update": update_and_apply}


def stored(form, x):
    """A table as "array" or, its rows in one dimension, as "packed"."""
    return x if form == "array" else jmask.packed(x.reshape(len(x), -1))


def of_lines(gradient, lines):
    """The gradient of a packed table, of that of the table (V, *row)."""
    size = int(np.prod(gradient.shape[1:]))
    ids = jnp.where(gradient.row_ids() < gradient.shape[0], gradient.row_ids(), -1)
    rows = gradient.values.reshape(ids.shape[0], size)
    look = lambda t: jmask.embedding_lookup(t, ids, width=size, mode="zero")
    # `row_sparse` has the rows as they are: nan in them, and numbers of any dtype.
    like = jax.eval_shape(jmask.grad(lambda t: jnp.sum(jnp.real(look(t)))), lines)
    if like.width is None:
        wide = jnp.pad(rows, ((0, 0), (0, lines.shape[1] - size)))
        return jmask.RowSparse(ids, wide, lines.shape)
    wide = jnp.pad(rows, ((0, 0), (0, like.width - size)))
    ids = jnp.where(ids < 0, like.row_count, ids)
    form = {"leading": like.leading, "width": like.width, "coalesced": False}
    return jmask.RowSparse.from_rows(ids, wide, lines.shape, **form)


def unpacked(tree, lines, shape):
    """The tree with arrays of the shape of `lines` as tables of this shape."""
    rows, size = jnp.arange(shape[0]), int(np.prod(shape[1:]))

    def rows_of(x):
        if getattr(x, "shape", None) != lines.shape:
            return x
        # Whatever the dtype: by hand, and not by a lookup.
        each = max(128 // (1 << (size - 1).bit_length()), 1)
        return x.reshape(x.shape[0] * each, -1)[rows, :size].reshape(shape)

    return jax.tree.map(rows_of, tree)


def stepped(tx, params, gradients, step="apply_gradients", wrap=jax.jit):
    """Parameters and state after a step with each of the gradients."""
    take = wrap(functools.partial(STEPS.get(step, step), tx))
    state = tx.init(params)
    for gradient in gradients:
        params, state = take(gradient, state, params)
    return params, state


class Run(NamedTuple):
    """What is left of a run: parameters, state, losses; how many programs its steps were
    compiled to, and the arrays of the table that the last step was given."""

    params: Any
    state: Any
    losses: list[float]
    programs: int
    donated: list[jax.Array]


def loss(params, ids, width=None):
    rows = jmask.embedding_lookup(params["table"], ids, padding_id=-1, width=width)
    return jnp.sum(jnp.sin(rows) * params["dense"][None, None])


def trained(table, tx, step, steps=3, ids=IDS, width=None):
    """Three steps on a table and a dense parameter, both donated."""
    one_step = training_step(functools.partial(loss, width=width), tx, step)
    row = table.shape[1:] if width is None else (width,)
    dense = jnp.linspace(0.5, 1.5, int(np.prod(row))).reshape(row)
    # Copied: the arguments of the first step are donated as well.
    params = jax.tree.map(jnp.copy, {"table": table, "dense": dense})
    params, state, losses = *replicated((params, tx.init(params)), table), []
    with compilations() as compiled:
        for _ in range(steps):
            donated = jax.tree.leaves(params["table"])
            params, state, value = one_step(params, state, ids)
            losses.append(float(value))
    return Run(params, state, losses, compiled.count("jit(step)"), donated)


@functools.cache
def trained_array(optimizer, row=(12,)):
    """The run on `numbers(row)`, an array on one device."""
    return trained(numbers(row), OPTIMIZERS[optimizer], jmask.apply_gradients)


AXIS_TYPES = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}


def need_devices(count):
    """Fail where there are fewer CPU devices, or skip where there are fewer GPUs."""
    if len(jax.devices()) < count:
        stop = pytest.fail if jax.default_backend() == "cpu" else pytest.skip
        stop(f"conftest.py makes {count} CPU devices; there are {jax.devices()}")


@functools.cache
def mesh_of(*sizes, axes="automatic"):
    """A mesh of CPU devices: "x" of one size, or "data" and "table" of two."""
    need_devices(8)
    names = ("data", "table") if len(sizes) == 2 else ("x",)
    return jax.make_mesh(sizes, names, axis_types=(AXIS_TYPES[axes],) * len(sizes))


# The mesh, the axes of rows, the axes of the batch, and the type of all axes.
LAYOUTS = {
    "1 device": ((1,), None, "x", "explicit"),
    "8 devices": ((8,), None, "x", "explicit"),
    "ids on every device": ((8,), None, None, "explicit"),
    "rows and batch over both axes": ((2, 4), None, ("data", "table"), "explicit"),
    "rows over table, batch over data": ((2, 4), "table", "data", "explicit"),
    "rows over table, batch over both": ((2, 4), "table", ("data", "table"), "explicit"),
    "rows over both, batch over data": ((2, 4), None, "data", "explicit"),
    "in the other order": ((2, 4), ("table", "data"), ("data", "table"), "explicit"),
    "rows and batch over table": ((2, 4), "table", "table", "explicit"),
    "automatic axis": ((8,), None, "x", "automatic"),
    "automatic, rows over table": ((2, 4), "table", "data", "automatic"),
}


def sharded(x, layout, **how):
    sizes, rows, _, axes = LAYOUTS[layout]
    return jmask.sharded(x, mesh_of(*sizes, axes=axes), axis=rows, **how)


def batch_of(ids, layout):
    """Ids whose first dimension is sharded as a layout has it, with lines of padding, -1."""
    sizes, _, batch, axes = LAYOUTS[layout]
    missing = -ids.shape[0] % 8
    ids = np.pad(ids, [(0, missing)] + [(0, 0)] * (ids.ndim - 1), constant_values=-1)
    return jax.device_put(ids, NamedSharding(mesh_of(*sizes, axes=axes), PartitionSpec(batch)))


def numbers(row=(12,)):
    """A table (21, *row): a number of rows that only 1, 3 and 7 divide."""
    return jnp.asarray(np.random.default_rng(2).normal(size=(21, *row)), jnp.float32)


def replicated(tree, table):
    """The tree with what is no table on all devices of the table, as a step returns it.

    Otherwise the second step, given arrays that are placed otherwise, is compiled again.
    """
    sharding = getattr(table, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return tree

    def put(x):
        if isinstance(x.sharding, NamedSharding):
            return x
        return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))

    return jax.tree.map(put, tree)


def assert_same_run(actual, expected, rtol=2e-5):
    """Parameters, state and losses agree as far as float32 sums in another order do."""
    ours, theirs = (jax.tree.map(np.asarray, run[:3]) for run in (actual, expected))
    assert_close(ours, theirs, rtol=rtol, atol=2e-6)
    moved = np.asarray(actual.params["table"])[TOUCHED]
    assert np.isfinite(moved).all()


def assert_other_rows_untouched(run, initial):
    """Rows not looked up have the bits of the start, in the table and in its state."""
    others = np.setdiff1d(np.arange(initial.shape[0]), TOUCHED)
    new = np.asarray(run.params["table"])
    np.testing.assert_array_equal(bits(new)[others], bits(initial)[others])
    assert (
        (new[TOUCHED] != np.asarray(initial)[TOUCHED]).any(axis=tuple(range(1, new.ndim))).all()
    )
    for x in jax.tree.leaves(run.state):
        if x.ndim and x.shape[0] == initial.shape[0]:
            # Every slot starts out the same in all rows, and so they all stay equal.
            rows = bits(x)[others]
            np.testing.assert_array_equal(rows, np.broadcast_to(rows[:1], rows.shape))


def bits(x):
    """An array as integers: nan equals nan, and -0.0 does not equal 0.0."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")
