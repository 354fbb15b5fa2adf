"""Names for the types of arguments, for annotations that say more than `Any`.

`optax.Params`, `optax.Updates` and `optax.OptState` are trees of plain arrays. The ones here
have tensors and tables as leaves, and models as nodes.

The classes of tensors and tables are in sub-packages that import this one, and code tells them
apart by functions (`is_row_sparse`), from which a type checker learns what a value is and not
what it is not. Such names are `Any` to it, and the docstrings say what they hold.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend.core import Literal, Var
from jax.tree_util import PyTreeDef as PyTreeDef
from jax.typing import ArrayLike

# --- arrays -------------------------------------------------------------------------------

Shape = tuple[int, ...]
"""Sizes of dimensions, static."""
Axis = int | Sequence[int] | None
"""Axes to reduce; None is all of them."""
Scalar = float | np.number | jax.Array
"""A number of Python or NumPy, or an array of no dimensions, which may be traced."""
Index = int | jax.Array
"""The number of a row, a block or a step, which may be traced."""
Numbers = ArrayLike | Sequence[Any]
"""An array, a number, or nested lists of them."""
HostArray = np.ndarray[Any, Any]
"""An array of NumPy: its numbers are known while a program is traced."""
MaskedHostArray = np.ma.MaskedArray[Any, Any]
"""An array of `numpy.ma`."""
DType = np.dtype[Any]
"""The dtype of an array."""


class Shaped(Protocol):
    """An array, a tensor, a table, or the abstract value of one."""

    @property
    def shape(self) -> Shape: ...

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> Any: ...


IndexLike = Any
"""As NumPy takes it: an integer, a slice, None, an array, or a tuple of these."""
MeshAxes = str | tuple[str, ...] | None
"""Axes of a mesh that shard a dimension; None is no axis."""

# --- tensors and tables ---------------------------------------------------------------------

Tensor = Any
"""An array, a RowSparse, BCOO, BCSR or MaskedTensor."""
Storage = Any
"""An array, a RowSparse, BCOO or BCSR."""
Sparse = Any
"""A RowSparse, BCOO or BCSR."""
TensorLike = Any
"""What becomes a Tensor: one, or Numbers."""
Mask = Any
"""Booleans, on the storage of what they mask or on a dense one."""
Table = Any
"""An array (V, *row); in a lookup, a RowSparse, too."""
Ids = Any
"""Integers: an array of JAX or NumPy, or nested lists of them."""
Ragged = Any
"""Numbers of NumPy, or a list of bags of them; a mapping of such, for several tables."""
Gradient = Any
"""An array, a RowSparse, or a MaskedTensor of either; None of no parameter."""

# --- trees ----------------------------------------------------------------------------------

PyTree = Any
"""A tree; its leaves are whatever the function says."""
Params = Any
"""A tree of arrays and tables, or a model that holds them."""
Gradients = Any
"""A tree of Gradient, of the structure of the parameters."""
OptState = Any
"""The state of a transformation of optax."""
Static = tuple[Any, ...]
"""What a node of a tree keeps beside its children: hashable."""
Key = Any
"""A key of a mapping: hashable."""
KeyPath = tuple[Any, ...]
"""Where a leaf is in a tree, as `jax.tree.leaves_with_path` writes it."""

# --- functions ------------------------------------------------------------------------------

Argument = Any
"""An argument that is passed on to another function as it came."""
Options = dict[str, Any]
"""Arguments by name, passed on to another function."""
Argnums = Any
"""A position, an `nnx.DiffState`, or a sequence of them."""
Function = Callable[..., Any]
"""A function whose arguments and result are said where it is taken."""
ArrayFunction = Callable[..., jax.Array]
"""A function of arrays, with one result."""
ArraysFunction = Callable[..., Sequence[jax.Array]]
"""A function of arrays, with several results."""

# --- programs -------------------------------------------------------------------------------

Atom = Var | Literal
"""An operand or result of an equation of a jaxpr."""
LoweringContext = Any
"""What JAX gives to a lowering rule first: its `avals_in` have a shape, which no type says."""
JvpArgs = tuple[Any, ...]
"""Primals, or tangents, as `jax.custom_jvp` gives them to a rule."""
Value = Any
"""The value of a variable in an interpreted program: an array, or what stands for one."""
Coefficient = Any
"""A number that is known, or an array of no dimensions or (W,); None where there is none."""
