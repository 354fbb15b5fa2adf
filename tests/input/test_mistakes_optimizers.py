"""Mistakes with parameters, optimizers and their states; see test_mistakes.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.mistakes import (
    GRADS,
    LAZY,
    PARAMS,
    ROWS,
    TABLE,
    Mistake,
    check,
    looked_up,
    mesh,
    packed,
    step,
)


def apply(tx):
    return jax.eval_shape(
        lambda grads, params: jmask.apply_gradients(tx, grads, tx.init(params), params),
        GRADS,
        PARAMS,
    )


def accumulated(start):
    """A sum of gradients over microbatches, as programs with dense ones write it."""

    def body(total, _):
        return jax.tree.map(jnp.add, total, GRADS), None

    return jax.lax.scan(body, start, length=2)


# What to write instead of arithmetic on the leaves of gradients.
SUMS = ("jmask.multi_steps(tx, k, like=grads)", "jmask.tree.add")

MISTAKES: dict[str, Mistake] = {
    # --- accumulation ---------------------------------------------------------------------
    "a sum of leaves": (lambda: jax.tree.map(jnp.add, GRADS, GRADS), TypeError, SUMS),
    "a sum of leaves by optax": (lambda: optax.tree.add(GRADS, GRADS), TypeError, SUMS),
    "a scan from a gradient": (lambda: accumulated(GRADS), TypeError, SUMS),
    "a scan from zeros": (
        lambda: accumulated(jax.tree.map(jnp.zeros_like, GRADS)),
        TypeError,
        SUMS,
    ),
    "a scan from dense zeros": (
        lambda: accumulated(jax.tree.map(jnp.zeros_like, PARAMS)),
        TypeError,
        SUMS[::-1],
    ),
    # --- parameters and optimizers --------------------------------------------------------
    "an optimizer of a name": (
        lambda: LAZY.init({"t": TABLE, "name": "words"}),
        TypeError,
        (
            "`params['name']` is a str, not an array",
            "eqx.filter(model, eqx.is_inexact_array)",
        ),
    ),
    "a named optimizer of a name": (
        lambda: jmask.adam(0.1).init({"t": TABLE, "name": "words"}),
        TypeError,
        ("`params['name']` is a str", "eqx.filter"),
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
        ("`decay_mode` must be one of 'l2', 'decoupled'",),
    ),
    "counts of rows where all rows are updated": (
        lambda: jmask.adam(0.1, count="per_row", lazy_update=False),
        ValueError,
        ("`count` must be", "`lazy_update` is False"),
    ),
    "rows of negative norm": (
        lambda: jmask.clip_by_row_norm(-1.0),
        ValueError,
        ("`max_norm` must be positive and finite, got -1.0",),
    ),
    "a learning rate from the command line": (
        lambda: jmask.adam("0.1"),
        TypeError,
        ("`learning_rate` must be a number, or a schedule", "got '0.1'"),
    ),
    "no learning rate": (
        lambda: jmask.sgd(None),
        TypeError,
        ("`learning_rate` must be a number, or a schedule", "got None"),
    ),
    "parameters for the learning rate": (
        lambda: jmask.adagrad(PARAMS),
        TypeError,
        ("`learning_rate` must be a number, or a schedule", "got dict"),
    ),
    "a learning rate for each row": (
        lambda: jmask.adam(jnp.ones(6)),
        TypeError,
        ("`learning_rate` must be a number", "an array of shape (6,), float32"),
    ),
    "a schedule that returns no number": (
        lambda: step(jmask.adam(lambda count: None)),
        TypeError,
        ("`learning_rate` is a schedule that returned None", "must return a number"),
    ),
    "a negative learning rate of NumPy": (
        lambda: jmask.adam(np.float32(-0.5)),
        ValueError,
        ("`learning_rate` must be positive and finite, got -0.5",),
    ),
    "a decay in quotes": (
        lambda: jmask.adam(0.1, b1="0.9"),
        TypeError,
        ("`b1` must be a number, got '0.9'",),
    ),
    "no epsilon": (
        lambda: jmask.adam(0.1, eps=None),
        TypeError,
        ("`eps` must be a number, got None",),
    ),
    "no weight decay": (
        lambda: jmask.sgd(0.1, weight_decay=None),
        TypeError,
        ("`weight_decay` must be a number, got None",),
    ),
    "a momentum above 1": (
        lambda: jmask.sgd(0.1, momentum=2.0),
        ValueError,
        ("`momentum` must be in [0, 1), got 2.0",),
    ),
    "a flag for the momentum": (
        lambda: jmask.sgd(0.1, momentum=True),
        TypeError,
        ("`momentum` must be a number, got True",),
    ),
    "accumulators of integers": (
        lambda: jmask.adagrad(0.1, state_dtype=jnp.int32),
        TypeError,
        ("`state_dtype` must be a floating dtype, such as jnp.float32",),
    ),
    "a dtype that is none": (
        lambda: jmask.adam(0.1, state_dtype="flt32"),
        TypeError,
        ("`state_dtype` must be a floating dtype", "'flt32'"),
    ),
    "a bound on rows that is no number": (
        lambda: jmask.max_row_norm("1"),
        TypeError,
        ("`max_norm` must be a number, got '1'",),
    ),
    "the optimizer not called": (
        lambda: jmask.lazy(optax.adam),
        TypeError,
        ("`inner` must be an optax transformation, got function", "jmask.lazy(optax.adam"),
    ),
    "a learning rate for the optimizer": (
        lambda: jmask.lazy(0.1),
        TypeError,
        ("`inner` must be an optax transformation, got float",),
    ),
    "the optimizer not called, in multi_steps": (
        lambda: jmask.multi_steps(jmask.sgd, 2, like=GRADS),
        TypeError,
        ("`inner` must be an optax transformation, got function", "jmask.multi_steps("),
    ),
    "the optimizer not called, in skip_nonfinite": (
        lambda: jmask.skip_nonfinite(jmask.adam),
        TypeError,
        ("`inner` must be an optax transformation, got function", "jmask.skip_nonfinite("),
    ),
    "parameters for the like of multi_steps": (
        lambda: step(jmask.multi_steps(jmask.sgd(0.1), 2, like=PARAMS)),
        ValueError,
        ("`updates['t']` is RowSparse", "`like` has dense", "gradient of a microbatch"),
    ),
    "lazy forgotten": (
        lambda: apply(optax.adam(0.1)),
        TypeError,
        ("`tx` holds a transformation of optax", "cannot take row-sparse", "jmask.lazy"),
    ),
    "lazy forgotten, with sgd": (
        lambda: apply(optax.sgd(0.1)),
        TypeError,
        ("`tx` holds a transformation of optax", "jmask.lazy(optax.adam(1e-3))"),
    ),
    "clipping before lazy": (
        lambda: apply(optax.chain(optax.clip_by_global_norm(1.0), LAZY)),
        TypeError,
        ("`tx` holds a transformation of optax", "with all that is chained to it"),
    ),
    "averaging after lazy": (
        lambda: apply(optax.chain(LAZY, optax.ema(0.9))),
        TypeError,
        ("`tx` holds a transformation of optax", "jmask.lazy"),
    ),
    "densify after the optimizer": (
        lambda: apply(optax.chain(optax.adam(0.1), jmask.densify())),
        TypeError,
        ("`tx` holds a transformation of optax", "jmask.lazy"),
    ),
    "lazy forgotten inside skip_nonfinite": (
        lambda: apply(jmask.skip_nonfinite(optax.adam(0.1))),
        TypeError,
        ("holds a transformation of optax", "jmask.lazy"),
    ),
    "lazy forgotten inside multi_steps": (
        lambda: step(jmask.multi_steps(optax.sgd(0.1), 2, like=GRADS)),
        TypeError,
        ("`inner` holds a transformation of optax", "jmask.lazy"),
    ),
    "gradients and state in the wrong order": (
        lambda: jmask.apply_gradients(LAZY, LAZY.init(PARAMS), GRADS, PARAMS),
        TypeError,
        ("`opt_state` holds gradients", "apply_gradients(tx, grads, opt_state, params)"),
    ),
    "gradients and parameters in the wrong order": (
        lambda: jmask.apply_gradients(LAZY, PARAMS, LAZY.init(PARAMS), GRADS),
        TypeError,
        ("`params['t']` is a RowSparse", "parameters must be dense arrays"),
    ),
    "the loss among the gradients": (
        lambda: LAZY.update((1.0, GRADS), LAZY.init(PARAMS), PARAMS),
        ValueError,
        ("`updates` and `params` must have the same structure", "(grads, opt_state, params)"),
    ),
    "no optimizer": (
        lambda: jmask.apply_gradients(None, GRADS, None, PARAMS),
        TypeError,
        (
            "`tx` must be an optax transformation, got NoneType",
            "(tx, grads, opt_state, params)",
        ),
    ),
    "no state": (
        lambda: LAZY.update(GRADS, None, PARAMS),
        ValueError,
        ("`state` was not made by `init`", "expected", "got PyTreeDef(None)"),
    ),
    "parameters and updates in the wrong order": (
        lambda: jmask.apply_updates(GRADS, PARAMS),
        TypeError,
        ("`params['t']` is a RowSparse", "apply_updates(params, updates)"),
    ),
    "updates of other parameters": (
        lambda: jmask.apply_updates(PARAMS, {"u": ROWS}),
        ValueError,
        (
            "`updates` and `params` must have the same structure",
            "apply_updates(params, updates)",
        ),
    ),
    "a seed for the key of stochastic rounding": (
        lambda: jmask.apply_updates(PARAMS, GRADS, key=0),
        TypeError,
        ("`key` must be a key of jax.random, such as jax.random.key(0), got int",),
    ),
    "a line search": (
        lambda: jmask.lazy(optax.lbfgs(0.1)).update(
            GRADS,
            optax.lbfgs(0.1).init(PARAMS),
            PARAMS,
            value=1.0,
            grad=GRADS,
            value_fn=looked_up,
        ),
        ValueError,
        ("the extra argument `grad` holds a row-sparse gradient", "jmask.densify()"),
    ),
    "noise for each row": (
        lambda: step(jmask.lazy(optax.add_noise(0.1, 0.5, 0))),
        ValueError,
        ("jmask.lazy cannot wrap", "by their position", "jmask.densify()"),
    ),
    "another optimizer's state from torch": (
        lambda: jmask.from_torch_state(jmask.sgd(0.1).init(TABLE), {0: {"step": 1}}),
        ValueError,
        ("`state` must hold one state of jmask.adam or jmask.adagrad",),
    ),
    "another table's state from torch": (
        lambda: jmask.from_torch_state(
            jmask.adagrad(0.1).init(TABLE), {0: {"step": 1, "sum": jnp.ones((2, 2))}}
        ),
        ValueError,
        ("'sum' of parameter 0 in `torch_state` has shape (2, 2)", "(6, 2)"),
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
        ("`placement` must be one of 'div', 'mod', got 'row'",),
    ),
    "a sharded table of integers": (
        lambda: jmask.sharded(TABLE.astype(int), mesh()),
        ValueError,
        ("`table` must be a floating array", "int32[6, 2]"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.dtype_promotion
def test_mistake(name):
    check(MISTAKES[name])
