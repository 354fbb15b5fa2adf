"""Tables that are packed or sharded, and steps on them.

stepped(tx, table, gradients)                   parameters and state
stored("packed", table), of_lines(gradient, lines), unpacked(tree, lines, shape)
sharded(table, "8 devices"), batch_of(ids, "8 devices")
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmask


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


def bits(x):
    """An array as integers: nan equals nan, and -0.0 does not equal 0.0."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")
