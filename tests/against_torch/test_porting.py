"""Both programs of each pair of docs/porting.md end with the same table.

And a run that starts in torch goes on in jmask, and back.
"""

import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "porting.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))
blocks = lambda section, language: re.findall(
    rf"^```{language}\n(.*?)^```$", SECTIONS[section], re.S | re.M
)


def ours(section):
    """The table that the program of jmask ends with; imports are those of the first."""
    namespace = {}
    exec(blocks("From optax with dense gradients", "python")[0], namespace)
    exec(blocks(section, "python")[0], namespace)
    return np.asarray(namespace["table"])


def theirs(section, python):
    """The table that the other program ends with, run by another interpreter."""
    program = blocks(section, "py")[0] + "\nprint(table.tobytes().hex())\n"
    done = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    return np.frombuffer(bytes.fromhex(done.stdout.split()[-1]), np.float32).reshape(1000, 4)


def compare(section, other):
    expected = ours(section)
    assert np.sum(np.any(expected != 1, axis=1)) == 4
    np.testing.assert_allclose(expected, other, rtol=2e-6, atol=1e-6)


def test_every_section_has_its_programs():
    sections = [x for x in SECTIONS if x.startswith("From") and x != "From 0.3"]
    assert len(sections) == 8
    for section in sections:
        is_jax = "optax" in section or "JAX" in section
        assert len(blocks(section, "python")) == 1
        assert len(blocks(section, "py")) == (0 if is_jax else 1)


def test_optax():
    table = jnp.ones((1000, 4))
    tx = optax.adagrad(0.1)
    state = tx.init(table)
    for ids in ([3, 14, 3], [14, 159, 2]):
        gradient = jax.grad(lambda t, i: jnp.sin(t[i]).sum())(table, jnp.array(ids))
        updates, state = tx.update(gradient, state, table)
        table = optax.apply_updates(table, updates)
    compare("From optax with dense gradients", np.asarray(table))


@pytest.mark.needs(what="torch")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("section", [s for s in SECTIONS if "torch" in s])
def test_torch(section):
    namespace = {}
    exec(blocks(section, "py")[0], namespace)
    compare(section, namespace["table"])


# Large, with a Python and a NumPy of their time: environments of their own.
OTHERS = {"TensorFlow": ".venv-addons", "MXNet": ".venv-mxnet"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "name"), [(s, name) for s in SECTIONS for name in OTHERS if name in s]
)
def test_others(section, name):
    python = ROOT / OTHERS[name] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs {name}, for which `make test-peers` makes {OTHERS[name]}")
    compare(section, theirs(section, python))


# --- a run that goes on in jmask, and back -----------------------------------------------

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


def test_slots_go_to_the_devices_of_their_table():
    table = jmask.sharded(jnp.ones((16, 2)), jax.make_mesh((8,), ("x",)))
    state = jmask.adagrad(0.1).init(table)
    loaded = jmask.from_torch_state(state, jmask.to_torch_state(state))
    assert loaded.sum_of_squares.sharding == state.sum_of_squares.sharding == table.sharding
    traced = jax.jit(lambda x: jmask.from_torch_state(x, jmask.to_torch_state(state)))(state)
    np.testing.assert_array_equal(traced.sum_of_squares, state.sum_of_squares)


def test_what_torch_goes_on_writing():
    """JAX takes memory of NumPy as it is, where it is aligned as torch's always is."""
    sums = np.frombuffer(memoryview(bytearray(4096 + 64)), np.float32)
    sums = sums[-sums.ctypes.data % 64 // 4 :][:1024].reshape(256, 4)
    state = jmask.adagrad(0.1).init(jnp.ones((256, 4)))
    loaded = jmask.from_torch_state(state, {0: {"step": 1, "sum": sums}})
    sums += 1
    np.testing.assert_array_equal(loaded.sum_of_squares, 0)


@pytest.mark.needs(what="torch")
def test_bfloat16():
    """NumPy has none that torch reads, and torch gives none to NumPy."""
    import torch

    state = jmask.adagrad(0.1).init(jnp.ones((3, 2), jnp.bfloat16))
    (exported,) = jmask.to_torch_state(state).values()
    optimizer = torch.optim.Adagrad([torch.ones(3, 2, dtype=torch.bfloat16)])
    loaded = optimizer.state_dict()
    loaded["state"] = {0: {k: torch.as_tensor(v) for k, v in exported.items()}}
    optimizer.load_state_dict(loaded)
    with pytest.raises(TypeError, match=r"'sum' of parameter 0 of .* CPU tensor, x\.detach"):
        jmask.from_torch_state(state, optimizer.state_dict())


@pytest.mark.parametrize("build", [jmask.adam, jmask.adagrad])
def test_round_trip(build):
    tx = jmask.skip_nonfinite(build(0.1))
    params, state = steps_of_jmask(tx, dict(START), tx.init(START), range(3))
    order = ["b", "a"]
    exported = jmask.to_torch_state(state, order)
    assert list(exported) == order
    again = jmask.from_torch_state(tx.init(params), {"state": exported}, order)
    jax.tree.map(np.testing.assert_array_equal, again, state)
