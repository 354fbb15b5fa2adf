"""Mistakes of somebody new: each gets an error that names what is wrong, and the way out.

Errors that optax raises before jmask's code is reached are in test_sharp_bits.py.
"""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import jmask

TABLE = jnp.ones((6, 2))
IDS = jnp.array([1, 3, 1])
ROWS = jmask.RowSparse([1, 3], jnp.ones((2, 2)), (6, 2))
PARAMS, GRADS = {"t": TABLE}, {"t": ROWS}
LAZY = jmask.lazy(optax.adam(0.1))


def packed():
    return jmask.packed(TABLE, platform="tpu")


def mesh():
    return jax.make_mesh((1,), ("x",))


def mlp():
    return eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))


def step(tx, grads=GRADS, params=PARAMS):
    """One step as a training loop takes it, from shapes alone."""

    def run(grads, params):
        updates, state = tx.update(grads, tx.init(params), params)
        return jmask.apply_updates(params, updates), state

    return jax.eval_shape(run, grads, params)


def looked_up(table):
    return jnp.sum(table[IDS])


# name: (what is done, the type of the error, words of its message in their order)
MISTAKES = {
    # --- gradients ------------------------------------------------------------------------
    "a model with functions in it": (
        lambda: jmask.value_and_grad(lambda model, x: jnp.sum(model(x)))(mlp(), jnp.ones(2)),
        TypeError,
        ("`model.activation` is a custom_jvp, not an array", "eqx.partition", "nnx.split"),
    ),
    "a name among the parameters": (
        lambda: jmask.grad(lambda p: looked_up(p["t"]))({"t": TABLE, "name": "float32"}),
        TypeError,
        ("`p['name']` is a str, not an array",),
    ),
    "a counter among the parameters": (
        lambda: jmask.grad(lambda p: looked_up(p["t"]))({"t": TABLE, "n": jnp.arange(3)}),
        TypeError,
        ("`p['n']` is int32", "requires real- or complex-valued inputs", "another argument"),
    ),
    "a random key among the parameters": (
        lambda: jmask.grad(lambda p, k: looked_up(p["t"]), 1)(PARAMS, jax.random.key(0)),
        TypeError,
        ("`k` is key<fry>", "another argument"),
    ),
    "an integer table": (
        lambda: jmask.grad(looked_up)(TABLE.astype(int)),
        TypeError,
        ("`table` is int32", "requires real- or complex-valued inputs"),
    ),
    "positional arguments without a name": (
        lambda: jmask.grad(lambda *args: looked_up(args[0]))(IDS),
        TypeError,
        ("`args[0]` is int32",),
    ),
    "shapes instead of arrays": (
        lambda: jmask.grad(looked_up)(jax.ShapeDtypeStruct((6, 2), "float32")),
        TypeError,
        ("`table` is a ShapeDtypeStruct", "jmask.explain", "jax.eval_shape"),
    ),
    "the loss called too early": (
        lambda: jmask.value_and_grad(looked_up(TABLE)),
        TypeError,
        ("`fun` must be a function, got ArrayImpl", "value_and_grad(loss_fn)(params, batch)"),
    ),
    "argnums out of range": (
        lambda: jmask.grad(looked_up, argnums=2)(TABLE),
        ValueError,
        ("`argnums` names argument 2", "1 positional"),
    ),
    "argnums by name": (
        lambda: jmask.grad(looked_up, argnums="table")(TABLE),
        TypeError,
        ("`argnums` must be integers, got 'table'",),
    ),
    "parameters by keyword": (
        lambda: jmask.grad(looked_up)(table=TABLE),
        ValueError,
        ("`argnums` names argument 0", "0 positional"),
    ),
    "a vector for a loss": (
        lambda: jmask.grad(lambda t: t[IDS])(TABLE),
        TypeError,
        ("scalar-output", "(3, 2)"),
    ),
    "has_aux forgotten": (
        lambda: jmask.grad(lambda t: (looked_up(t), 1))(TABLE),
        TypeError,
        ("scalar-output",),
    ),
    "has_aux without aux": (
        lambda: jmask.grad(looked_up, has_aux=True)(TABLE),
        TypeError,
        ("aux", "two-element tuple"),
    ),
    "a complex loss": (
        lambda: jmask.grad(lambda t: looked_up(t) * 1j)(TABLE),
        TypeError,
        ("requires real-valued outputs",),
    ),
    "control flow on values": (
        lambda: jmask.grad(lambda t: looked_up(t) if t[0, 0] > 0 else 0.0)(TABLE),
        jax.errors.TracerBoolConversionError,
        ("boolean conversion of traced array",),
    ),
    # --- lookups --------------------------------------------------------------------------
    "float ids": (
        lambda: jmask.embedding_lookup(TABLE, jnp.array([1.0])),
        TypeError,
        ("`ids` must be integers, got float32",),
    ),
    "bool ids": (
        lambda: jmask.embedding_lookup(TABLE, IDS > 1),
        TypeError,
        ("`ids` must be integers, got bool",),
    ),
    "table and ids in the wrong order": (
        lambda: jmask.embedding_lookup(IDS, TABLE),
        TypeError,
        ("`ids` must be integers, got float32",),
    ),
    "masked ids": (
        lambda: jmask.embedding_lookup(TABLE, jmask.masked_tensor(IDS, IDS > 1)),
        TypeError,
        ("`ids` is a MaskedTensor", "`ids.to_tensor(-1)`", "`padding_id`"),
    ),
    "an id out of range": (
        lambda: jmask.embedding_lookup(TABLE, [0, 6], mode="raise"),
        IndexError,
        ("`ids[1]` is 6", "(6, 2)", "`padding_id`", "`mode`"),
    ),
    "an unknown mode": (
        lambda: jmask.embedding_lookup(TABLE, IDS, mode="wrap"),
        ValueError,
        ("`mode` must be one of 'fill', 'clip', 'zero', 'raise'",),
    ),
    "a padding id that is no integer": (
        lambda: jmask.embedding_lookup(TABLE, IDS, padding_id=1.0),
        TypeError,
        ("`padding_id` must be an integer",),
    ),
    "a BCOO as table": (
        lambda: jmask.embedding_lookup(BCOO.fromdense(TABLE), IDS),
        TypeError,
        ("`table` must be an array", "`table.todense()`"),
    ),
    "bags without bounds": (
        lambda: jmask.embedding_bag(TABLE, IDS),
        ValueError,
        ("`ids` of shape (3,) are no bags yet", "`offsets` or `segment_ids`"),
    ),
    "offsets that do not ascend": (
        lambda: jmask.embedding_bag(TABLE, IDS, offsets=[0, 2, 1]),
        ValueError,
        ("`offsets` must be ascending",),
    ),
    "weights with max": (
        lambda: jmask.embedding_bag(TABLE, IDS[None], weights=jnp.ones((1, 3)), combiner="max"),
        ValueError,
        ("`weights` have no meaning for `combiner` 'max'", "'sum'"),
    ),
    "weights of another shape": (
        lambda: jmask.embedding_bag(TABLE, IDS[None], weights=jnp.ones(2)),
        ValueError,
        ("`weights` of shape (2,) must have the shape of `ids`",),
    ),
    "an unknown combiner": (
        lambda: jmask.embedding_bag(TABLE, IDS[None], combiner="avg"),
        ValueError,
        ("`combiner` must be one of 'sum', 'mean'",),
    ),
    "segments under jit": (
        lambda: jax.jit(lambda s: jmask.embedding_bag(TABLE, IDS, segment_ids=s))(IDS),
        ValueError,
        ("`num_segments`", "must be given for traced `segment_ids`"),
    ),
    # --- parameters and optimizers --------------------------------------------------------
    "an optimizer of a whole model": (
        lambda: LAZY.init({"dense": mlp()}),
        TypeError,
        (
            "`params['dense'].activation` is a custom_jvp, not an array",
            "eqx.filter(model, eqx.is_inexact_array)",
        ),
    ),
    "a named optimizer of a whole model": (
        lambda: jmask.adam(0.1).init(mlp()),
        TypeError,
        ("`params.activation` is a custom_jvp", "eqx.filter"),
    ),
    "a masked parameter": (
        lambda: LAZY.init({"t": jmask.masked_tensor(TABLE, TABLE > 0)}),
        TypeError,
        ("`params['t']` is a MaskedTensor", "dense"),
    ),
    "a complex parameter": (
        lambda: LAZY.init({"t": TABLE.astype(complex)}),
        TypeError,
        ("`params['t']` is complex64", "real and the imaginary part"),
    ),
    "an update of an integer table": (
        lambda: step(jmask.sgd(0.1), GRADS, {"t": TABLE.astype(int)}),
        TypeError,
        ("`updates['t']` is float32 and its parameter int32", ".astype(jnp.float32)"),
    ),
    "a gradient of another shape": (
        lambda: step(LAZY, {"t": jmask.RowSparse([1], jnp.ones((1, 3)), (6, 3))}),
        ValueError,
        ("`updates['t']` of shape (6, 3)", "(6, 2)"),
    ),
    "state and parameters in the wrong order": (
        lambda: LAZY.update(GRADS, PARAMS, LAZY.init(PARAMS)),
        ValueError,
        ("`updates` and `params` must have the same structure", "(grads, opt_state, params)"),
    ),
    "params forgotten": (
        lambda: jmask.sgd(0.1, weight_decay=0.1).update(GRADS, jmask.sgd(0.1).init(PARAMS)),
        ValueError,
        ("`params` must be given to update()",),
    ),
    "params forgotten in lazy": (
        lambda: (tx := jmask.lazy(optax.adamw(0.1))).update(GRADS, tx.init(PARAMS)),
        ValueError,
        ("not passing `params`",),
    ),
    "the state of another optimizer": (
        lambda: LAZY.update(GRADS, jmask.sgd(0.1).init(PARAMS), PARAMS),
        ValueError,
        ("`state` was not made by `init`", "expected"),
    ),
    "the state of another table": (
        lambda: LAZY.update(GRADS, LAZY.init({"t": jnp.ones((7, 2))}), PARAMS),
        ValueError,
        ("`state[0].mu['t']` has shape (7, 2), expected (6, 2)",),
    ),
    "an optimizer that mixes rows": (
        lambda: step(jmask.lazy(optax.lamb(0.1))),
        ValueError,
        ("jmask.lazy cannot wrap", "`reduce_sum` combines rows", "jmask.densify()"),
    ),
    "MultiSteps inside lazy": (
        lambda: jmask.lazy(optax.MultiSteps(optax.sgd(0.1), 2)).init(PARAMS),
        ValueError,
        ("jmask.lazy cannot wrap", "MultiStepsState", "jmask.multi_steps"),
    ),
    "no microbatches": (
        lambda: jmask.multi_steps(jmask.sgd(0.1), 0, like=GRADS),
        ValueError,
        ("`every_k` must be a positive integer",),
    ),
    "a larger microbatch": (
        lambda: step(
            jmask.multi_steps(jmask.sgd(0.1), 2, like=GRADS),
            {"t": jmask.RowSparse([1, 2, 3], jnp.ones((3, 2)), (6, 2))},
        ),
        ValueError,
        ("`updates['t']` has 3 rows", "`like` has room for 2"),
    ),
    "a negative learning rate": (
        lambda: jmask.adam(-0.1),
        ValueError,
        ("`learning_rate` must be positive",),
    ),
    "a decay of 1": (lambda: jmask.adam(0.1, b1=1.0), ValueError, ("`b1` must be in [0, 1)",)),
    "an unknown weight decay": (
        lambda: jmask.adam(0.1, decay_mode="l1"),
        ValueError,
        ("`decay_mode` must be one of ('l2', 'decoupled')",),
    ),
    "rows of negative norm": (
        lambda: jmask.clip_by_row_norm(-1.0),
        ValueError,
        ("`max_norm` must be positive",),
    ),
    # --- stored tables --------------------------------------------------------------------
    "a dense gradient of a packed table": (
        lambda: step(jmask.lazy(optax.sgd(0.1)), TABLE, packed()),
        ValueError,
        ("`updates` is dense", "PackedTable, which takes a RowSparse", "jmask.grad"),
    ),
    "the same for a named optimizer": (
        lambda: step(jmask.adam(0.1), PARAMS, {"t": packed()}),
        ValueError,
        ("`updates['t']` is dense", "PackedTable"),
    ),
    "densify with a sharded table": (
        lambda: step(
            optax.chain(jmask.densify(), optax.sgd(0.1)), ROWS, jmask.sharded(TABLE, mesh())
        ),
        ValueError,
        ("a ShardedTable has no dense gradient", "leave out `densify()`", "todense()"),
    ),
    "an axis that the mesh has not": (
        lambda: jmask.sharded(TABLE, mesh(), rows="y"),
        ValueError,
        ("`rows` must name different axes of the mesh", "('x',)"),
    ),
    "an unknown placement": (
        lambda: jmask.sharded(TABLE, mesh(), placement="row"),
        ValueError,
        ("`placement` must be 'div' or 'mod', got 'row'",),
    ),
    "a sharded table of integers": (
        lambda: jmask.sharded(TABLE.astype(int), mesh()),
        ValueError,
        ("`table` must be a floating array", "int32[6, 2]"),
    ),
    # --- tensors --------------------------------------------------------------------------
    "todense of a tree": (
        lambda: jmask.todense(GRADS),
        TypeError,
        ("dict is not a storage", "RowSparse"),
    ),
    "todense of nothing": (
        lambda: jmask.todense(None),
        TypeError,
        ("NoneType is not a storage", "expected an array"),
    ),
    "an unknown storage": (
        lambda: jmask.cast_storage(TABLE, "csc"),
        ValueError,
        ("`stype` must be one of 'default', 'row_sparse', 'coo', 'csr'",),
    ),
    "numbers for a mask": (
        lambda: jmask.masked_tensor(TABLE, TABLE),
        TypeError,
        ("`mask` must be boolean", "`mask != 0`"),
    ),
    "a mask of another shape": (
        lambda: jmask.sparse_mask(TABLE, TABLE[:2] > 0),
        ValueError,
        ("`mask` must have the shape of `x`, (6, 2)",),
    ),
    "a masked tensor into NumPy": (
        lambda: np.asarray(jmask.masked_tensor(TABLE, TABLE > 0)),
        TypeError,
        ("masked entries have no values", "to_tensor(fill)", "to_numpy_ma"),
    ),
    "if of a sparse tensor": (
        lambda: bool(ROWS),
        TypeError,
        ("no truth value", "jmask.numpy.any"),
    ),
    "room for fewer rows": (
        lambda: ROWS.coalesce(nse=1),
        ValueError,
        ("`nse`=1 is too small: 2 rows",),
    ),
    "rows to be counted under jit": (
        lambda: jax.jit(jmask.RowSparse.fromdense)(TABLE),
        ValueError,
        ("`nse`", "must be given for a traced `x`"),
    ),
    "a product that does not fit": (
        lambda: jmask.dot(ROWS, TABLE),
        ValueError,
        ("`lhs` of shape (6, 2) and `rhs` of shape (6, 2) do not fit", "transpose_a"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    mistake, error, words = MISTAKES[name]
    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, words))):
        mistake()
