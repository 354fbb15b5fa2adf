"""Steps as files: `jax.export` of functions that take tables, tensors and optimizer states.

    exported = jax.export.export(jax.jit(step))(params, opt_state, batch)
    exported.serialize()

A file holds the structure of arguments and results, so JAX has to know how to write what is
static in each type of node. Here it is the text of Python literals, which can be read without
running any code.
"""

import ast
import dataclasses
from collections.abc import Callable
from typing import Any

from jax import export

from jmask._deferred.closed_form import Form
from jmask._deferred.table import DeferredTable
from jmask._optim.adam import AdamState, RowCountAdamState
from jmask._optim.ema import EmaState
from jmask._optim.guards import DropNonfiniteState, SkipNonfiniteState
from jmask._optim.microbatches import MultiStepsState, StoredEntries, StoredRows
from jmask._optim.named import AdagradState, FtrlState, MomentumState, SgdState
from jmask._tables.packed import PackedTable
from jmask._tables.shard_layout import Layout
from jmask._tables.sharded import RoutedRows, ShardedTable
from jmask._tables.stored_table import NewTable
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import RowSparse

_STATES = (
    AdagradState,
    AdamState,
    DropNonfiniteState,
    EmaState,
    FtrlState,
    MomentumState,
    MultiStepsState,
    RowCountAdamState,
    SgdState,
    SkipNonfiniteState,
    StoredEntries,
    StoredRows,
)


def _register(
    kind: type, to_literals: Callable[[Any], Any], from_literals: Callable[[Any], Any]
) -> None:
    export.register_pytree_node_serialization(
        kind,
        serialized_name=f"jmask.{kind.__name__}",
        serialize_auxdata=lambda static: repr(to_literals(static)).encode(),
        deserialize_auxdata=lambda text: from_literals(ast.literal_eval(text.decode())),
    )


def _unchanged(static: tuple[Any, ...]) -> Any:
    return static


def _deferred_to_literals(static: tuple[Any, ...]) -> Any:
    shape, apart, form, made_for = static
    return shape, apart, None if form is None else dataclasses.astuple(form), made_for


def _deferred_from_literals(literals: tuple[Any, ...]) -> Any:
    shape, apart, form, made_for = literals
    return shape, apart, None if form is None else Form(*form), made_for


def _refuse(static: tuple[Any, ...]) -> Any:
    raise TypeError(
        "jax.export cannot serialize a function that takes or returns a row-sparse tensor "
        "(RowSparse), whose ids have a dtype of their own: pass jmask.to_arrays(x) and call "
        "jmask.from_arrays(arrays, like=x) inside, and of a step return what "
        "jmask.apply_gradients does."
    )


_register(MaskedTensor, _unchanged, _unchanged)
_register(PackedTable, _unchanged, _unchanged)
_register(
    ShardedTable,
    lambda static: (static[0].described(), static[1]),
    lambda literals: (Layout.from_description(literals[0]), literals[1]),
)
_register(DeferredTable, _deferred_to_literals, _deferred_from_literals)
for _kind in (RowSparse, RoutedRows, NewTable):
    _register(_kind, _refuse, _unchanged)
for _state in _STATES:
    export.register_namedtuple_serialization(_state, serialized_name=f"jmask.{_state.__name__}")
