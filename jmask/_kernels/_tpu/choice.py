"""Choose which row updates run as the kernel of `row_updates`; XLA does the others.

float32[V, 128], ids int32, p - lr * g       the kernel
bfloat16[V, 128], new rows to be written     the kernel, by pairs of rows
float32[V, 64]                               XLA's scatters
p - lr * cbrt(g)                             XLA's scatters: Pallas does not lower `cbrt`

All is decided where a program is lowered, by the shapes, the operations and the switch
`JMASK_KERNELS` (see `switched_on`).
"""

import functools
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.typing import DTypeLike

from jmask._base.array_types import is_known
from jmask._base.fallback import LARGE
from jmask._base.forms import CALLS, aval_of, name_of, names_in
from jmask._base.jaxprs import ON_SCALARS, bound, inlined, interpret
from jmask._base.lowering import switched_on
from jmask._base.types import IdVector, Shaped, TableArray
from jmask._kernels import tuning
from jmask._kernels._tpu.row_updates import block_size
from jmask._kernels.lines import LANES, has_narrow_rows

_WORDS = {jnp.dtype(x) for x in ("float32", "int32", "uint32")}
_GIVEN = {*_WORDS, jnp.dtype("bfloat16")}
_COMPUTED = {*_GIVEN, jnp.dtype(bool)}
# Pallas lowers the others for all generations (jax 0.12); tests/accelerators compile each.
_LOWERED = ON_SCALARS - {"cbrt", "expm1"}


@functools.cache
def _warn_of_copies(shape: tuple[int, ...], dtype: DTypeLike) -> None:
    warnings.warn(
        f"on a TPU a step copies a table {dtype}{list(shape)} or keeps it transposed: its rows "
        "are not lines of 128 entries. `jmask.packed(table)` keeps them in such lines.",
        stacklevel=2,
    )


def warn_if_copied(table: TableArray) -> None:
    """Warn, once for each shape, of a large table whose rows are not whole lines."""
    if has_narrow_rows(table.shape) and table.size * table.dtype.itemsize >= LARGE:
        _warn_of_copies(table.shape, table.dtype)


def sorted_pays(table: Shaped, ids: Shaped) -> bool:
    """Decide whether a TPU gains by the promise of sorted ids."""
    rows, count = table.shape[0], ids.shape[0]
    return is_known(rows, count) and rows <= tuning.SORTED_PAYS * count


def accepts(
    tables: Sequence[Shaped],
    ids: IdVector,
    rows: Sequence[jax.Array],
    scalars: Sequence[jax.Array] = (),
    program: Jaxpr | None = None,
) -> bool:
    """Decide whether the kernel can be used, by the switch, the shapes and the arithmetic.

    `program` is the arithmetic on single entries; None if it is an addition or a copy.
    """
    return (
        _fits(tables[0], ids, len(tables) + len(rows))
        and all(x.dtype in _WORDS for x in tables)
        and all(x.dtype in _GIVEN for x in (*rows, *scalars))
        and (program is None or _is_lowered(program))
    )


def accepts_pairs(table: Shaped, ids: IdVector) -> bool:
    """Decide whether rows of a 16-bit table can be written by the kernel, in pairs."""
    is_pairs = table.dtype in (jnp.bfloat16, jnp.float16) and table.shape[0] % 2 == 0
    return is_pairs and _fits(table, ids, 3)


def _fits(table: Shaped, ids: IdVector, arrays: int) -> bool:
    return (
        switched_on()
        # Mosaic (JAX 0.12) lowers Python numbers to 64 bits then, which do not fit int32 ids.
        and not jax.config.read("jax_enable_x64")
        # XLA keeps other widths transposed or padded, and would copy the table for the kernel.
        and table.ndim == 2
        and table.shape[1] % LANES == 0
        and ids.dtype == jnp.int32
        and is_known(*ids.shape)
        and ids.shape[0] > 0
        and block_size(arrays, table.shape[1], ids.shape[0]) > 0
    )


def _is_lowered(program: Jaxpr) -> bool:
    """Decide whether Pallas lowers all equations for all generations of TPUs."""
    variables = (v for eqn in inlined(ClosedJaxpr(program, ())).jaxpr.eqns for v in eqn.outvars)
    return (
        not program.effects
        and names_in(program) <= _LOWERED.union(CALLS)
        and all(aval_of(v).dtype in _COMPUTED for v in variables)
    )


def evaluate(program: ClosedJaxpr, *entries: jax.Array) -> list[jax.Array]:
    """Return the outputs of a program that `accepts` took, in operations that Pallas lowers."""
    program = inlined(program)
    return interpret(program.jaxpr, program.consts, entries, _lowered)


def _lowered(eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
    if name_of(eqn) != "sign":
        return bound(eqn, inputs)
    # Pallas asks which chip it is on, and ahead of time there is none.
    (x,) = inputs
    one = jnp.ones((), x.dtype)
    return [jnp.where(x > 0, one, jnp.where(x < 0, -one, x))]


def is_used(program: Jaxpr, i: int) -> bool:
    """Decide whether a program depends on its input number `i`."""
    used = (v for eqn in program.eqns for v in eqn.invars)
    return any(v is program.invars[i] for v in (*used, *program.outvars))
