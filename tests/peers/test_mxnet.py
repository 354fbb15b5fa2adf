"""jmask beside MXNet itself: numbers of optimizers, values and storage of functions.

MXNet ended with Python 3.11 and NumPy 1.23: it runs in an interpreter of its own.
"""

import pickle
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import jmask
from tests.peers.mxnet_side import plain

PYTHON = Path(__file__).parents[2] / ".venv-mxnet" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="needs MXNet, for which `make test-peers` makes .venv-mxnet"
    ),
]

_rng = np.random.default_rng(0)
_normal = lambda *shape: _rng.normal(size=shape).astype(np.float32)
TABLE, OTHER, W, Y = _normal(9, 4), _normal(9, 4), _normal(9, 3), _normal(5, 3)
X = _normal(5, 9) * (_rng.random((5, 9)) < 0.3)
rows = lambda *ids: (_normal(len(ids), 4), np.array(ids), (9, 4))
A, B = rows(1, 4, 7), rows(0, 4)


def csr(x):
    indptr = np.concatenate([[0], np.cumsum((x != 0).sum(1))])
    return x[x != 0], np.nonzero(x)[1], indptr, x.shape


def ours(x):
    """An argument as jmask takes it."""
    if isinstance(x, tuple):
        *parts, shape = map(np.asarray, x)
        shape = tuple(map(int, shape))
        if len(parts) == 2:
            return jmask.RowSparse(parts[1], parts[0], shape)
        return sparse.BCSR(tuple(map(jnp.asarray, parts)), shape=shape)
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


# --- optimizers --------------------------------------------------------------------------

GRADIENTS = [rows(1, 4, 7), rows(0, 4, 8), rows(1, 2, 4), rows(4)]
SCALED = {"clip_gradient": 0.5, "rescale_grad": 0.7}
MX, JMASK = SCALED | {"wd": 0.1}, SCALED | {"weight_decay": 0.1}
FTRL = {"lamda1": 0.05, "beta": 0.7}

# MXNet's optimizer, its options, and jmask's.
OPTIMIZERS = [
    ("SGD", {}, jmask.sgd(0.1)),
    ("SGD", MX, jmask.sgd(0.1, **JMASK)),
    ("SGD", MX | {"momentum": 0.9}, jmask.sgd(0.1, 0.9, **JMASK)),
    ("SGD", MX | {"lazy_update": False}, jmask.sgd(0.1, lazy_update=False, **JMASK)),
    (
        "SGD",
        MX | {"lazy_update": False, "momentum": 0.9},
        jmask.sgd(0.1, 0.9, lazy_update=False, **JMASK),
    ),
    ("Adam", {}, jmask.adam(0.1)),
    ("Adam", MX, jmask.adam(0.1, **JMASK)),
    ("Adam", MX | {"lazy_update": False}, jmask.adam(0.1, lazy_update=False, **JMASK)),
    ("AdaGrad", SCALED, jmask.adagrad(0.1, eps=0.0, eps_root=1e-7, **SCALED)),
    (
        "contrib.GroupAdaGrad",
        SCALED,
        jmask.rowwise_adagrad(0.1, eps=0.0, eps_root=1e-5, **SCALED),
    ),
    ("Ftrl", MX | FTRL, jmask.ftrl(0.1, 0.05, 0.7, lazy_update=False, **JMASK)),
    ("Ftrl", MX | FTRL | {"is_sparse": True}, jmask.ftrl(0.1, 0.05, 0.7, **JMASK)),
]

# --- functions ---------------------------------------------------------------------------

FORWARD = {"forward_stype": "row_sparse"}
T = {"transpose_a": True}

