"""Names for the types of arguments and results.

Three names are `Any` to a type checker: a tree, a function of the user's, and what is handed
over as it came. All others are unions and protocols that it checks. Classes of sub-packages
that import this one are named in strings, and imported for the checker alone.
"""

from collections.abc import Callable, Hashable, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Union

import jax
import numpy as np
from jax.experimental.sparse import BCOO, BCSR
from jax.extend.core import Literal, Var
from jax.tree_util import PyTreeDef as PyTreeDef
from jax.typing import ArrayLike

if TYPE_CHECKING:
    from typing_extensions import TypeIs as TypeIs

    from jmask._tensors.masked_tensor import MaskedTensor
    from jmask._tensors.row_sparse import RowSparse
else:  # `typing.TypeIs` is of Python 3.13; only a checker sees the difference
    from typing import TypeGuard as TypeIs  # noqa: F401

# --- what has no type ---------------------------------------------------------------------

PyTree = Any
"""A tree of arrays and tensors, or a model that holds them; a state of optax is one."""
Argument = Any
"""What is passed on unchanged: an argument of the user's, an operand, a parameter."""
Function = Callable[..., Any]
"""A function of the user's, or of JAX, whose arguments are said where it is taken."""

# --- arrays -------------------------------------------------------------------------------

Shape = tuple[int, ...]
"""Sizes of dimensions, static."""
Axis = int | Sequence[int] | None
"""Axes to reduce; None is all of them."""
Scalar = float | np.number | jax.Array
"""A number of Python or NumPy, or an array of no dimensions, which may be traced."""
Index = int | jax.Array
"""The number of a row, a block or a step, which may be traced."""
Arrays = tuple[jax.Array, ...]
"""Several arrays: primals, tangents, operands."""
HostArray = np.ndarray
"""An array of NumPy: its numbers are known while a program is traced."""
Ids = jax.Array | HostArray
"""Integers, of JAX or NumPy."""
TableArray = Annotated[jax.Array, "V *row"]
"""A table, or a block of one: V rows."""
IdVector = Annotated[jax.Array, "n"]
"""Canonical row ids of n entries; V, which is no row, is padding."""
IdArray = Annotated[jax.Array, "*n"]
"""Canonical row ids in any number of dimensions."""
RowArray = Annotated[jax.Array, "n *row"]
"""One row for each of n entries."""
LineArray = Annotated[jax.Array, "n 128"]
"""One line of packed rows for each of n entries."""
DType = np.dtype
"""The dtype of an array."""
_Lists = Sequence[ArrayLike] | Sequence[Sequence[ArrayLike]]
Numbers = ArrayLike | _Lists | Sequence[_Lists]
"""An array, a number, or lists of them, nested up to three times."""
_IndexPart = int | slice | EllipsisType | ArrayLike | Sequence[int] | Sequence[bool] | None
IndexLike = _IndexPart | tuple[_IndexPart, ...]
"""As NumPy takes it: an integer, a slice, None, an array, or a tuple of these."""
MeshAxes = str | tuple[str, ...] | None
"""Axes of a mesh that shard a dimension; None is no axis."""


class Shaped(Protocol):
    """An array, a tensor, a table, or the abstract value of one."""

    @property
    def shape(self) -> Shape: ...

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> DType: ...


# --- tensors and tables ---------------------------------------------------------------------

Sparse = Union["RowSparse", BCOO, BCSR]
"""A tensor that stores some of its rows or entries; the others are zeros."""
Storage = jax.Array | Sparse
"""An array, or one that is sparse."""
StorageLike = Storage | Numbers
"""What becomes a Storage; a mask is one of booleans."""
Tensor = Union[Storage, "MaskedTensor"]
"""A storage, or a masked tensor on one."""
Dense = Union[jax.Array, "MaskedTensor"]
"""An array, or a masked tensor on one."""
TensorLike = Union[StorageLike, "MaskedTensor"]
"""What becomes a Tensor."""
Table = Union[jax.Array, "RowSparse"]
"""(V, *row), in a lookup."""
Gradient = Union[jax.Array, "RowSparse", "MaskedTensor"]
"""The gradient of an array: dense, of the rows looked up, or of the valid entries."""

# --- parts of trees, functions and programs -------------------------------------------------

KeyPath = tuple[Hashable, ...]
"""Where a leaf is in a tree, as `jax.tree.leaves_with_path` writes it."""
Options = dict[str, Argument]
"""Arguments by name, passed on to another function."""
ArrayFunction = Callable[..., jax.Array]
"""A function of arrays, with one result."""
ArraysFunction = Callable[..., Sequence[jax.Array]]
"""A function of arrays, with several results."""
Atom = Var | Literal
"""An operand or result of an equation of a jaxpr."""


class Transformation(Protocol):
    """A transformation of optax, or `jmask.deferred`, which has one more function."""

    @property
    def init(self) -> Function: ...

    @property
    def update(self) -> Function: ...
