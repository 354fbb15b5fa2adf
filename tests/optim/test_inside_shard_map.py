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


def gradients(params, ids, factors, rows_of=lambda table, ids: table[ids]):
    def loss(params):
        rows = rows_of(params["table"], ids)
        return jnp.sum(jnp.sin(rows) * factors[:, None] * params["dense"][None])

    return jmask.grad(loss)(params)


def with_finite_dense(grads):
    """A nan is only in a row that one device has."""
    return {**grads, "dense": jnp.nan_to_num(grads["dense"], nan=1.0)}


def factors_of(tx):
    return FACTORS.at[5].set(jnp.nan) if tx in BAD.values() else FACTORS


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

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(8),
        in_specs=(*spread, P("x"), P("x")),
        out_specs=spread,
        check_vma=checked,
    )
    def run(params, state, ids, factors):
        grads = gradients(params, ids, factors, rows_of_blocks)
        if not checked:  # then nothing is summed over devices by itself
            grads["dense"] = jax.lax.psum(grads["dense"], "x")
        return STEPS[step](tx, with_finite_dense(grads), state, params)

    return run(params, state, IDS, factors_of(tx))


def alone(tx, step):
    """The same on one device, from the same gradient."""
    params = {"table": TABLE, "dense": jnp.ones(D)}
    grads = with_finite_dense(gradients(params, IDS, factors_of(tx)))
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
