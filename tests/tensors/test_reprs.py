"""Short reprs of tensors and tables: type, shape, and the entries of masked tensors."""

import jax
import jax.numpy as jnp
import pytest

import jmask

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
    without = {HOLES.shape: "float32[3]", (9,): "row_sparse, float32[9], nse=1"}
    is_masked = isinstance(x, jmask.MaskedTensor)
    assert set(seen) == {f"MaskedTensor({without[x.shape]})" if is_masked else shown}
    for leaf in (None, 0, "sum", object()):
        assert type(x).__name__ in repr(jax.tree.map(lambda _, leaf=leaf: leaf, x))
