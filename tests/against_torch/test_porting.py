"""Both programs of each pair of docs/porting.md end with the same table."""

import os
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "porting.md").read_text()
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
    sections = [section for section in SECTIONS if section.startswith("From")]
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


OTHERS = {
    "TensorFlow:": "JMASK_TENSORFLOW_PYTHON",
    "TensorFlow Addons:": "JMASK_TENSORFLOW_ADDONS_PYTHON",
    "MXNet:": "JMASK_MXNET_PYTHON",
}


@pytest.mark.parametrize(
    ("section", "name"), [(s, name) for s in SECTIONS for name in OTHERS if name in s]
)
def test_others(section, name):
    """Large, and two of them need a Python of their time: run where one is named."""
    variable = OTHERS[name]
    if variable not in os.environ:
        pytest.skip(f"{variable} names no interpreter that has {name[:-1]}")
    compare(section, theirs(section, os.environ[variable]))
