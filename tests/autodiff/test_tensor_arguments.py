"""Functions of tensors: traced once, and no zeros of their size where none are read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.sparse_arrays import coo

DENSE = np.array([[0.0, 3.0], [4.0, 0.0]], np.float32)
TENSORS = {
    "BCOO": coo(DENSE),
    "RowSparse": jmask.RowSparse([1], [[4.0, 0.0]], (2, 2), coalesced=True),
    "masked": jmask.masked_tensor(DENSE, DENSE > 0),
}
# What the function reads, and whether entries that are not stored count.
READ: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "stored entries": (lambda x: jmask.todense(x, masked_grad=True), False),
    "all entries": (jmask.todense, True),
}


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("name", TENSORS)
def test_traced_once(name: str, read: str) -> None:
    function, all_count = READ[read]
    calls: list[Any] = []

    def loss(x: Any) -> Any:
        calls.append(x)
        return jnp.sum(function(x) ** 2)

    x = TENSORS[name]
    gradient = jmask.grad(loss)(x)
    assert len(calls) == 1
    assert isinstance(gradient, jax.Array) == all_count
    expected = 2 * np.asarray(jmask.todense(x))
    np.testing.assert_array_equal(jmask.todense(gradient), expected)


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("name", TENSORS)
def test_what_is_returned_beside_the_loss_is_the_tensor(name: str) -> None:
    x = TENSORS[name]
    (_, aux), _ = jmask.value_and_grad(lambda x: (jnp.sum(jmask.todense(x)), x), has_aux=True)(
        x
    )
    assert type(aux) is type(x)
    assert jax.tree.structure(aux) == jax.tree.structure(x)


@pytest.mark.parametrize("rows", [10**3, 10**7])
def test_no_array_of_the_size_of_the_tensor(rows: int) -> None:
    """10⁷ rows of 16 would be 640 MB: the program has nothing but the stored rows."""

    def gradient(ids: jax.Array, values: jax.Array) -> Any:
        x = jmask.RowSparse(ids, values, (rows, 16))
        return jmask.grad(lambda x: jnp.sum((x * 2).values ** 2))(x).values

    compiled = jax.jit(gradient).lower(jnp.arange(4), jnp.ones((4, 16))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1e5
