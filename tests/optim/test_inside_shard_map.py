"""Steps inside a `shard_map` on blocks of a table: devices agree on what all of them do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jmask
from tests.oracle import assert_close
from tests.stored_tables import STEPS, mesh_of, numbers

pytestmark = pytest.mark.sampled(15)

V, D = 24, 12
TABLE = jnp.pad(numbers(), ((0, V - 21), (0, 0)))
IDS = jnp.asarray(np.random.default_rng(1).integers(0, V, 32), jnp.int32)
FACTORS = jnp.linspace(0.5, 2.0, 32)
factors_of = lambda tx: FACTORS.at[5].set(jnp.nan) if tx in BAD.values() else FACTORS


def loss(params, ids, factors, rows_of=lambda table, ids: table[ids]):
    rows = rows_of(params["table"], ids)
    return jnp.sum(jnp.sin(rows) * factors[:, None] * params["dense"][None])


def rows_of_blocks(block, ids):
    """A lookup as one writes it for each device: ids to all, rows back."""
    ids = jax.lax.all_gather(ids, "x", tiled=True)
    places = ids - jax.lax.axis_index("x") * block.shape[0]
    rows = jmask.embedding_lookup(block, places, mode="zero")
    return jax.lax.psum_scatter(rows, "x", tiled=True)


def inside(tx, step, checked):
    """Parameters and state after a step of a program that is written for each device."""
    params = {"table": TABLE, "dense": jnp.ones(D)}
    state = tx.init(params)
    spread = jax.tree.map(lambda x: P("x") if x.shape[:1] == (V,) else P(), (params, state))
    of_blocks = functools.partial(loss, rows_of=rows_of_blocks)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(8),
        in_specs=(*spread, P("x"), P("x")),
        out_specs=spread,
        check_vma=checked,
    )
    def run(params, state, ids, factors):
        grads = jmask.grad(of_blocks)(params, ids, factors)
        if not checked:  # then nothing is summed over devices by itself
            grads["dense"] = jax.lax.psum(grads["dense"], "x")
        return STEPS[step](tx, grads, state, params)

    return run(params, state, IDS, factors_of(tx))


def alone(tx, step):
    """The same on one device, from the same gradient."""
    params = {"table": TABLE, "dense": jnp.ones(D)}
    grads = jmask.grad(loss)(params, IDS, factors_of(tx))
    return STEPS[step](tx, grads, tx.init(params), params)


def ours(inner):
    """A chain with a sum in a branch of a `cond`."""

    def update(updates, state, params=None):
        clip = lambda u: jax.tree.map(lambda x: x / optax.tree.norm(u), u)
        branch = jax.lax.cond(state == 0, clip, lambda u: u, updates)
        return branch, state + 1

    return optax.chain(
        optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update), inner
    )


GOOD = {
    "momentum": jmask.lazy(optax.sgd(1.0, momentum=0.5)),
    "row norm": optax.chain(jmask.clip_by_row_norm(0.3), jmask.lazy(optax.sgd(1.0))),
}
BAD = {
    "skip": jmask.skip_nonfinite(jmask.adam(0.1)),
    "drop": optax.chain(jmask.drop_nonfinite_rows(), jmask.adagrad(0.1)),
}
# One number of all rows, of which each device has some.
SUMS = {
    "global norm": jmask.lazy(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))),
    "in a branch": jmask.lazy(ours(optax.sgd(1.0))),
    "if finite": jmask.lazy(optax.apply_if_finite(optax.sgd(1.0), 3)),
    "skip, clipped": jmask.skip_nonfinite(jmask.lazy(ours(optax.sgd(1.0)))),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_as_on_one_device(name, checked, step):
    tx = (GOOD | BAD)[name]
    assert_close(inside(tx, step, checked), alone(tx, step), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", SUMS)
def test_sums_over_rows_are_refused(name, step):
    with pytest.raises(ValueError, match=r"sums over rows.*outside of the shard_map"):
        inside(SUMS[name], step, True)
    alone(SUMS[name], step)


@pytest.mark.parametrize("step", STEPS)
def test_models_of_each_device_have_sums_of_their_own(step):
    """All of the parameters differ from device to device: none is a block of a table."""
    tx = SUMS["global norm"]
    tables = jnp.stack([TABLE[:5] * (1 + i) for i in range(8)])

    def run(table):
        gradient = jmask.grad(lambda t: jnp.sum(jnp.sin(t[jnp.array([1, 3, 1])])))(table[0])
        return STEPS[step](tx, gradient, tx.init(table[0]), table[0])[0][None]

    mapped = jax.shard_map(run, mesh=mesh_of(8), in_specs=P("x"), out_specs=P("x"))
    wanted = jnp.concatenate([run(x[None]) for x in tables])
    np.testing.assert_allclose(jax.jit(mapped)(tables), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_nan_on_one_device(step, checked):
    """In rows that only the table of one device has; dense parameters are the same on all."""
    tx = jmask.skip_nonfinite(jmask.sgd(1.0))
    params = {"table": jnp.ones((8 * 4, 2)), "dense": jnp.ones(2)}
    spread = {"table": P("x"), "dense": P()}

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(8),
        in_specs=(spread, P("x")),
        out_specs=(spread, P("x")),
        check_vma=checked,
    )
    def run(params, values):
        rows = jmask.RowSparse([2], values, (4, 2))
        grads = {"table": rows, "dense": jnp.ones(2)}
        new, state = STEPS[step](tx, grads, tx.init(params), params)
        return new, state.skipped[None]

    values = jnp.ones((8, 2))
    new, skipped = run(params, values.at[3, 1].set(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, new, params)
    assert skipped.tolist() == [1] * 8
    new, skipped = run(params, values)
    assert skipped.tolist() == [0] * 8
    assert (np.asarray(new["table"])[2::4] == 0).all()


def test_a_row_left_out_on_one_device():
    """Counted alike on all devices, whether types say where gradients differ or not."""
    tx = jmask.drop_nonfinite_rows()

    def count(checked, spread):
        def run(values):
            gradient = jmask.RowSparse([2, 1], values, (4,))
            return tx.update(gradient, tx.init(jnp.ones(4)), jnp.ones(4))[1].dropped

        mapped = jax.shard_map(
            run, mesh=mesh_of(8), in_specs=spread, out_specs=P(), check_vma=checked
        )
        values = jnp.ones(16).at[jnp.array([1, 4])].set(jnp.nan)
        return int(jax.jit(mapped)(values if spread else values[:2]))

    assert count(True, P("x")) == 2
    assert count(True, P()) == count(False, P()) == 1
    assert count(False, P("x")) == 1