# MXNet's function, jmask's, the arguments, and the options of both.
FUNCTIONS = [
    ("dot", jmask.dot, (csr(X), W), {}),
    ("dot", jmask.dot, (csr(X), Y), T),
    ("dot", jmask.dot, (csr(X), Y), T | FORWARD),
    ("dot", jmask.dot, (csr(X), Y), T | {"forward_stype": "default"}),
    ("dot", jmask.dot, (csr(X), A), {}),
    ("dot", jmask.dot, (Y.T.copy(), csr(X)), {"forward_stype": "default"}),
    ("sparse.retain", jmask.retain, (A, np.array([4, 7])), {}),
    ("add_n", jmask.add_n, (A, B), {}),
    ("add_n", jmask.add_n, (A, OTHER), {}),
    ("_internal._square_sum", jmask.square_sum, (A,), {"axis": 1}),
    ("_internal._square_sum", jmask.square_sum, (A,), {"axis": 0}),
    ("_internal._square_sum", jmask.square_sum, (A,), {"axis": 1, "keepdims": True}),
    ("cast_storage", jmask.cast_storage, (TABLE,), {"stype": "row_sparse"}),
    ("cast_storage", jmask.cast_storage, (A,), {"stype": "default"}),
    ("cast_storage", jmask.cast_storage, (X,), {"stype": "csr"}),
    ("sparse.add", jmask.numpy.add, (A, B), {}),
    ("sparse.add", jmask.numpy.add, (A, OTHER), {}),
    ("sparse.subtract", jmask.numpy.subtract, (A, B), {}),
    ("sparse.multiply", jmask.numpy.multiply, (A, B), {}),
    ("sparse.multiply", jmask.numpy.multiply, (A, OTHER), {}),
    *(
        (f"sparse.{name}", getattr(jmask.numpy, name), (A,), {})
        for name in "sin tan arcsin sinh arctan expm1 sign rint floor trunc square abs".split()
    ),
]


def stored(table):
    """A table whose rows are stored, as MXNet's lazy Ftrl wants it."""
    return table, np.arange(len(table)), table.shape


@pytest.fixture(scope="module")
def theirs():
    """What MXNet makes of all cases, in one process."""
    calls = {}
    for key, (name, options, _) in enumerate(OPTIMIZERS):
        options = {"learning_rate": 0.1} | options
        table = stored(TABLE) if options.pop("is_sparse", False) else TABLE
        calls["optimizer", key] = f"optimizer.{name}", (table, GRADIENTS), options
    for key, (name, _, arguments, options) in enumerate(FUNCTIONS):
        calls["function", key] = f"nd.{name}", arguments, options
    calls = {key: (key[0], call[0], plain(call[1]), call[2]) for key, call in calls.items()}
    program = Path(__file__).with_name("mxnet_side.py")
    done = subprocess.run(
        [PYTHON, program], input=pickle.dumps(calls), capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


@pytest.mark.parametrize(
    "key", range(len(OPTIMIZERS)), ids=[x[0] for x in OPTIMIZERS].__getitem__
)
def test_optimizers(theirs, key):
    tx, table = OPTIMIZERS[key][2], jnp.asarray(TABLE)
    state = tx.init(table)
    for gradient in GRADIENTS:
        table, state = jmask.apply_gradients(tx, ours(gradient), state, table)
    answer = theirs["optimizer", key]
    expected = ours(answer).todense() if isinstance(answer, tuple) else np.array(answer)
    np.testing.assert_allclose(table, expected, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize(
    "key", range(len(FUNCTIONS)), ids=[x[0] for x in FUNCTIONS].__getitem__
)
def test_functions(theirs, key):
    _, function, arguments, options = FUNCTIONS[key]
    result, answer = function(*map(ours, arguments), **options), theirs["function", key]
    expected = ours(answer) if isinstance(answer, tuple) else np.array(answer)
    np.testing.assert_allclose(
        jmask.todense(result), jmask.todense(expected), rtol=1e-5, atol=1e-6
    )
    # Sums of squares of rows MXNet stores by rows with `keepdims` alone.
    assert type(result) is type(ours(expected)) or options == {"axis": 1}
