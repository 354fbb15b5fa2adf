"""A step gives the same in the program that makes its state, and on each of several devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmask
from tests.compiled_step import with_optax
from tests.test_in_place import OPTIMIZERS

V, D = 8, 4


@pytest.fixture(params=OPTIMIZERS)
def tx(request: pytest.FixtureRequest) -> Any:
    return OPTIMIZERS[request.param]


def problem(seed: int = 0) -> tuple[Any, Any]:
    """Parameters and rows of a gradient."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {"table": normal(V, D), "dense": normal(D)}, normal(3, D)


def gradients(values: jax.Array) -> Any:
    return {
        "table": jmask.RowSparse(jnp.array([5, 2, 2]), values, (V, D)),
        "dense": values.sum(0),
    }


def assert_close(x: Any, y: Any) -> None:
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, x, y)


def test_state_made_in_the_same_program(tx):
    """Slots of zeros are then one value of the program, and must not be one buffer."""
    params, values = problem()

    def step(values: Any, state: Any, params: Any) -> Any:
        return jmask.apply_gradients(tx, gradients(values), state, params)

    first = jax.jit(lambda values, params: step(values, tx.init(params), params))
    assert_close(first(values, params), jax.jit(step)(values, tx.init(params), params))


def on_two_devices(apply: Any, tx: Any, same: bool) -> Any:
    """A step on each device, on the same parameters or on some of its own."""

    def step(params: Any, values: Any) -> Any:
        params = params if same else jax.tree.map(lambda x: x[0], params)
        params, _ = apply(tx, gradients(values[0]), tx.init(params), params)
        return params if same else jax.tree.map(lambda x: x[None], params)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    spec = P() if same else P("x")
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec, P("x")), out_specs=spec))


@pytest.mark.parametrize("apply", [with_optax, jmask.apply_gradients], ids=["in two", "in one"])
def test_parameters_of_each_device(apply, tx):
    problems = [problem(0), problem(1)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *problems)
    expected = [
        apply(tx, gradients(values), tx.init(params), params)[0] for params, values in problems
    ]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    assert_close(on_two_devices(apply, tx, same=False)(*together), expected)


def test_what_differs_is_not_taken_for_the_same(tx):
    """Gradients of each device for parameters of all: what comes out is not replicated."""
    (params, values), (_, others) = problem(0), problem(1)
    step = on_two_devices(jmask.apply_gradients, tx, same=True)
    # The second from the loop of a step that may not be taken.
    why = "out_specs which require replication|carry input and carry output must have equal"
    with pytest.raises((TypeError, ValueError), match=why):
        step(params, jnp.stack([values, others]))
