"""A run that starts in torch goes on in jmask, and back; and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask

SHAPES = {"items": (9, 4), "users": (7, 2)}
START = {
    name: np.random.default_rng(i).normal(size=shape).astype(np.float32)
    for i, (name, shape) in enumerate(SHAPES.items())
}
OPTIMIZERS = {"SparseAdam": (jmask.adam, 0.01), "Adagrad": (jmask.adagrad, 0.1)}


def gradients(step):
    rng = np.random.default_rng(100 + step)
    for name, (rows, width) in SHAPES.items():
        ids = rng.integers(0, rows, 5)
        yield name, ids, rng.normal(size=(5, width)).astype(np.float32)


def steps_of_jmask(tx, params, state, numbers):
    step = jax.jit(lambda g, s, p: jmask.apply_gradients(tx, g, s, p))
    for number in numbers:
        grads = {n: jmask.RowSparse(i, v, SHAPES[n]) for n, i, v in gradients(number)}
        params, state = step(grads, state, params)
    return params, state


def steps_of_torch(torch, tensors, optimizer, numbers):
    for number in numbers:
        for name, ids, values in gradients(number):
            tensors[name].grad = torch.sparse_coo_tensor(
                ids[None], torch.as_tensor(values), SHAPES[name], check_invariants=True
            )
        # torch warns of sparse tensors of its own, made without a choice about checks.
        with torch.sparse.check_sparse_tensor_invariants():
            optimizer.step()


@pytest.mark.needs(what="torch")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_there_and_back(name):
    import torch

    build, rate = OPTIMIZERS[name]

    def of_torch(arrays):
        tensors = {
            k: torch.nn.Parameter(torch.as_tensor(np.array(v))) for k, v in arrays.items()
        }
        return tensors, getattr(torch.optim, name)(list(tensors.values()), lr=rate)

    whole, optimizer = of_torch(START)
    steps_of_torch(torch, whole, optimizer, range(30))

    tensors, optimizer = of_torch(START)
    steps_of_torch(torch, tensors, optimizer, range(10))
    params = {k: jnp.asarray(v.detach().numpy()) for k, v in tensors.items()}
    tx = optax.chain(jmask.clip_by_row_norm(1e9), build(rate))
    state = jmask.from_torch_state(tx.init(params), optimizer.state_dict())
    one_tx, one_state = build(rate), state[1]
    params, one_state = steps_of_jmask(one_tx, params, one_state, range(10, 20))

    tensors, optimizer = of_torch(params)
    loaded = optimizer.state_dict()
    loaded["state"] = {
        i: {k: torch.as_tensor(v) for k, v in x.items()}
        for i, x in jmask.to_torch_state(one_state).items()
    }
    optimizer.load_state_dict(loaded)
    steps_of_torch(torch, tensors, optimizer, range(20, 30))
    for key, expected in whole.items():
        np.testing.assert_allclose(
            tensors[key].detach(), expected.detach(), rtol=2e-5, atol=2e-6
        )


@pytest.mark.parametrize("build", [jmask.adam, jmask.adagrad])
def test_round_trip(build):
    tx = jmask.skip_nonfinite(build(0.1))
    params, state = steps_of_jmask(tx, dict(START), tx.init(START), range(3))
    order = ["b", "a"]
    exported = jmask.to_torch_state(state, order)
    assert list(exported) == order
    again = jmask.from_torch_state(tx.init(params), {"state": exported}, order)
    jax.tree.map(np.testing.assert_array_equal, again, state)
