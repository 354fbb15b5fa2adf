"""Explain what a training step does to each parameter, before it is run.

    parameter  array                   size     gradient            a step touches
    table      float32[1000000, 64]    256 MB   row-sparse, 32 rows 8.2 kB, 31,250x less
    w          float32[64, 1]          256 B    dense               256 B

The gradient program is traced with shapes, and nothing is computed or allocated. If a
table is looked up and has a dense gradient all the same, the report names the operation that
needs all of it, and its source line.
"""

import dataclasses
import math
import os
import sys
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import jax

from jmask._autodiff.taps import Tap
from jmask._autodiff.uses import Computed, reason
from jmask._autodiff.value_and_grad import LossProgram
from jmask._base.fallback import Place, collected, in_bytes
from jmask._base.types import DType, Function, KeyPath, PyTree, PyTreeDef, Shape
from jmask._base.validation import abstract_leaf, checked_choice
from jmask._kernels.lines import LANES, has_narrow_rows
from jmask._lazy.checks import model_of

PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")
# De-duplication is all that a lazy step adds.
MANY = (
    "as many rows as the table has: `jmask.densify()` in place of jmask.lazy would update all "
    "of them, at no more cost"
)
UNUSED = (
    "not used: a gradient of dense zeros, with which momentum and weight decay update all of "
    "it; leave it out of what is differentiated"
)
_HEADS = ("parameter", "array", "size", "gradient", "a step touches")


