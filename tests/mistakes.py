"""Small things to make wrong calls with."""

import jax
import jax.numpy as jnp
import optax

import jmask

TABLE = jnp.ones((6, 2))
IDS = jnp.array([1, 3, 1])
ROWS = jmask.RowSparse([1, 3], jnp.ones((2, 2)), (6, 2))
PARAMS, GRADS = {"t": TABLE}, {"t": ROWS}
LAZY = jmask.lazy(optax.adam(0.1))
packed = lambda: jmask.packed(TABLE)
mesh = lambda: jax.make_mesh((1,), ("x",))
looked_up = lambda table: jnp.sum(table[IDS])
in_lines = lambda lines: jnp.sum(jmask.embedding_lookup(lines, IDS, width=2))


def step(tx, grads=GRADS, params=PARAMS):
    """One step as a training loop takes it, from shapes alone."""

    def run(grads, params):
        updates, state = tx.update(grads, tx.init(params), params)
        return jmask.apply_updates(params, updates), state

    return jax.eval_shape(run, grads, params)
