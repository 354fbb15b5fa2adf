"""Parameters in trees of every make: what takes parameters takes them all, with one result.

dict, tuple, list, NamedTuple, dataclass, a module with a function, a flag and a name; None, no
leaf, numbers of Python and arrays of NumPy among the leaves
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.later import later
from tests.oracle import assert_close, is_row_sparse

eqx = later("equinox")
V, D, IDS = 6, 2, jnp.array([1, 4, 1])
TABLE, WEIGHTS = jnp.arange(1.0, 1 + V * D).reshape(V, D), jnp.array([0.5, 2.0])


class Pair(NamedTuple):
    table: Any
    weights: Any
    nothing: Any = None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["table", "weights"], meta_fields=["name"]
)
@dataclasses.dataclass(frozen=True)
class Named:
    table: Any
    weights: Any
    name: str = "a"


@functools.cache
def module():
    class Module(eqx.Module):
        table: Any
        weights: Any
        activation: Callable = jnp.tanh
        is_trained: bool = True

    return Module


# Each makes a tree of a table and weights, or of what belongs to them.
TREES = {
    "dict": lambda table, weights: {"table": table, "weights": weights},
    "tuple": lambda *pair: pair,
    "list": lambda *pair: list(pair),
    "NamedTuple": Pair,
    "dataclass": Named,
    "module": lambda *pair: module()(*pair),
    "nested": lambda table, weights: {"a": [{"b": table}, None], "c": (weights, {})},
    "numbers": lambda *pair: [*pair, 1.0, np.float32(2.0)],
}


def pair_of(tree):
    """The table and the weights, or what belongs to them."""
    found = [x for x in jax.tree.leaves(tree) if getattr(x, "size", 0) in (V * D, D)]
    return found[:2]


def loss(params):
    table, weights = pair_of(params)
    others = sum(jnp.sum(x) for x in jax.tree.leaves(params) if getattr(x, "ndim", 1) == 0)
    return jnp.sum(jnp.sin(table[IDS]) * weights[None]) + 0 * others


def ids_in(make):
    """The ids of the table in a tree like the parameters, parts of which are missing."""
    tree = make(IDS, None)
    of_ids = lambda x: x if x is IDS else None
    return jax.tree.map(of_ids, tree)


def stepped(tx, params, count=1, before=lambda params, state: (params, state)):
    state = tx.init(params)
    for _ in range(count):
        params, state = before(params, state)
        gradient = jmask.grad(loss)(params)
        params, state = jmask.apply_gradients(tx, gradient, state, params)
    return params, state


def by_optax(params, make):
    tx, gradient = jmask.lazy(optax.adam(0.1)), jmask.grad(loss)(params)
    updates, _ = tx.update(gradient, tx.init(params), params)
    return jmask.apply_updates(params, updates)


def deferred(params, make):
    tx = jmask.deferred(optax.adam(0.1))
    catch_up = lambda params, state: tx.catch_up(params, state, ids_in(make))
    return tx.catch_up(*stepped(tx, params, 2, catch_up))[0]


def averaged(params, make):
    ema = jmask.ema(0.5)
    params, state = stepped(optax.chain(jmask.adam(0.1), ema), params, 2)
    return ema.average(state, params)


def in_microbatches(params, make):
    like = jmask.grad(loss)(params)
    return stepped(jmask.multi_steps(jmask.adam(0.1), 2, like=like), params, 2)[0]


def reset(params, make):
    tx, zeros = jmask.adam(0.1), jax.nn.initializers.zeros
    params, state = stepped(tx, params)
    return jmask.vocabulary.reset(tx, params, state, ids_in(make), zeros)[0]


def moved(params, make):
    params, state = stepped(optax.chain(jmask.sgd(0.1), jmask.touched()), params)
    return jmask.rows_since(state, 0)


FUNCTIONS = {
    "gradient": lambda params, make: jax.tree.map(
        jmask.todense, jmask.grad(loss)(params), is_leaf=is_row_sparse
    ),
    "adam": lambda params, make: stepped(jmask.adam(0.1), params, 2)[0],
    "lazy": by_optax,
    "skip": lambda params, make: stepped(jmask.skip_nonfinite(jmask.adam(0.1)), params)[0],
    "deferred": deferred,
    "ema": averaged,
    "multi_steps": in_microbatches,
    "reset": reset,
    "touched": moved,
    "norm": lambda params, make: jmask.tree.norm(jmask.grad(loss)(params)),
}


@pytest.mark.each
@pytest.mark.dtype_promotion
@pytest.mark.parametrize("tree", [x for x in TREES if x != "dict"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_tree(name, tree):
    results = []
    for make in (TREES["dict"], TREES[tree]):
        params = make(TABLE, WEIGHTS)
        found = FUNCTIONS[name](params, make)
        results.append([x for x in jax.tree.leaves(found) if getattr(x, "size", 0) > 1])
        if name not in ("norm", "gradient", "touched", "ema"):
            assert jax.tree.structure(found) == jax.tree.structure(params)
    ours, expected = results
    assert_close(ours, expected, rtol=1e-6)