class ParameterStep(NamedTuple):
    """The effect of a step on one parameter."""

    name: str  # its path in the tree of parameters
    shape: Shape  # of it
    dtype: DType
    nse: int | None  # the number of rows of a row-sparse gradient, else None
    touched: int  # the bytes of the parameter that a step reads and writes, at most
    note: str  # why, where something is to be said; else ""
    leading: int  # how many leading dimensions number the rows, more than 1 of stacked tables

    @property
    def array(self) -> str:
        """Return what it is, `float32[1000, 64]`."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def nbytes(self) -> int:
        """Return what the parameter takes in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_sparse(self) -> bool:
        return self.nse is not None

    @property
    def factor(self) -> float:
        """Return the size of the parameter divided by what a step touches of it."""
        return self.nbytes / self.touched if self.touched else math.inf


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `jmask.explain`; shows itself as a table."""

    # One `ParameterStep` for each parameter, in the order of the tree.
    parameters: tuple[ParameterStep, ...]
    notes: tuple[str, ...]  # what else leaves sparse storage

    def __getitem__(self, name: str) -> ParameterStep:
        """Return the parameter of this name."""
        named = {p.name: p for p in self.parameters}
        if name not in named:
            raise KeyError(f"no parameter {name!r}; there are {', '.join(map(repr, named))}")
        return named[name]

    def __iter__(self) -> Iterator[str]:
        """Return the names of the parameters, as a dict does."""
        return iter([p.name for p in self.parameters])

    def __repr__(self) -> str:
        rows, notes = [_HEADS], [""]
        for p in self.parameters:
            gradient, touched = "dense", in_bytes(p.touched)
            if p.nse is not None:
                gradient = f"row-sparse, {p.nse:,} row{'s' * (p.nse != 1)}"
                touched += f", {p.factor:,.0f}x less" if p.touched else ""
            rows.append((p.name, p.array, in_bytes(p.nbytes), gradient, touched))
            notes.append(p.note)
        sums = (sum(getattr(p, x) for p in self.parameters) for x in ("nbytes", "touched"))
        size, touched = map(in_bytes, sums)
        rows.append(("total", "", size, "", touched))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row, note in zip(rows, [*notes, ""], strict=True):
            lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
            # Names and paths stay in one piece.
            wrapped = textwrap.wrap(note, 80, break_long_words=False, break_on_hyphens=False)
            lines += [f"    {line}" for line in wrapped]
        return "\n".join([*lines, *self.notes])


def explain(
    loss_fn: Function,
    params: PyTree,
    *batch: PyTree,
    has_aux: bool = False,
    platform: str | None = None,
    **kwargs: PyTree,
) -> Explanation:
    """Say of every parameter whether its gradient is row-sparse, what a step costs, and why.

    It is what `jmask.value_and_grad(loss_fn)(params, *batch)` would do, found from shapes
    alone. The report is printed, but in an interactive session, which shows the result.

    Args:
        loss_fn: a function returning a scalar, or (scalar, aux) with `has_aux`.
        params: its first argument, which is differentiated: a tree of floating arrays or
            their shapes.
        *batch: its other arguments: arrays, `jax.ShapeDtypeStruct`, or anything else.
        has_aux: whether `loss_fn` returns auxiliary data with the scalar.
        platform: "cpu", "gpu" or "tpu", on which the step will run; `jax.default_backend()` by
            default. For a TPU the result says which tables a step copies.
        **kwargs: its keyword arguments.

    Returns:
        An object with `.parameters`, one entry for each, with `.name`, `.shape`, `.dtype`,
        `.nbytes`, `.is_sparse`, `.nse` (rows of the gradient), `.touched` (bytes of the
        parameter that a step reads and writes), `.factor` (their ratio) and `.note`; and
        `.notes`, what else leaves sparse storage. `explanation[name]` is one parameter.

    Raises:
        TypeError: if `loss_fn` is no function or its result no scalar, or a parameter is not
            a dense floating array.
        ValueError: if `platform` is not known.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> def loss(params, ids):
        ...     return jnp.sum(params["table"][ids] @ params["w"])
        >>> shape = jax.ShapeDtypeStruct
        >>> params = {"table": shape((10**6, 64), "float32"), "w": shape((64, 1), "float32")}
        >>> found = jmask.explain(loss, params, shape((32,), "int32"))
        parameter  array                 size    gradient             a step touches
        table      float32[1000000, 64]  256 MB  row-sparse, 32 rows  8.2 kB, 31,250x less
        w          float32[64, 1]        256 B   dense                256 B
        total                            256 MB                       8.4 kB
        >>> found["table"].nse
        32
    """
    if not callable(loss_fn):
        raise TypeError(
            f"`loss_fn` must be a function, got {type(loss_fn).__name__}: write "
            "jmask.explain(loss_fn, params, *batch)."
        )
    model = model_of(params)
    platform = jax.default_backend() if platform is None else platform
    checked_choice("platform", platform, PLATFORMS)
    # Shapes become tracers; all else reaches the function as it is, as under value_and_grad.
    structure: PyTreeDef
    others, structure = jax.tree.flatten((batch, kwargs))
    shapes = {i: x for i, x in enumerate(others) if isinstance(x, jax.ShapeDtypeStruct)}
    steps: list[ParameterStep] = []

    def read(params: PyTree, traced: dict[int, jax.Array]) -> None:
        args, keywords = structure.unflatten([traced.get(i, x) for i, x in enumerate(others)])
        params_and_rest = model.with_parameters(params)
        models = {0: model_of(params_and_rest)}
        program = LossProgram(loss_fn, models, (params_and_rest, *args), keywords, has_aux)
        taps, computed = jax.tree.leaves(program.taps), Computed(program.jaxpr, program.needs)
        for i, (path, leaf) in enumerate(jax.tree.leaves_with_path(params)):
            taps_of_table = [x for x in taps if x.table == i] if i in program.tables else None
            why = reason(computed, i, math.inf)
            note = "" if why is None else _with_place(*why[:2])
            note = note if i in program.live else UNUSED
            steps.append(_step(path, leaf, taps_of_table, note, platform))

    with collected() as reports:
        jax.eval_shape(read, jax.tree.map(abstract_leaf, model.parameters), shapes)
    notes = [_with_place(report.message, report.place) for report in reports]
    explanation = Explanation(tuple(steps), tuple(dict.fromkeys(notes)))
    if not hasattr(sys, "ps1"):
        print(explanation)
    return explanation


def _step(
    path: KeyPath, leaf: jax.Array, taps: list[Tap] | None, note: str, platform: str
) -> ParameterStep:
    """Return the effect on a parameter, of whose gradient these are the taps; None: dense."""
    shape, dtype = leaf.shape, leaf.dtype
    nse, leading, table, touched = None, 1, shape, math.prod(shape)
    if taps is not None:
        finest = min(taps, key=lambda tap: math.prod(tap.row))
        size = max(math.prod(finest.row), 1)
        nse = sum(tap.count * math.prod(tap.row) // size for tap in taps)
        # Of a packed table lines are read and written; stacked ones (M, V, *row) are one.
        leading = 1 if finest.width else finest.leading
        rows, row = math.prod(shape[:leading]), math.prod(shape[leading:])
        table = (rows, *shape[leading:])
        if finest.width:
            table = math.prod(shape) // finest.width, LANES
        touched = min(nse, rows) * row  # ids may repeat
        note = MANY if nse >= table[0] else ""
    if platform == "tpu" and nse and has_narrow_rows(table):
        name = "table" if leading == 1 else f"table.reshape{table}"
        copied = (
            "a TPU copies the table in each step, or keeps it transposed, since its rows are "
            f"not lines of 128 entries: `jmask.packed({name})` keeps them in such lines"
        )
        note = "; ".join(filter(None, (note, copied)))
    name = jax.tree_util.keystr(path, simple=True, separator=".") or "params"
    return ParameterStep(name, shape, dtype, nse, touched * dtype.itemsize, note, leading)


def _with_place(text: str, place: Place | None) -> str:
    text = text if place is None else f"{text} ({place.file}:{place.line})"
    return text.replace(os.getcwd() + os.sep, "")
