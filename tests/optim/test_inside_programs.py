"""A step gives the same in the program that makes its state, and on each of several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmask
from tests.compilations import no_tracer_is_kept
from tests.compiled_step import with_optax
from tests.kernels.test_in_place import PARTITION
from tests.optimizers import OF_ALL_TABLES, OPTIMIZERS
from tests.oracle import assert_close
from tests.stored_tables import STEPS

pytestmark = pytest.mark.dtype_promotion

# Equal ids are found by sorting or hashing in large tables, by marking in small ones.
LARGE, SMALL, D = 40, 8, 4


# One for each way in which a step is made: the others differ from these in arithmetic alone.
WAYS = (
    "sgd", "sgd with all terms", "adam", "rowwise adagrad", "rowwise adam with weight decay",
    "adam unless not finite", "adam without bad rows", "adam within norms",
    "clipped optax.adam", "injected optax.adam", "partition",
)  # fmt: skip


OF_WAYS = {**OPTIMIZERS, "partition": PARTITION}


@pytest.fixture(params=WAYS)
def tx(request):
    return OF_WAYS[request.param]


def problem(seed=0, rows=SMALL):
    """Parameters, and ids and rows of a gradient."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params = {"table": normal(rows, D), "dense": normal(D)}
    return params, (jnp.array([5, 2, 2]) + seed, normal(3, D))


def gradients(of_rows, params):
    ids, values = of_rows
    return {
        "table": jmask.RowSparse(ids, values, params["table"].shape),
        "dense": values.sum(0),
    }


@pytest.mark.sampled
def test_state_made_in_the_same_program(tx):
    """Slots of zeros are then one value of the program, and must not be one buffer."""
    params, rows = problem()

    def step(rows, state, params):
        return jmask.apply_gradients(tx, gradients(rows, params), state, params)

    first = jax.jit(lambda rows, params: step(rows, tx.init(params), params))
    assert_close(first(rows, params), jax.jit(step)(rows, tx.init(params), params))


@pytest.mark.parametrize("name", ["adam", "momentum", "rowwise adagrad"])
def test_derivatives_of_a_step(name):
    """Of what comes out in the rows of the gradient, as of the operations one by one."""
    tx = OPTIMIZERS[name]
    params, (ids, values) = problem()

    def after(apply, values):
        new, _ = apply(tx, gradients((ids, values), params), tx.init(params), params)
        return jnp.sum(new["table"] ** 2) + jnp.sum(new["dense"] ** 2)

    expected = jax.grad(lambda values: after(with_optax, values))(values)
    in_one = lambda values: after(jmask.apply_gradients, values)
    np.testing.assert_allclose(jax.grad(in_one)(values), expected, rtol=1e-4, atol=1e-5)
    _, slope = jax.jvp(in_one, (values,), (jnp.ones_like(values),))
    np.testing.assert_allclose(slope, expected.sum(), rtol=1e-4, atol=1e-5)


def on_two_devices(apply, tx, same):
    """A step on each device, on the same parameters or on some of its own."""

    def step(params, rows):
        params = params if same else jax.tree.map(lambda x: x[0], params)
        rows = jax.tree.map(lambda x: x[0], rows)
        params, _ = apply(tx, gradients(rows, params), tx.init(params), params)
        return params if same else jax.tree.map(lambda x: x[None], params)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    spec = P() if same else P("x")
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec, P("x")), out_specs=spec))


@pytest.mark.parametrize(
    ("name", "rows", "apply"),
    [
        ("rowwise adagrad", SMALL, jmask.apply_gradients),
        ("adam", SMALL, with_optax),
        *(
            pytest.param(name, LARGE, apply, marks=pytest.mark.sampled)
            for name in WAYS
            for apply in (jmask.apply_gradients, with_optax)
        ),
    ],
)
def test_parameters_of_each_device(name, rows, apply):
    tx = OF_WAYS[name]
    problems = [problem(0, rows), problem(1, rows)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *problems)
    expected = [
        apply(tx, gradients(of_rows, params), tx.init(params), params)[0]
        for params, of_rows in problems
    ]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    assert_close(on_two_devices(apply, tx, same=False)(*together), expected)


@pytest.mark.sampled
def test_what_differs_is_not_taken_for_the_same(tx):
    """Gradients of each device for parameters of all: what comes out is not replicated."""
    (params, rows), (_, others) = problem(0), problem(1)
    step = on_two_devices(jmask.apply_gradients, tx, same=True)
    # The second from the loop of a step that may not be taken.
    why = "out_specs which require replication|carry input and carry output must have equal"
    with pytest.raises((TypeError, ValueError), match=why):
        step(params, jax.tree.map(lambda *x: jnp.stack(x), rows, others))


@pytest.mark.sampled
@pytest.mark.parametrize("form", [lambda x: x, jmask.PackedTable.pack], ids=["array", "packed"])
@pytest.mark.parametrize("name", OF_ALL_TABLES)
def test_no_tracer_is_kept(name, form):
    """JAX remembers what a primitive is given, and must not remember the trace with it."""
    tx, (params, of_rows) = OPTIMIZERS[name], problem(rows=LARGE)
    grads, params = gradients(of_rows, params), params | {"table": form(params["table"])}
    for step in STEPS.values():
        with no_tracer_is_kept():
            jax.jit(lambda *given, step=step: step(tx, *given)).lower(
                grads, tx.init(params), params
            )
