"""What cannot be deferred is refused when the table is made, and says why."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jmask

pytestmark = pytest.mark.dtype_promotion

TABLE = jnp.ones((6, 2))
ADAM = jmask.adam(0.1)


def grads_of(params: Any) -> Any:
    return jmask.grad(lambda p: jnp.sum(p[jnp.array([0, 3, 3])]))(params)


def scaled_by_columns() -> optax.GradientTransformation:
    """It mixes the entries of a row."""
    return optax.stateless(lambda g, p: jax.tree.map(lambda x: -jnp.cumsum(x, axis=1) + x, g))


def relative() -> optax.GradientTransformation:
    """It divides by the parameter."""
    return optax.stateless(
        lambda g, p: jax.tree.map(lambda x, y: -(x + 0.1) / (jnp.abs(y) + 1.0), g, p)
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "L2 in Adam": (jmask.adam(0.1, weight_decay=0.1), "L2 decay"),
    "L2 in Adagrad": (jmask.adagrad(0.1, weight_decay=0.1), "L2 decay"),
    "L2 in optax.adam": (
        jmask.lazy(optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.1))), "L2 decay",
    ),
    "noise": (jmask.lazy(optax.noisy_sgd(0.1, key=1)), "noise"),
    "a constant": (
        jmask.lazy(optax.stateless(lambda g, p: jax.tree.map(lambda x: -x - 0.1, g))),
        "added to every row",
    ),
    "of the parameter": (jmask.lazy(relative()), "no closed form"),
    "trust ratio": (jmask.lazy(optax.lamb(0.1)), "closed form|not row-local|row"),
    "a chain": (optax.chain(ADAM, jmask.sgd(0.1, momentum=0.5)), "chain of transformations"),
    "eps 0": (jmask.lazy(optax.adam(0.1, eps=0.0)), "`eps` 0"),
    "b2 below b1": (jmask.adam(0.1, b1=0.99, b2=0.5), "b2 has to be nearer to 1"),
    "adabelief": (jmask.lazy(optax.adabelief(0.1)), "closed form"),
    "amsgrad": (jmask.lazy(optax.amsgrad(0.1)), "closed form"),
    "ftrl": (jmask.ftrl(0.1), "closed form|depend"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    tx, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        jmask.deferred(TABLE, tx)


TAKEN: dict[str, Any] = {
    "global norm": jmask.lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))),
    "clip": jmask.lazy(optax.chain(optax.clip(1.0), optax.adam(0.1))),
    "decoupled": jmask.adam(0.1, weight_decay=0.1, decay_mode="decoupled"),
    "L2 in momentum": jmask.sgd(0.1, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    """Controls, near to what is refused."""
    table = jmask.deferred(TABLE, TAKEN[name])
    state = TAKEN[name].init(table)
    table, _ = jmask.apply_gradients(TAKEN[name], grads_of(table), state, table)
    assert float(table.todense()[0, 0]) < 1 == float(TABLE[0, 0])


OTHERS: dict[str, Any] = {
    "another rate": jmask.adam(0.2),
    "another b1": jmask.adam(0.1, b1=0.8),
    "another optimizer": jmask.sgd(0.1),
    "of optax": jmask.lazy(optax.adam(0.1)),
    "a schedule": jmask.adam(optax.linear_schedule(0.1, 0.0, 10)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_transformation_than_it_was_made_for(name: str) -> None:
    table = jmask.deferred(TABLE, ADAM)
    for tx in (OTHERS[name], jmask.skip_nonfinite(OTHERS[name])):
        with pytest.raises(ValueError, match="another optimizer"):
            jmask.apply_gradients(tx, grads_of(table), tx.init(table), table)
    with pytest.raises(ValueError, match="another optimizer"):
        OTHERS[name].update(grads_of(table), OTHERS[name].init(table), table)


def test_the_same_transformation_made_anew() -> None:
    """It is known by what it does."""
    table = jmask.deferred(TABLE, ADAM)
    for tx in (jmask.adam(0.1), jmask.adam(0.1, lazy_update=False), jmask.skip_nonfinite(ADAM)):
        new, _ = jmask.apply_gradients(tx, grads_of(table), tx.init(table), table)
        assert float(new.todense()[0, 0]) < 1


def test_bad_input() -> None:
    table = jmask.deferred(TABLE, ADAM)
    with pytest.raises(TypeError, match="`table` is deferred already"):
        jmask.deferred(table, ADAM)
    with pytest.raises(TypeError, match="`ids` must be integers"):
        table[1:2]
    with pytest.raises(ValueError, match="takes a RowSparse"):
        jmask.apply_gradients(ADAM, jnp.ones((6, 2)), ADAM.init(table), table)
    bounded = optax.chain(ADAM, jmask.max_row_norm(1.0))
    with pytest.raises(ValueError, match="has the step of a deferred table already"):
        jmask.apply_gradients(bounded, grads_of(table), bounded.init(table), table)
    with pytest.raises(ValueError, match="has the step of a deferred table already"):
        jmask.deferred(TABLE, bounded)
    scaled = optax.chain(ADAM, optax.scale(0.5))
    with pytest.raises(TypeError, match=r"put it inside jmask\.lazy"):
        jmask.apply_gradients(scaled, grads_of(table), scaled.init(table), table)
