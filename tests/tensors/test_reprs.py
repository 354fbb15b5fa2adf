"""Short reprs of tensors and tables: type, shape, and the entries of masked tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.sparse_arrays import coo, csr

TABLE = jnp.ones((1000, 16))
ROWS = jmask.RowSparse([1, 3], jnp.ones((2, 2)), (6, 2))
HOLES = jmask.masked_tensor(jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True]))


def sharded():
    return jmask.sharded(TABLE, jax.make_mesh((1,), ("x",)))


STACK = jax.vmap(lambda v: jmask.RowSparse([4], v, (6, 2)))(jnp.ones((3, 1, 2)))
SHOWN = [
    ("RowSparse(float32[6, 2], nse=2)", lambda: ROWS),
    ("RowSparse(float32[6, 2], nse=1, batch=(3,))", lambda: STACK),
    ("RowSparse(float32[6, 2], nse=2)", lambda: jax.eval_shape(lambda: ROWS)),
    ("MaskedTensor([1.0, --, 3.0], dtype=float32)", lambda: HOLES),
    (
        "MaskedTensor(row_sparse, float32[9], nse=1, values=[5.0])",
        lambda: jmask.masked_tensor(jmask.RowSparse([2], [5.0], (9,)), None),
    ),
    (
        "MaskedTensor(coo, float32[1, 2], nse=1, values=[5.0])",
        lambda: jmask.masked_tensor(coo(np.float32([[0, 5]]))),
    ),
    (
        "MaskedTensor(csr, float32[1, 2], nse=1, values=[5.0])",
        lambda: jmask.masked_tensor(csr(np.float32([[0, 5]]))),
    ),
    ("PackedTable(float32[1000, 16])", lambda: jmask.packed(TABLE, platform="tpu")),
    ("ShardedTable(float32[1000, 16])", sharded),
]


@pytest.mark.parametrize(("shown", "make"), SHOWN)
def test_repr(shown, make):
    assert repr(make()) == shown


@pytest.mark.parametrize(("shown", "make"), SHOWN)
def test_nodes_without_arrays(shown, make):
    """Transformations put anything into the leaves of a pytree; printing them never raises."""
    x, seen = make(), []
    jax.eval_shape(lambda x: seen.append(repr(x)), x)
    seen.append(repr(jax.eval_shape(lambda x: x, x)))
    without = shown.replace("[1.0, --, 3.0], dtype=float32", "float32[3]")
    assert set(seen) == {without.replace(", values=[5.0]", "")}
    jax.jit(lambda: seen.append(repr(x)))()
    assert seen[-1] == shown  # what is not traced
    if not isinstance(x, jmask.ShardedTable):
        jax.vmap(lambda x: seen.append(repr(x)), axis_size=3, in_axes=None)(x)
    others = [lambda leaf, y=y: y for y in (None, 0, "spec", object(), (), {"a": 1})]
    for function in (*others, lambda leaf: jnp.stack([leaf, leaf])):
        if "ShapeDtypeStruct" not in str(jax.tree.leaves(x)) or function in others:
            assert type(x).__name__ in repr(jax.tree.map(function, x))
