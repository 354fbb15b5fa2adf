"""Steps as files: `jax.export` of functions that take tables, tensors and optimizer states.

A file holds the structure of arguments and results. What is static in a node is written there
as the text of Python literals, which can be read without running any code.
"""

import ast
from collections.abc import Callable
from typing import Any

from jax import export

from jmask._deferred import deferred
from jmask._optim import adam, ema, guards, microbatches, named
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import RowSparse

Convert = Callable[[Any], Any]


def _refuse(static: tuple[Any, ...]) -> Any:
    raise TypeError(
        "jax.export cannot serialize a function that takes or returns a row-sparse tensor "
        "(RowSparse), whose ids have a dtype of their own: pass jmask.to_arrays(x) and call "
        "jmask.from_arrays(arrays, like=x) inside, and of a step return what "
        "jmask.apply_gradients does."
    )


# For each node, what its static part is written as, and read from.
_NODES: dict[type, tuple[Convert, Convert]] = {
    MaskedTensor: (lambda x: x, lambda x: x),
    RowSparse: (_refuse, _refuse),
}

for _kind, (_write, _read) in _NODES.items():
    export.register_pytree_node_serialization(
        _kind,
        serialized_name=f"jmask.{_kind.__name__}",
        serialize_auxdata=lambda x, write=_write: repr(write(x)).encode(),
        deserialize_auxdata=lambda text, read=_read: read(ast.literal_eval(text.decode())),
    )

for _module in (adam, deferred, ema, guards, microbatches, named):
    for _kind in vars(_module).values():
        if getattr(_kind, "__module__", None) == _module.__name__ and hasattr(_kind, "_fields"):
            export.register_namedtuple_serialization(
                _kind, serialized_name=f"jmask.{_kind.__name__}"
            )
