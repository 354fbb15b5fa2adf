"""Mistakes of somebody new: each gets an error that names what is wrong, and the way out.

Those about optimizers are in test_mistakes_optimizers.py, about tensors in
test_mistakes_tensors.py, and errors that optax raises before
jmask's code is reached in test_sharp_bits.py.
"""

import jax
import jax.numpy as jnp
import pytest

import jmask
import jmask.numpy as jnm
from tests.mistakes import (
    IDS,
    PARAMS,
    TABLE,
    Mistake,
    check,
    looked_up,
    mesh,
    packed,
    sharded,
)
from tests.sparse_arrays import coo


def strictly(loss, shape=(6, 2)):
    with jmask.strict():
        return jax.eval_shape(jmask.grad(loss), jax.ShapeDtypeStruct(shape, "float32"))


MISTAKES: dict[str, Mistake] = {
    # --- gradients ------------------------------------------------------------------------
    "a name among the parameters": (
        lambda: jmask.grad(lambda p: looked_up(p["t"]))({"t": TABLE, "name": "float32"}),
        TypeError,
        ("`p['name']` is a str, not an array", "eqx.partition", "nnx.split"),
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
        ("`fun` must return a scalar", "float32 of shape (3, 2)", "its mean or its sum"),
    ),
    "has_aux forgotten": (
        lambda: jmask.grad(lambda t: (looked_up(t), 1))(TABLE),
        TypeError,
        ("`fun` must return a scalar", "got a tuple", "has_aux=True"),
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
    "no return": (
        lambda: jmask.grad(lambda t: None)(TABLE),
        TypeError,
        ("got None", "is its `return` missing?"),
    ),
    "a masked loss": (
        lambda: jmask.grad(lambda t: jnm.mean(jmask.masked_tensor(t, t > 0)))(TABLE),
        TypeError,
        ("got a MaskedTensor", "`.to_tensor(0)`"),
    ),
    "explain of a value": (
        lambda: jmask.explain(looked_up(TABLE), TABLE),
        TypeError,
        ("`loss_fn` must be a function, got ArrayImpl", "explain(loss_fn, params, *batch)"),
    ),
    "explain of a gradient": (
        lambda: jmask.explain(jmask.value_and_grad(looked_up), TABLE),
        TypeError,
        ("`fun` must return a scalar", "got a tuple"),
    ),
    "gradcheck of a value": (
        lambda: jmask.gradcheck(looked_up(TABLE), TABLE),
        TypeError,
        ("`fun` must be a function, got ArrayImpl", "jmask.gradcheck(fun, args)"),
    ),
    "a softmax that is tied": (
        lambda: strictly(lambda t: jnp.sum(t[IDS] @ t.T)),
        jmask.StorageFallbackWarning,
        (
            "the gradient of `t`",
            "looked up (",
            "test_mistakes",
            "`dot_general` needs all of it",
        ),
    ),
    "a lookup after the whole table was normalized": (
        lambda: strictly(lambda t: jnp.sum((t / (1 + jnp.abs(t)))[IDS]), (2**17, 2)),
        jmask.StorageFallbackWarning,
        ("the gradient of `t`", "looked up (", "`abs` needs all of it"),
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
        lambda: jmask.embedding_lookup(coo(TABLE), IDS),
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
    "the whole tree of parameters for a table": (
        lambda: jmask.embedding_lookup(PARAMS, IDS),
        TypeError,
        ("`table` must be an array (V, *row), got dict", "`params['table']`"),
    ),
    "no table": (
        lambda: jmask.embedding_lookup(None, IDS),
        TypeError,
        ("`table` must be an array (V, *row), got NoneType",),
    ),
    "no ids": (
        lambda: jmask.embedding_lookup(TABLE, None),
        TypeError,
        ("`ids` must be integers, got NoneType",),
    ),
    "words for ids": (
        lambda: jmask.embedding_lookup(TABLE, ["the", "cat"]),
        TypeError,
        ("`ids` must be integers, got <U3",),
    ),
    "lists of different lengths": (
        lambda: jmask.embedding_bag(TABLE, [[1], [1, 2]]),
        ValueError,
        ("`ids` are lists of different lengths", "`padding_id`", "`offsets`"),
    ),
    "torch's name for the combiner": (
        lambda: jmask.embedding_bag(TABLE, IDS[None], mode="mean"),
        ValueError,
        ("`mode` says what an id outside the table gives", "`combiner`='mean'"),
    ),
    "offsets and segments": (
        lambda: jmask.embedding_bag(TABLE, IDS, offsets=[0], segment_ids=[0, 0, 0]),
        ValueError,
        ("`offsets`", "`segment_ids`", "give one of them"),
    ),
    "offsets beyond the ids": (
        lambda: jmask.embedding_bag(TABLE, IDS, offsets=[0, 9]),
        ValueError,
        ("`offsets` end with 9, beyond the 3 entries of `ids`",),
    ),
    "integer weights": (
        lambda: jmask.embedding_bag(TABLE, IDS[None], weights=IDS[None]),
        TypeError,
        ("`weights` must be floating, got int32",),
    ),
    "a bound that is no number": (
        lambda: jmask.embedding_lookup(TABLE, IDS, max_norm="1"),
        TypeError,
        ("`max_norm` must be a number, got '1'",),
    ),
    "all parameters sharded at once": (
        lambda: jmask.sharded(PARAMS, mesh()),
        TypeError,
        ("`table` must be an array", "got dict", "params['table']"),
    ),
    "all parameters packed at once": (
        lambda: jmask.packed(PARAMS),
        TypeError,
        ("`table` must be an array", "got dict", "params['table']"),
    ),
    "packed for a platform that is none": (
        lambda: jmask.packed(TABLE, platform="TPU"),
        ValueError,
        ("`platform` must be one of", "'tpu'", "got 'TPU'"),
    ),
    "rows of a sharded table shortened": (
        lambda: jmask.renormalize(sharded(), IDS, 1.0),
        TypeError,
        ("`table` must be an array, got ShardedTable", "jmask.max_row_norm", "max_norm=..."),
    ),
    "rows of a packed table shortened": (
        lambda: jmask.renormalize(packed(), IDS, 1.0),
        TypeError,
        ("`table` must be an array, got PackedTable", "jmask.max_row_norm"),
    ),
    "a slice of a sharded table": (
        lambda: sharded()[1:3],
        TypeError,
        ("`ids` must be integers, got slice(1, 3, None)", "`table.todense()`"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.dtype_promotion
def test_mistake(name):
    check(MISTAKES[name])
