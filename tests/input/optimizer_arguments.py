"""Arguments of optimizers and of gradients as trees; see test_wrong_values.py."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmask
from tests.input.wrong_values import (
    ANY,
    ARRAY,
    DEFAULT,
    FILL,
    FLAG,
    INEXACT,
    INTEGER,
    NAME,
    NAN,
    NUMBER,
    OBJECTS,
    OF_OPTAX,
    PAIRS,
    REAL,
    SIGNED,
    TREE,
    Arg,
    because,
    of,
)
from tests.mistakes import GRADS, LAZY, PARAMS, TABLE

ADAGRAD = jmask.adagrad(0.1)
LOADED = {"step": 1, "sum": np.ones((6, 2))}
NAMED = (jmask.sgd, jmask.adam, jmask.rowwise_adam)
NAMED += (jmask.adamw, jmask.adagrad, jmask.rowwise_adagrad, jmask.ftrl)


SCHEDULED = because("a schedule", "a function")


def _beside(f: Any, name: str) -> dict[str, float]:
    return {"momentum": 0.9} if (f, name) == (jmask.sgd, "nesterov") else {}


def _kind(name: str, default: object) -> dict[str, object]:
    if isinstance(default, bool):
        return FLAG
    names = ("decay_mode", "state_dtype", "mu_dtype", "count", "mask")
    return NAME if name in names else NUMBER


OPTIMIZER_ARGUMENTS: dict[str, Arg] = {
    f"{f.__name__}({name})": Arg(
        of(f, name, **{"learning_rate": 0.1} | _beside(f, name)),
        _kind(name, p.default),
        {
            "learning_rate": SCHEDULED,
            "clip_gradient": DEFAULT,
            "rescale_grad": SIGNED,
            "state_dtype": DEFAULT,
            "mu_dtype": DEFAULT,
            "mask": DEFAULT | because("a function of the parameters", "a function"),
        }.get(name, {})
        | (SCHEDULED if (f, name) == (jmask.adamw, "weight_decay") else {}),
    )
    for f in NAMED
    for name, p in inspect.signature(f).parameters.items()
}
OPTIMIZER_ARGUMENTS |= {
    f"{f.__name__}({name})": Arg(of(f, name, max_norm=1.0), NUMBER, takes)
    for f in (jmask.clip_by_row_norm, jmask.max_row_norm)
    for name, takes in (("max_norm", {}), ("ord", because("the greatest entry", "infinity")))
}
OPTIMIZER_ARGUMENTS |= {
    "lazy(inner)": Arg(jmask.lazy, OBJECTS),
    "ema(decay)": Arg(jmask.ema, NUMBER),
    "deferred(table)": Arg(lambda v: jmask.deferred(v, ADAGRAD), ARRAY, REAL),
    "deferred(tx)": Arg(lambda v: jmask.deferred(TABLE, v), OBJECTS),
    "to_deferred(tx)": Arg(
        lambda v: jmask.to_deferred(v, ADAGRAD.init(PARAMS), PARAMS, {"t": True}), OBJECTS
    ),
    "to_deferred(opt_state)": Arg(
        lambda v: jmask.to_deferred(ADAGRAD, v, PARAMS, {"t": True}),
        OBJECTS,
        named=("opt_state", "state"),
    ),
    "to_deferred(params)": Arg(
        lambda v: jmask.to_deferred(ADAGRAD, ADAGRAD.init(PARAMS), {"t": v}, {"t": True}),
        ARRAY,
        NAN,
        named=("params", "table", "tables", "state"),
    ),
    "to_deferred(tables)": Arg(
        lambda v: jmask.to_deferred(ADAGRAD, ADAGRAD.init(PARAMS), PARAMS, {"t": v}), FLAG
    ),
    "from_deferred(tx)": Arg(
        lambda v: jmask.from_deferred(v, ADAGRAD.init(PARAMS), PARAMS), OBJECTS
    ),
    "from_deferred(opt_state)": Arg(
        lambda v: jmask.from_deferred(ADAGRAD, v, PARAMS), OBJECTS, named=("opt_state", "state")
    ),
    "from_deferred(params)": Arg(
        lambda v: jmask.from_deferred(ADAGRAD, ADAGRAD.init(PARAMS), {"t": v}),
        ARRAY,
        NAN | PAIRS | because("frozen, as integers are", "booleans"),
        named=("params", "state"),
    ),
    "skip_nonfinite(inner)": Arg(jmask.skip_nonfinite, OBJECTS),
    "multi_steps(inner)": Arg(lambda v: jmask.multi_steps(v, 2, GRADS), OBJECTS),
    "multi_steps(every_k)": Arg(lambda v: jmask.multi_steps(ADAGRAD, v, GRADS), INTEGER),
    "multi_steps(like)": Arg(
        lambda v: step(jmask.multi_steps(ADAGRAD, 2, {"t": v})),
        ARRAY,
        named=("like", "updates"),
    ),
    "multi_steps(use_grad_mean)": Arg(
        of(jmask.multi_steps, "use_grad_mean", ADAGRAD, 2, GRADS), FLAG
    ),
}


def step(tx, grads=GRADS, params=PARAMS):
    return tx.update(grads, tx.init(PARAMS), params)


OPTIMIZERS = {
    "adagrad": ADAGRAD,
    "lazy": LAZY,
    "dense": jmask.adam(0.1, lazy_update=False),
    "skip": jmask.skip_nonfinite(ADAGRAD),
    "multi": jmask.multi_steps(ADAGRAD, 2, GRADS),
    "drop": optax.chain(jmask.drop_nonfinite_rows(), ADAGRAD),
    "densify": optax.chain(jmask.densify(), ADAGRAD),
    "clip": optax.chain(jmask.clip_by_row_norm(1.0), ADAGRAD),
    "bound": optax.chain(ADAGRAD, jmask.max_row_norm(1.0)),
}
for name, tx in OPTIMIZERS.items():
    chain = name in ("drop", "densify", "clip", "bound")
    given = {} if name == "multi" else NAN
    OPTIMIZER_ARGUMENTS |= {
        f"update of {name}(updates)": Arg(
            lambda v, tx=tx: step(tx, {"t": v}), ARRAY, given, named=("updates",)
        ),
        f"apply_gradients of {name}(grads)": Arg(
            lambda v, tx=tx: jmask.apply_gradients(tx, {"t": v}, tx.init(PARAMS), PARAMS),
            ARRAY,
            given,
            named=("updates",),
        ),
        f"update of {name}(state)": Arg(
            lambda v, tx=tx: tx.update(GRADS, v, PARAMS), OBJECTS, {}, OF_OPTAX if chain else {}
        ),
        f"update of {name}(params)": Arg(
            lambda v, tx=tx: step(tx, params={"t": v}),
            ARRAY,
            NAN,
            named=("params", "updates"),
        ),
        f"init of {name}(params)": Arg(
            lambda v, tx=tx: tx.init({"t": v}),
            ARRAY,
            TREE | INEXACT | because("frozen, as integers are", "a scalar", "booleans"),
            named=("params",),
        ),
    }

OPTIMIZER_ARGUMENTS |= {
    "apply_gradients(tx)": Arg(
        lambda v: jmask.apply_gradients(v, GRADS, ADAGRAD.init(PARAMS), PARAMS), OBJECTS
    ),
    "apply_gradients(opt_state)": Arg(
        lambda v: jmask.apply_gradients(ADAGRAD, GRADS, v, PARAMS),
        OBJECTS,
        named=("opt_state", "state"),
    ),
    "apply_gradients(params)": Arg(
        lambda v: jmask.apply_gradients(ADAGRAD, GRADS, ADAGRAD.init(PARAMS), {"t": v}),
        ARRAY,
        NAN,
        named=("params", "updates"),
    ),
    "apply_gradients(key)": Arg(
        of(jmask.apply_gradients, "key", ADAGRAD, GRADS, ADAGRAD.init(PARAMS), PARAMS),
        ARRAY,
        DEFAULT,
    ),
    "apply_updates(params)": Arg(
        lambda v: jmask.apply_updates({"t": v}, GRADS),
        ARRAY,
        NAN | because("None stays None, as for optax", "None") | because("wider", "complex"),
        named=("params", "updates"),
    ),
    "apply_updates(updates)": Arg(
        lambda v: jmask.apply_updates(PARAMS, {"t": v}),
        ARRAY,
        NAN | because("None leaves its parameter alone, as for optax", "None"),
    ),
    "apply_updates(key)": Arg(of(jmask.apply_updates, "key", PARAMS, GRADS), ARRAY, DEFAULT),
    "from_torch_state(state)": Arg(lambda v: jmask.from_torch_state(v, {0: LOADED}), OBJECTS),
    "from_torch_state(torch_state)": Arg(
        lambda v: jmask.from_torch_state(ADAGRAD.init(TABLE), v), OBJECTS
    ),
    "from_torch_state(sum)": Arg(
        lambda v: jmask.from_torch_state(ADAGRAD.init(TABLE), {0: {**LOADED, "sum": v}}),
        ARRAY,
        NAN | because("its tensors are what is read here", "another framework's"),
        named=("torch_state",),
    ),
    "from_torch_state(step)": Arg(
        lambda v: jmask.from_torch_state(ADAGRAD.init(TABLE), {0: {**LOADED, "step": v}}),
        NUMBER,
        named=("torch_state",),
    ),
    "from_torch_state(order)": Arg(
        lambda v: jmask.from_torch_state(ADAGRAD.init(TABLE), {0: LOADED}, v), OBJECTS, DEFAULT
    ),
    "to_torch_state(state)": Arg(jmask.to_torch_state, OBJECTS),
    "to_torch_state(order)": Arg(
        lambda v: jmask.to_torch_state(ADAGRAD.init(TABLE), v), OBJECTS, DEFAULT
    ),
}

# --- trees ------------------------------------------------------------------------------------


def mapped(function):
    return lambda v: jax.vmap(lambda _: function(v, "i"), axis_name="i")(jnp.ones(2))


SUMMED = TREE | ANY
SCALED = {k: v for k, v in SUMMED.items() if k != "booleans"}
OPTIMIZER_ARGUMENTS |= {
    "tree.add(tree)": Arg(lambda v: jmask.tree.add(v, v), ARRAY, SUMMED),
    "tree.norm(tree)": Arg(jmask.tree.norm, ARRAY, SUMMED),
    "tree.norm(squared)": Arg(lambda v: jmask.tree.norm(TABLE, v), FLAG),
    "tree.size(tree)": Arg(jmask.tree.size, ARRAY, SUMMED),
    "tree.scale(tree)": Arg(lambda v: jmask.tree.scale(2.0, v), ARRAY, SCALED),
    "tree.scale(scalar)": Arg(
        lambda v: jmask.tree.scale(v, TABLE),
        {k: v for k, v in NUMBER.items() if k != "complex"},
        {k: v for k, v in FILL.items() if k != "True"},
    ),
    "tree.mean(trees)": Arg(jmask.tree.mean, OBJECTS),
    "tree.mean(tree)": Arg(lambda v: jmask.tree.mean([v, v]), ARRAY, SCALED),
    "tree.merge(stacked)": Arg(
        jmask.tree.merge, ARRAY, {k: v for k, v in ANY.items() if k != "a scalar"} | DEFAULT
    ),
    "tree.psum(tree)": Arg(mapped(jmask.tree.psum), ARRAY, SUMMED),
    "tree.pmean(tree)": Arg(mapped(jmask.tree.pmean), ARRAY, SCALED),
}
