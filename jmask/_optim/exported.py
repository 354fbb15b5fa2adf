"""Steps as files: `jax.export` of functions that take masked tensors and optimizer states.

A file holds the structure of arguments and results. What is static in a node is written there
as the text of Python literals, which can be read without running any code.
"""

import ast

from jax import export

from jmask._base.types import Argument
from jmask._deferred import deferred
from jmask._optim import adam, ema, guards, microbatches, named, touched
from jmask._tables.quantized import QuantizedRows
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import RowSparse


def _refuse(static: Argument) -> Argument:
    raise TypeError(
        "jax.export cannot serialize a function that takes or returns a row-sparse tensor "
        "(RowSparse), whose ids have a dtype of their own: pass jmask.to_arrays(x) and call "
        "jmask.from_arrays(arrays, like=x) inside, and of a step return what "
        "jmask.apply_gradients does."
    )


_literal = lambda static: repr(static).encode(), lambda text: ast.literal_eval(text.decode())
_KINDS: dict[type, Argument] = {
    MaskedTensor: _literal,
    QuantizedRows: _literal,
    RowSparse: (_refuse, _refuse),
}
for _kind, (_write, _read) in _KINDS.items():
    export.register_pytree_node_serialization(
        _kind,
        serialized_name=f"jmask.{_kind.__name__}",
        serialize_auxdata=_write,
        deserialize_auxdata=_read,
    )
for _module in (adam, deferred, ema, guards, microbatches, named, touched):
    for _state in vars(_module).values():
        if getattr(_state, "__module__", None) == _module.__name__ and hasattr(
            _state, "_fields"
        ):
            export.register_namedtuple_serialization(
                _state, serialized_name=f"jmask.{_state.__name__}"
            )
