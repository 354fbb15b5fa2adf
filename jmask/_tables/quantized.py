"""Tables in 8 or 4 bits for serving: each row in steps of its own.

    row [0.5, -1.27, 0]      int8       [50, -127, 0]  times  scale 0.01 = max |row| / 127

`embedding_lookup` and `embedding_bag` read them, and make floating numbers of the rows that are
looked up alone. Two numbers of 4 bits share a byte: JAX's own int4 arrays take a byte for each
number in NumPy, in files, and on CPUs up to jaxlib 0.10.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jmask._base.array_types import trailing, wide
from jmask._base.types import Argument, Arrays, DType, Numbers, PyTree, Shape
from jmask._base.validation import as_table, checked_choice, checked_dtype, leaf_name
from jmask._tensors.flax_state import register_in_flax

_LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}
_WAY_OUT = (
    "train the floating table, and call jmask.quantize_rows when it leaves for serving; one "
    "that is not trained is closed over, or an argument that is not differentiated"
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["kind", "row"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """A table in 8 or 4 bits, a pytree of arrays. Made by `quantize_rows`.

    Attributes:
        values (V, *row): int8 or float8_e4m3fn. For 4 bits uint8, each with two numbers along
            the last axis, the first of them in the lower half.
        scales (V,): what the values of a row are multiplied by.
        kind: "int8", "int4" or "float8_e4m3fn".
        row: the shape of a row.
    """

    values: jax.Array
    scales: jax.Array
    kind: str
    row: Shape

    def __post_init__(self) -> None:
        register_in_flax(QuantizedRows)

    @property
    def shape(self) -> Shape:
        """The shape (V, *row) of the table."""
        return (self.scales.shape[0], *self.row)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the table."""
        return 1 + len(self.row)

    @property
    def dtype(self) -> DType:
        """The dtype of the rows that are read: float32, or float64 of such a table."""
        return self.scales.dtype

    @property
    def nbytes(self) -> int:
        """How many bytes values and scales take."""
        return self.values.nbytes + self.scales.nbytes

    def dequantized(self, values: jax.Array, scales: jax.Array) -> jax.Array:
        """Return rows (..., *row) of what was read at (...)."""
        return _product(self.kind, self.row, values, scales)


def quantize_rows(table: Numbers, dtype: DTypeLike) -> QuantizedRows:
    """Return a table in 8 or 4 bits, with one scale for each row.

    Args:
        table (V, *row): floating, of one dimension more than a vector; it may be sharded.
        dtype: "int8", V (D + 4) bytes; "int4", V (D / 2 + 4) bytes; or "float8_e4m3fn",
            V (D + 4) bytes, for rows whose entries differ much in size. Or the dtype itself.

    Returns:
        A pytree of arrays, which `jmask.embedding_lookup` and `jmask.embedding_bag` take for a
        table. What they read differs from the table by half a step at most: of integers the
        scale of the row, max |row| / 127 or / 7; of float8 the distance of the two numbers
        around it, 1/8 of the power of two below. They read float32 (float64 of such a table).
        A row with nan or an infinity reads as nan. One with no entry above 1e-35 in float32 may
        read as 0: its scale is a subnormal number, which XLA takes for 0.

    Raises:
        TypeError: if `table` is no array.
        ValueError: if it is not real and floating (V, *row), or `dtype` is none of these.

    References:
        Row-wise quantization as in FBGEMM; float8 of Micikevicius et al., "FP8 Formats for Deep
        Learning", 2022.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> served = jmask.quantize_rows(jnp.array([[0.5, -1.27, 0], [8., 2., 127.]]), "int8")
        >>> served.values
        Array([[  50, -127,    0],
               [   8,    2,  127]], dtype=int8)
        >>> jmask.embedding_lookup(served, [1])
        Array([[  8.,   2., 127.]], dtype=float32)
    """
    name = dtype if isinstance(dtype, str) else checked_dtype("dtype", dtype).name
    kind = checked_choice("dtype", name, tuple(_LARGEST))
    array = as_table(table)
    has_rows = array.ndim > 1 and 0 not in array.shape[1:]
    if not has_rows or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            "`table` must be real and floating (V, *row), got "
            f"{array.dtype}{list(array.shape)}."
        )
    exact, most = array.astype(wide(array.dtype)), _LARGEST[kind]
    along = tuple(range(1, array.ndim))
    # Of each entry: XLA for CPUs loses a nan in the maximum, see `_ops.reduce`.
    is_finite = jnp.all(jnp.isfinite(exact), along)
    scales = jnp.where(is_finite, jnp.max(jnp.abs(exact), along) / most, jnp.nan)
    steps = exact / trailing(jnp.where(scales > 0, scales, 1), array.ndim)
    steps = jnp.clip(jnp.where(jnp.isfinite(steps), steps, 0), -most, most)
    row = array.shape[1:]
    if kind == "float8_e4m3fn":
        return QuantizedRows(steps.astype(jnp.float8_e4m3fn), scales, kind, row)
    values = jnp.round(steps).astype(jnp.int8)
    if kind == "int4":
        bits = jax.lax.bitcast_convert_type(values, jnp.uint8) & 15
        bits = jnp.pad(bits, [(0, 0)] * len(row) + [(0, row[-1] % 2)])
        pairs = bits.reshape(*bits.shape[:-1], bits.shape[-1] // 2, 2)
        values = pairs[..., 0] | (pairs[..., 1] << 4)
    return QuantizedRows(values, scales, kind, row)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(kind: str, row: Shape, values: jax.Array, scales: jax.Array) -> jax.Array:
    if kind == "int4":
        low, high = (jax.lax.bitcast_convert_type(x, jnp.int8) for x in (values << 4, values))
        values = jnp.stack([low >> 4, high >> 4], -1)
        values = values.reshape(*values.shape[:-2], 2 * values.shape[-2])[..., : row[-1]]
    return values.astype(scales.dtype) * scales.reshape(scales.shape + (1,) * len(row))


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _product_jvp(kind: str, row: Shape, primals: Arrays, tangents: Arrays) -> Argument:
    if not all(isinstance(x, SymbolicZero) for x in tangents):
        raise TypeError(f"a quantized table has no gradient: {_WAY_OUT}.")
    rows = _product(kind, row, *primals)
    return rows, SymbolicZero(jax.typeof(rows))


def refuse_quantized(tree: PyTree) -> None:
    """Refuse a quantized table whose arrays are among what is differentiated."""
    is_one = lambda x: isinstance(x, QuantizedRows) and bool(jax.tree.leaves(x))
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_one):
        if is_one(x):
            name = leaf_name("params", path)
            raise TypeError(f"{name} is a quantized table, which has no gradient: {_WAY_OUT}.")
