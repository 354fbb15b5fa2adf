"""What cannot be deferred is refused when the table is made, and says why."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest

import jmask

pytestmark = pytest.mark.dtype_promotion

TABLE = jnp.ones((6, 2))
ADAM = jmask.adam(0.1)


def grads_of(params: Any) -> Any:
    return jmask.grad(lambda p: jnp.sum(p[jnp.array([0, 3, 3])]))(params)


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
