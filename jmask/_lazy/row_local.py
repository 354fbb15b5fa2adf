"""Prove that an update treats every row by itself, from one trace with the number of rows open.

`lazy(inner)` runs `inner.update` on the rows in the gradient. On these that is the dense update
if nothing in it mixes rows, or counts them, except sums to which the other rows contribute
nothing because their gradient is zero. The update is traced once, with a symbolic dimension of
`jax.export` for the number of rows of each table, and nothing can compute with such a number
unseen:

    g           (rows0, 3)    has the rows of table 0: its shape says so; 0 in untouched rows
    g * g       (rows0, 3)    0 in untouched rows
    sum(g * g)  ()            untouched rows add 0: the global norm is exact
    vdot(g, g)  ()            the same of what is ravelled, (3 * rows0,)
    sum(p * p)  ()            refused: p is not known in untouched rows (LAMB's trust ratio)
    mean(g)     ()            refused: `dim_as_value` makes a number of the number of rows
    rows0 > 128               refused: JAX cannot decide it while tracing

So which axis has whose rows is read off shapes, and JAX's own rules of shapes keep the rows of
two tables apart. What has to be followed is one scalar for each value: what it is in rows that
the gradient does not touch, where that is known. An operation without a rule here is refused.

The program that was proved is the one that runs, with numbers in the place of open dimensions
(`with_sizes`): code of `inner` may ask `x.shape[0] == 8`. An open number equals no number, so
the operations of the program are compared with those for the table's number of rows.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.sharding import AxisType

from jmask._base.forms import (
    Opened,
    aval_of,
    branches_of,
    holds_jaxprs,
    name_of,
    parameter,
    scan_of,
    what_is_unknown,
    while_of,
    within,
)
from jmask._base.jaxprs import (
    ARITHMETIC,
    inlined,
    interpret,
    lifted,
    needed_for,
    run,
    with_consts,
)
from jmask._base.types import Argument, ArraysFunction, Function, PyTree, Scalar
from jmask._lazy.checks import NotRowLocalError
from jmask._lazy.open_rows import (
    Dimension,
    axes_of_rows,
    open_shapes,
    operations_of,
    traced_alike,
    traced_open,
    with_sizes,
)
from jmask._ops.rows import trial

Known = Scalar | None
"""What a value is in rows that the gradient does not touch; None if that is not known."""
Rule = Callable[[JaxprEqn, list[Known]], Known]

ELEMENTWISE = ARITHMETIC | frozenset(
    "acos acosh asin asinh atan atanh complex conj cosh digamma erf erf_inv erfc imag lgamma "
    "name population_count real reshard shift_left shift_right_arithmetic "
    "shift_right_logical sinh".split()
)
FILL = "broadcast_in_dim"
# They keep the entries of a row apart if the result's shape begins with the shape of a row.
_ENTRY_BY_ENTRY = {*ELEMENTWISE, FILL, "concatenate", "reshape", "slice", "split", "squeeze"}
# Operations that NumPy rounds as XLA does. Values in untouched rows are computed by them: XLA
# would compile each, and runs none under a mesh of devices that are only described. Not for
# complex operands, nor where the result is an integer, but for casts.
_EXACT: dict[str, Function] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "convert_element_type": np.asarray,
    "div": np.divide,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "sign": np.sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
}
# Reductions to which a value contributes nothing.
NEUTRAL = {"reduce_sum": 0, "reduce_or": False, "reduce_and": True, "reduce_prod": 1}
_IDEMPOTENT = ("reduce_or", "reduce_and", "reduce_max", "reduce_min")
_COUNT = "rows outside the gradient would count in it"


class RowWise(optax.GradientTransformationExtraArgs):
    """A transformation that treats rows alike, however many they are, as it is written."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class RowLocal:
    """An update that is proved to treat rows by themselves; a tree of what it holds."""

    traced: ClosedJaxpr  # the update as it is written, with open numbers of rows
    program: ClosedJaxpr  # what of it the results need, with its calls in line
    # What each variable of `program` is in untouched rows. One without rows is that everywhere.
    known: Mapping[Var, Known]
    rows: Mapping[int, Dimension]  # the open number of rows of each table

    @classmethod
    def of(
        cls, traced: ClosedJaxpr, inputs: Sequence[Known], rows: Mapping[int, Dimension]
    ) -> "RowLocal":
        """Prove an update that is traced with open numbers of rows; see `proved`."""
        program = _needed(traced)
        jaxpr, consts = program.jaxpr, [None] * len(program.consts)
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
        run(jaxpr.eqns, known, _rule, _known_of_literal)
        return cls(traced, program, known, rows)

    def tree_flatten(self) -> tuple[tuple[PyTree, ...], tuple[Argument, ...]]:
        """Return the constants, which may be traced, and all else, which holds none."""
        static = lifted(self.traced), lifted(self.program), self.known, self.rows
        return (self.traced.consts, self.program.consts), static

    @classmethod
    def tree_unflatten(
        cls, static: tuple[Argument, ...], consts: tuple[PyTree, ...]
    ) -> "RowLocal":
        """Return an update with other constants."""
        traced, program, *others = static
        return cls(with_consts(traced, consts[0]), with_consts(program, consts[1]), *others)

    def at(self, sizes: Mapping[int, int]) -> ClosedJaxpr:
        """Return the update for tables of these numbers of rows."""
        numbers = {self.rows[i]: size for i, size in sizes.items()}
        return ClosedJaxpr(with_sizes(self.traced.jaxpr, numbers), self.traced.consts)

    @functools.cached_property
    def owners(self) -> dict[Var, int]:
        """The table of each variable that has rows: their open number is in its shape."""
        jaxpr, table_of = self.program.jaxpr, {size: i for i, size in self.rows.items()}
        owners: dict[Var, int] = {}
        for v in (*jaxpr.invars, *(v for eqn in within(jaxpr.eqns) for v in eqn.outvars)):
            for size in (aval_of(v).shape[axis] for axis in axes_of_rows(v)[:1]):
                if size not in table_of:  # a multiple, of what is merged with rows
                    multiples = (i for i, x in self.rows.items() if isinstance(size // x, int))
                    table_of[size] = next(multiples)
                owners[v] = table_of[size]
        return owners

    @functools.cached_property
    def sums_over_rows(self) -> bool:
        """True if the update sums over rows, as a global norm does."""
        return any(
            any(map(axes_of_rows, eqn.invars)) and not any(map(axes_of_rows, eqn.outvars))
            for eqn in within(self.program.jaxpr.eqns)
            if not holds_jaxprs(eqn)
        )

    @functools.cached_property
    def by_rows(self) -> set[int]:
        """Tables whose update is more than arithmetic on entries of one shape."""
        jaxpr, owners = self.program.jaxpr, self.owners
        # What shared numbers are made of is computed before the pass.
        of_rows = [eqn for eqn in jaxpr.eqns if any(v in owners for v in eqn.outvars)]
        eqns, needed = needed_for([*jaxpr.invars, *jaxpr.outvars], of_rows)
        by_rows: set[int] = set()
        for eqn in eqns:
            rows = [v for v in eqn.invars if isinstance(v, Var) and v in owners]
            others = [v for v in eqn.invars if isinstance(v, Var) and v not in owners]
            is_simple = len(eqn.outvars) == 1 and not any(aval_of(v).ndim for v in others)
            is_fill = eqn.primitive.name == FILL and not rows
            if not is_simple or not (is_fill or eqn.primitive.name in ARITHMETIC):
                by_rows.update(owners[v] for v in eqn.outvars if v in owners)
        shapes = {i: aval_of(jaxpr.invars[i]).shape for i in self.rows}
        sizes = {(owners[v], aval_of(v).shape) for v in needed if v in owners}
        return by_rows | {i for i, shape in sizes if shape != shapes[i] or 0 in shape}

    def mixes_entries(self, table: int) -> bool:
        """Decide whether some part of a step takes more than one entry of a row.

        What repeats, joins or reshapes entries keeps them apart, though no combiner of scalars
        does it.
        """
        row = aval_of(self.program.jaxpr.invars[table]).shape[1:]
        shapes = [aval_of(v).shape for v, owner in self.owners.items() if owner == table]
        # A complex entry is a pair, along one dimension more.
        return any(x[1 : 1 + len(row)] != row for x in shapes) or any(
            self.owners.get(v) == table
            for eqn in within(self.program.jaxpr.eqns)
            if not holds_jaxprs(eqn) and eqn.primitive.name not in _ENTRY_BY_ENTRY
            for v in eqn.outvars
        )


def proved(
    function: ArraysFunction,
    shapes: Sequence[jax.ShapeDtypeStruct],
    tables: Sequence[int | None],
    inputs: Sequence[Known],
    *,
    is_row_wise: bool = False,
) -> RowLocal:
    """Return an update that is traced with open numbers of rows and proved.

    Args:
        function: arrays -> updates and state, in the order of the first of its arguments.
        tables: whose rows each argument has along its first axis, or None.
        inputs: what each argument is in untouched rows.
        is_row_wise: whether code of `function` asks for no number of rows.
    """
    rows, opened = open_shapes(shapes, tables)
    with contextlib.ExitStack() as contexts:
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            # Bodies of loops get no types of the mesh that is set: the program runs where all
            # axes are automatic, see `automatically`.
            no_mesh = jax.sharding.AbstractMesh((), ())
            contexts.enter_context(jax.sharding.use_abstract_mesh(no_mesh))
        # What is no matter of rows raises here.
        dense = None if is_row_wise else jax.make_jaxpr(function)(*shapes)
        contexts.enter_context(traced_open(None if is_row_wise else "it"))
        if is_row_wise and len(rows) > 1:
            traced = traced_alike(function, shapes, tables, rows)
        else:
            traced = jax.make_jaxpr(function)(*opened)
    update = RowLocal.of(traced, inputs, rows)
    for x, v in zip(opened, update.program.jaxpr.outvars, strict=False):
        shape = aval_of(v).shape
        if x.shape != shape and any(map(export.is_symbolic_dim, (*x.shape, *shape))):
            raise NotRowLocalError(
                "it moves rows elsewhere, or what it returns has a shape that depends on the "
                f"number of rows: {x.shape} becomes {shape}"
            )
    has_rows = all(shapes[i].shape[0] for i, table in enumerate(tables) if table is not None)
    if dense and has_rows and operations_of(_needed(dense)) != operations_of(update.program):
        raise NotRowLocalError("it chooses other operations for a table of this size")
    return update


def _needed(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program with its calls in line, without what no result needs."""
    program = inlined(traced)
    eqns, _ = needed_for(program.jaxpr.outvars, program.jaxpr.eqns)
    return ClosedJaxpr(program.jaxpr.replace(eqns=eqns), program.consts)


# --- the proof ----------------------------------------------------------------------------


def _outputs(opened: Opened, inputs: Sequence[Known]) -> list[Known]:
    program = inlined(ClosedJaxpr(*opened))
    consts = [None] * len(program.consts)
    return interpret(program.jaxpr, consts, inputs, _rule, _known_of_literal)


def _known_of_literal(x: Argument) -> Known:
    return x if np.ndim(x) == 0 else None


def _refused(eqn: JaxprEqn, why: str) -> NotRowLocalError:
    place = source_info_util.summarize(eqn.source_info)
    at = f" (at {place})" if place else ""
    return NotRowLocalError(f"`{eqn.primitive.name}` {why}{at}")


def _rule(eqn: JaxprEqn, inputs: list[Known]) -> list[Known]:
    """Return what an equation makes of operands that are these in untouched rows."""
    name, count = name_of(eqn), len(eqn.outvars)
    if name != eqn.primitive.name:
        raise NotRowLocalError(what_is_unknown(eqn))
    outputs: list[Known]
    if name in CONTROL_FLOW:
        outputs = CONTROL_FLOW[name](eqn, inputs)
    elif name == "optimization_barrier":
        outputs = inputs
    elif name in ELEMENTWISE:
        outputs = [_evaluated(name, eqn, inputs)]
    elif any(map(axes_of_rows, (*eqn.invars, *eqn.outvars))):
        if name not in RULES:
            raise _refused(eqn, "mixes rows, counts them, or tells them apart by position")
        outputs = [RULES[name](eqn, inputs)] * count
    else:
        # Numbers that are the same in any table, if no row is counted.
        for e in (eqn, *within([eqn])):
            if any(map(export.is_symbolic_dim, jax.tree.leaves(e.params))):
                raise _refused(eqn, "depends on the number of rows")
            if e.primitive.name in ("pure_callback", "io_callback"):
                raise _refused(eqn, "calls Python, which may count rows")
        are_same = name in ("broadcast_in_dim", "reshape", "squeeze")
        outputs = [inputs[0] if are_same else None] * count
    if any(len(axes_of_rows(v)) > 1 for v in eqn.outvars):
        raise _refused(eqn, "combines rows with each other")
    return outputs


def _evaluated(name: str, eqn: JaxprEqn, inputs: list[Known]) -> Known:
    """Evaluate an elementwise equation at what its operands are in untouched rows."""
    if name in ("copy", "copy_p", "name", "reshard", "stop_gradient"):  # the same numbers
        return inputs[0]
    if name == "select_n" and inputs[0] is not None:
        return inputs[1 + int(inputs[0])]
    if name == "select_n":
        return functools.reduce(_common, inputs[1:])
    if None in inputs:
        # Zero wins over an unknown finite factor, as it does in the dense update.
        absorbing = {"mul": inputs, "and": inputs, "div": inputs[:1]}.get(name, ())
        if any(x is not None and not x for x in absorbing):
            return aval_of(eqn.outvars[0]).dtype.type(0)
        return None
    pairs = zip(inputs, eqn.invars, strict=True)
    operands = [np.asarray(x, aval_of(v).dtype) for x, v in pairs]
    dtype = aval_of(eqn.outvars[0]).dtype
    if name == "integer_pow":  # x ** 1 is x
        name = {1: "convert_element_type", 2: "square"}.get(parameter(eqn, "y"), name)
    are_real = not any(map(np.iscomplexobj, operands))
    are_whole = not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in operands)
    is_cast = name == "convert_element_type" and are_whole
    if name in _EXACT and are_real and (is_cast or not jnp.issubdtype(dtype, jnp.integer)):
        with np.errstate(all="ignore"):
            return dtype.type(_EXACT[name](*operands))
    with trial():
        params = eqn.primitive.get_bind_params(eqn.params)
        # There and back explicitly, which jax.transfer_guard("disallow") lets pass.
        return jax.device_get(eqn.primitive.bind(*jax.device_put(operands), **params))


# --- operations that move, keep or sum rows: by name ---------------------------------------


def _reshape(eqn: JaxprEqn, inputs: list[Known]) -> Known:
    """Keep rows in their order: (rows0, 3) may become (3 * rows0,), and (3, rows0) may not.

    They keep it if as many entries come before each row, in both shapes.
    """
    before = [
        np.prod([1, *aval_of(v).shape[: (*axes_of_rows(v), 0)[0]]])
        for v in (eqn.invars[0], eqn.outvars[0])
    ]
    if before[0] == before[1]:
        return inputs[0]
    raise _refused(eqn, "merges rows with other axes")


def _reduce(eqn: JaxprEqn, inputs: list[Known]) -> Known:
    name, (known, *_), (axis, *_) = name_of(eqn), inputs, axes_of_rows(eqn.invars[0])
    is_bitwise = aval_of(eqn.invars[0]).dtype != bool and name == "reduce_and"
    is_neutral = name in NEUTRAL and not is_bitwise and _is(known, NEUTRAL[name])
    if axis not in parameter(eqn, "axes"):
        return known if is_neutral or name in _IDEMPOTENT else None
    if is_neutral:
        return None
    raise _refused(eqn, f"combines rows, and {_COUNT}")


def _along(parameter_of_axis: str) -> Rule:
    """Return the rule of an operation that must not run along the axis of rows."""

    def rule(eqn: JaxprEqn, inputs: list[Known]) -> Known:
        along = {*np.atleast_1d(parameter(eqn, parameter_of_axis)).tolist()}
        if along.isdisjoint(axis for v in eqn.invars for axis in axes_of_rows(v)):
            return functools.reduce(_common, inputs)
        raise _refused(eqn, "parts rows, joins them to others, or reverses their order")

    return rule


def _slice(eqn: JaxprEqn, inputs: list[Known]) -> Known:
    (axis,) = axes_of_rows(eqn.invars[0])
    if aval_of(eqn.invars[0]).shape[axis] == aval_of(eqn.outvars[0]).shape[axis]:
        return inputs[0]  # an open size is the same only if all of it is taken
    raise _refused(eqn, "parts rows from other rows")


def _gather(eqn: JaxprEqn, inputs: list[Known]) -> Known:
    """Take some columns, which is what `x[:, 1:]` is where the number of rows is open."""
    axis, *_ = (*axes_of_rows(eqn.invars[0]), None)
    is_indexed = axis in parameter(eqn, "dimension_numbers").start_index_map
    sizes = parameter(eqn, "slice_sizes")
    if axis is None or is_indexed or sizes[axis] != aval_of(eqn.invars[0]).shape[axis]:
        raise _refused(eqn, "parts rows from other rows, or looks them up")
    has_fill = parameter(eqn, "mode").name == "FILL_OR_DROP"
    return None if has_fill else inputs[0]


def _scatter(eqn: JaxprEqn, inputs: list[Known]) -> Known:
    """Write to some columns, as `x.at[..., 0].multiply(-1)` does."""
    x, places, new = eqn.invars
    axis, *_ = (*axes_of_rows(x), None)
    numbers = parameter(eqn, "dimension_numbers")
    others = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(aval_of(x).shape)) if d not in others]
    of_rows = dict(zip(window, numbers.update_window_dims, strict=True)).get(axis)
    is_indexed = axis in numbers.scatter_dims_to_operand_dims or axes_of_rows(places)
    if is_indexed or axes_of_rows(new) != [of_rows]:
        raise _refused(eqn, "writes to rows by their numbers")
    zeros = inputs[:1] if eqn.primitive.name == "scatter-mul" else inputs[::2]
    return inputs[0] if all(_is(value, 0) for value in zeros) else None


def _dot(eqn: JaxprEqn, inputs: list[Known]) -> Known:
    contracted, _ = parameter(eqn, "dimension_numbers")
    is_zero = any(_is(x, 0) for x in inputs)
    left, right = (
        [k for k, axis in enumerate(axes) if axis in axes_of_rows(v)]
        for v, axes in zip(eqn.invars, contracted, strict=True)
    )
    if not left and not right:
        return 0 if is_zero else None
    if is_zero and left == right:
        return None
    raise _refused(eqn, f"sums over rows, and {_COUNT}")


RULES: dict[str, Rule] = {
    "broadcast_in_dim": lambda eqn, inputs: inputs[0],
    "transpose": lambda eqn, inputs: inputs[0],
    "reshape": _reshape,
    "squeeze": _reshape,
    "stack": lambda eqn, inputs: functools.reduce(_common, inputs),
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    "rev": _along("dimensions"),
    "slice": _slice,
    "gather": _gather,
    "scatter": _scatter,
    **dict.fromkeys((f"scatter-{x}" for x in ("add", "max", "min", "mul", "sub")), _scatter),
    "dot_general": _dot,
} | dict.fromkeys((*NEUTRAL, "reduce_max", "reduce_min"), _reduce)


# --- control flow --------------------------------------------------------------------------


def _cond(eqn: JaxprEqn, inputs: list[Known]) -> list[Known]:
    every = [_outputs(branch, inputs[1:]) for branch in branches_of(eqn)]
    return [functools.reduce(_common, outputs) for outputs in zip(*every, strict=True)]


def _scan(eqn: JaxprEqn, inputs: list[Known]) -> list[Known]:
    scan = scan_of(eqn)
    if export.is_symbolic_dim(scan.length):
        raise _refused(eqn, "runs over rows in sequence")
    return _loop(scan.body, inputs, scan.consts, scan.carry)


def _while(eqn: JaxprEqn, inputs: list[Known]) -> list[Known]:
    loop, first = while_of(eqn), while_of(eqn).condition_consts
    carry = _loop(loop.body, inputs[first:], loop.body_consts, len(eqn.outvars))
    _outputs(loop.condition, [*inputs[:first], *carry])
    return carry


def _loop(body: Opened, inputs: list[Known], consts: int, carry: int) -> list[Known]:
    """Run a body until what is known of its carry, which only becomes less, stays."""
    while True:
        outputs = _outputs(body, inputs)
        end = consts + carry
        carried = list(map(_common, inputs[consts:end], outputs))
        if all(map(operator.is_, carried, inputs[consts:end])):
            return [*carried, *outputs[carry:]]
        inputs = [*inputs[:consts], *carried, *inputs[end:]]


CONTROL_FLOW = {"cond": _cond, "scan": _scan, "while": _while}


def _common(x: Known, y: Known) -> Known:
    # By identity first: a nan is in common with itself.
    return x if x is y or (x is not None and y is not None and x == y) else None


def _is(x: Known, value: Scalar) -> bool:
    return x is not None and bool(x == value)
