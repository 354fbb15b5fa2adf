"""What is printed of tensors and tables, short and long, and that printing never raises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.sparse_arrays import coo, csr

masked = jmask.masked_tensor
EYE = jnp.array([[0.0, 3, 0, 0], [4, 0, 0, 5]])
made = lambda code: eval(code, globals() | {"coo": coo, "csr": csr})
PRINTED = """
    masked(jnp.array([1.0, jnp.nan, 3.0]), [True, False, True]) -> [1.0, --, 3.0], dtype=float32
    masked(3.0) -> 3.0, dtype=float32
    masked(3.0, False) -> --, dtype=float32
    masked(jnp.zeros(0)) -> [], dtype=float32
    masked(jnp.zeros((0, 3), int)) -> [], shape=(0, 3), dtype=int32
    masked(jnp.array([True, False]), [False, True]) -> [--, False], dtype=bool
    masked(jnp.array([1 + 2j, 0]), [True, False]) -> [(1+2j), --], dtype=complex64
    masked(jnp.array([1, 1.5, 0], jnp.bfloat16)) -> [1.0, 1.5, 0.0], dtype=bfloat16
    masked(jnp.array([1, 0], jnp.float16), [True, False]) -> [1.0, --], dtype=float16
    masked(jnp.array([jnp.nan, -jnp.inf, 1e30])) -> [nan, -inf, 1e+30], dtype=float32
    masked(coo(EYE), TWO) -> coo, float32[2, 4], nse=3, values=[3.0, --, 5.0]
    masked(csr(EYE)) -> csr, float32[2, 4], nse=3, values=[3.0, 4.0, 5.0]
    slope(masked(EYE[1, 1:], TWO)) -> [0.0, 0.0, 10.0], dtype=float32
    jax.jit(slope)(masked(EYE[1, 1:], TWO)) -> [0.0, 0.0, 10.0], dtype=float32
    jax.jit(slope)(masked(coo(EYE), TWO)) -> coo, float32[2, 4], nse=3, values=[6.0, 0.0, 10.0]
    masked(coo(0 * EYE)) -> coo, float32[2, 4], nse=0, values=[]
"""
TWO = jnp.array([True, False, True])
# JAX's gradient, in which the booleans of the mask have a dtype without values.
slope = jax.grad(lambda x: (x * x).to_tensor(0).sum(), allow_int=True)


@pytest.mark.parametrize("line", PRINTED.strip().splitlines())
def test_one_line(line):
    code, text = line.split(" -> ")
    x = made(code.strip())
    assert repr(x) == str(x) == f"MaskedTensor({text})"


def test_lines_are_aligned():
    x = masked(jnp.arange(6.0).reshape(2, 3) * 7, [True, False, True])
    assert repr(x).splitlines() == [
        "MaskedTensor([[ 0.0,   --, 14.0],",
        "              [21.0,   --, 35.0]], dtype=float32)",
    ]
    assert repr(masked(jnp.arange(8).reshape(2, 2, 2))).splitlines() == [
        "MaskedTensor([[[0, 1],",
        "               [2, 3]],",
        "",
        "              [[4, 5],",
        "               [6, 7]]], dtype=int32)",
    ]
    rows = jmask.RowSparse([1, 4], jnp.ones((2, 2)), (4, 2))  # the second is padding
    assert repr(masked(rows)).splitlines() == [
        "MaskedTensor(row_sparse, float32[4, 2], nse=2, values=[[1.0, 1.0],",
        "                                                       [ --,  --]])",
    ]


@pytest.mark.rank_promotion
def test_large_tensors_are_summarised():
    assert repr(masked(jnp.arange(5000))) == (
        "MaskedTensor([0, 1, 2, ..., 4997, 4998, 4999], dtype=int32)"
    )
    assert repr(masked(np.arange(5000))).count(",") == 7
    x = jmask.numpy.masked_where(jnp.arange(100) == 0, jnp.arange(5000).reshape(50, 100))
    assert repr(x).splitlines() == [
        "MaskedTensor([[  --,    1,    2, ...,   97,   98,   99],",
        "              [  --,  101,  102, ...,  197,  198,  199],",
        "              [  --,  201,  202, ...,  297,  298,  299],",
        "              ...,",
        "              [  --, 4701, 4702, ..., 4797, 4798, 4799],",
        "              [  --, 4801, 4802, ..., 4897, 4898, 4899],",
        "              [  --, 4901, 4902, ..., 4997, 4998, 4999]], dtype=int32)",
    ]
    with np.printoptions(threshold=2, edgeitems=1):
        assert repr(masked(jnp.arange(4))) == "MaskedTensor([0, ..., 3], dtype=int32)"
    with np.printoptions(threshold=2, edgeitems=0):
        assert "MaskedTensor" in repr(masked(jnp.arange(4)))


def test_only_the_edges_are_read(monkeypatch):
    x = masked(jnp.zeros((1000, 1000)))
    sizes, asarray = [], np.asarray

    def counting(a, *dtype, **options):
        sizes.append(a.size)
        return asarray(a, *dtype, **options)

    monkeypatch.setattr(np, "asarray", counting)
    assert "..." in repr(x)
    assert sizes
    assert max(sizes) <= 49


TABLE = jnp.ones((1000, 16))
ROWS = jmask.RowSparse([1, 3], jnp.ones((2, 2)), (6, 2))
HOLES = jmask.masked_tensor(jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True]))


STACK = jax.vmap(lambda v: jmask.RowSparse([4], v, (6, 2)))(jnp.ones((3, 1, 2)))
ROW, MATRIX = jmask.RowSparse([2], [5.0], (9,)), np.float32([[0, 5]])
SHOWN = """
    ROWS -> RowSparse(float32[6, 2], nse=2)
    STACK -> RowSparse(float32[6, 2], nse=1, batch=(3,))
    jax.eval_shape(lambda: ROWS) -> RowSparse(float32[6, 2], nse=2)
    HOLES -> MaskedTensor([1.0, --, 3.0], dtype=float32)
    masked(ROW, None) -> MaskedTensor(row_sparse, float32[9], nse=1, values=[5.0])
    masked(csr(MATRIX)) -> MaskedTensor(csr, float32[1, 2], nse=1, values=[5.0])
"""


@pytest.mark.parametrize(
    ("code", "shown"), [line.strip().split(" -> ") for line in SHOWN.strip().splitlines()]
)
def test_nodes_without_arrays(code, shown):
    """Transformations put anything into the leaves of a pytree; printing them never raises."""
    x, seen = made(code), []
    jax.eval_shape(lambda x: seen.append(repr(x)), x)
    seen.append(repr(jax.eval_shape(lambda x: x, x)))
    without = shown.replace("[1.0, --, 3.0], dtype=float32", "float32[3]")
    assert set(seen) == {without.replace(", values=[5.0]", "")}
    jax.jit(lambda: seen.append(repr(x)))()
    assert seen[-1] == shown  # what is not traced
    jax.vmap(lambda x: seen.append(repr(x)), axis_size=3, in_axes=None)(x)
    others = [lambda leaf, y=y: y for y in (None, 0, "spec", object(), (), {"a": 1})]
    for function in (*others, lambda leaf: jnp.stack([leaf, leaf])):
        if "ShapeDtypeStruct" not in str(jax.tree.leaves(x)) or function in others:
            assert type(x).__name__ in repr(jax.tree.map(function, x))
