"""Tensors and tables printed by treescope (notebooks, penzai, flax), and short reprs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope

import jmask

TABLE = jnp.ones((1000, 16))
ROWS = jmask.RowSparse([1, 3], jnp.ones((2, 2)), (6, 2))
HOLES = jmask.masked_tensor(jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True]))


def sharded():
    return jmask.sharded(TABLE, jax.make_mesh((1,), ("x",)))


# name: (what is shown, its repr, words that its rendering has, and has not)
SHOWN = {
    "RowSparse": (
        lambda: ROWS,
        "RowSparse(float32[6, 2], nse=2)",
        ("RowSparse(", "[1, 3]", "shape=(6, 2)", "coalesced=False"),
        ("key<", "[[2]"),  # the ids, not the opaque form in which they travel
    ),
    "a batch of RowSparse": (
        lambda: jax.vmap(lambda v: jmask.RowSparse([4], v, (6, 2)))(jnp.ones((3, 1, 2))),
        "RowSparse(float32[6, 2], nse=1, batch=(3,))",
        ("int32(3, 1)", "float32(3, 1, 2)"),
        ("key<",),
    ),
    "shapes": (
        lambda: jax.eval_shape(lambda: ROWS),
        "RowSparse(float32[6, 2], nse=2)",
        ("ShapeDtypeStruct(shape=(2,), dtype=dtype('int32'))",),
        ("key<",),
    ),
    "MaskedTensor": (
        lambda: HOLES,
        "MaskedTensor([1.0, --, 3.0], dtype=float32)",
        ("MaskedTensor(", "data=", "mask=", "[ True, False,  True]"),
        ("object at",),
    ),
    "MaskedTensor of rows": (
        lambda: jmask.masked_tensor(jmask.RowSparse([2], [5.0], (9,)), None),
        "MaskedTensor(row_sparse, float32[9], nse=1, values=[5.0])",
        ("data=RowSparse(", "[2]", "mask="),
        ("object at",),
    ),
    "PackedTable": (
        lambda: jmask.packed(TABLE, platform="tpu"),
        "PackedTable(float32[1000, 16])",
        ("PackedTable(", "shape=(1000, 16)", "float32(125, 128)"),
        ("phantom", "object at"),
    ),
    "ShardedTable": (
        sharded,
        "ShardedTable(float32[1000, 16])",
        ("ShardedTable(", "shape=(1000, 16)", "float32(1000, 16)"),
        ("phantom", "object at"),
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_rendering(name):
    make, short, words, others = SHOWN[name]
    x = make()
    text = treescope.render_to_text({"x": x})
    assert repr(x) == short
    for word in words:
        assert word in text, text
    for word in others:
        assert word not in text, text
    assert type(x).__name__ in treescope.render_to_html(x, compressed=False)


@pytest.mark.parametrize("name", SHOWN)
def test_nodes_without_arrays(name):
    """Transformations put anything into the leaves of a pytree; printing them never raises."""
    for leaf in (None, 0, "sum"):
        node = jax.tree.map(lambda _, leaf=leaf: leaf, SHOWN[name][0]())
        assert str(leaf) in treescope.render_to_text(node)


def test_while_traced():
    seen = []
    jax.jit(lambda *x: seen.append(treescope.render_to_text(x)))(ROWS, HOLES)
    assert "int32[2]" in seen[0]
    assert "bool[3]" in seen[0]


def test_figures_leave_masked_entries_out():
    treescope.render_to_text(HOLES)  # loads how it reads arrays of JAX
    adapter = HOLES.__treescope_ndarray_adapter__()
    data, mask = adapter.get_array_data_with_truncation(HOLES, None, (None,))
    np.testing.assert_array_equal(data, [1.0, np.nan, 3.0])
    np.testing.assert_array_equal(mask, [True, False, True])
    _, mask = adapter.get_array_data_with_truncation(HOLES, jnp.arange(3) > 0, (None,))
    np.testing.assert_array_equal(mask, [False, False, True])
    with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
        page = treescope.render_to_html((HOLES, ROWS, sharded()), compressed=False)
    assert "MaskedTensor float32(3)" in page


def test_sparse_storage_has_no_figure():
    rows = jmask.masked_tensor(ROWS, None)
    assert rows.__treescope_ndarray_adapter__() is None
    with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
        assert "RowSparse" in treescope.render_to_html(rows, compressed=False)
