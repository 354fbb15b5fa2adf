"""What it means when a plain optax transformation fails on row-sparse gradients.

    multiply does not accept dtypes float32, key<row ids: ...>     optax.sgd(0.1)
    a row-sparse gradient (RowSparse) is no array: ...             optax.adam(0.1)

Optax maps arithmetic over the leaves of a gradient, and the ids of a `RowSparse` refuse it
(see `_base.row_ids`). Where jmask calls the transformation, the error says what to do instead.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jmask._tensors.row_sparse import is_row_sparse
from jmask._updates.checks import naming_structures

_SIGNS = (
    "RowSparse",
    ".masked_tensor.MaskedTensor",
    "key<row ids",
    "Cannot call abstract method",
)


@contextlib.contextmanager
def advising_lazy(name: str, gradients: Any, params: Any = None) -> Iterator[None]:
    """Context in which the transformation called `name` gets gradients.

    Raises:
        TypeError: in place of what arithmetic on row ids raises.
        ValueError: in place of JAX's, for gradients of another structure than parameters.
    """
    try:
        with naming_structures(gradients, params):
            yield
    except (TypeError, ValueError, NotImplementedError) as error:
        is_about_rows = any(sign in str(error) for sign in _SIGNS)
        if not is_about_rows or not any(
            map(is_row_sparse, jax.tree.leaves(gradients, is_leaf=is_row_sparse))
        ):
            raise
        raise TypeError(
            f"`{name}` holds a transformation of optax that cannot take row-sparse gradients: "
            "put it inside jmask.lazy, as in jmask.lazy(optax.adam(1e-3)), with all that is "
            "chained to it."
        ) from error
