"""What it means when a plain optax transformation fails on row-sparse gradients.

    multiply does not accept dtypes float32, key<row ids: ...>     optax.sgd(0.1)
    a row-sparse gradient (RowSparse) is no array: ...             optax.adam(0.1)

Optax maps arithmetic over the leaves of a gradient, and the ids of a `RowSparse` refuse it
(see `_base.row_ids`). Where jmask calls the transformation, the error says what to do instead.
"""

import contextlib
from collections.abc import Iterator
from types import TracebackType
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
        if _labels_by_function(error.__traceback__):
            raise TypeError(
                f"`{name}` holds optax.partition or optax.masked with a function of labels, "
                "which optax calls with the gradients, row-sparse ones too: give it the tree, "
                "optax.partition(transforms, labels(params)), or put it inside jmask.lazy."
            ) from error
        raise TypeError(
            f"`{name}` holds a transformation of optax that cannot take row-sparse gradients: "
            "put it inside jmask.lazy, as in jmask.lazy(optax.adam(1e-3)), with all that is "
            "chained to it."
        ) from error


def _labels_by_function(traceback: TracebackType | None) -> bool:
    """Whether an error comes from what a function of labels, or of a mask, has led to."""
    while traceback is not None:
        frame = traceback.tb_frame
        if str(frame.f_globals.get("__name__")).startswith("optax."):
            labels = (frame.f_locals.get(name) for name in ("param_labels", "mask"))
            if any(callable(x) for x in labels) and frame.f_code.co_name in _BY_FUNCTION:
                return True
        traceback = traceback.tb_next
    return False


# Functions of optax that call a function of labels with the gradients.
_BY_FUNCTION = ("update_fn", "init_fn")
