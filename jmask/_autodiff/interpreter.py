"""Interpreting a gradient program so that table gradients come out row-sparse.

The jaxpr of `jax.value_and_grad(f)` is run equation by equation with `RowSum` as one more
kind of value. Two passes:

1. **Demand**, backwards: which variables flow into the gradients through linear rules
   only. Only there are row updates kept symbolic, so a scatter-add that belongs to the
   model itself is left alone, and what nothing needs is not run.
2. **Interpretation**, forwards: a rule for the primitive where a demanded variable is
   made, the ordinary primitive everywhere else. A primitive with no rule gets dense
   inputs, and a warning where that costs a table.

    a = broadcast_in_dim 0.0      demanded            RowSum(parts=())
    b = scatter-add a ids ct      demanded            RowSum(parts=((ids, ct),))
    c = add_any b d               demanded            RowSum, parts of b and d
    e = cos x                     not demanded        cos(x)
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmask._autodiff import views
from jmask._autodiff.gathered_rows import FACTS, SUMS, Gathered, sum_of_lookups
from jmask._autodiff.provenance import FOLLOWED, note_facts, note_uses
from jmask._autodiff.values import RowSum, dense, is_symbolic
from jmask._base.fallback import Place, in_bytes, place_among, report_fallback
from jmask._base.forms import (
    CALLS,
    REMATS,
    aval_of,
    called,
    holds_jaxprs,
    is_recomputed_apart,
    name_of,
    what_is_unknown,
    within,
)
from jmask._base.jaxprs import read, side_by_side
from jmask._base.shardings import varying_axes, varying_like
from jmask._base.types import Atom, Shape, Value
from jmask._kernels import sharded_rows
from jmask._kernels.bag_sum import BAG_SUM

# The user's line in a fallback warning must not be a line of this library.
source_info_util.register_exclusion(str(Path(__file__).parents[1]))


# Of the calls between rows that are scattered and what they are made of so many are entered:
# calls of helpers (`jnp.where`, `jnp.einsum`), not the layers of a model behind a lookup, which
# would all be traced equation by equation.
_CALLS_ENTERED = 3
LOOK_UP_FIRST = (
    "Look rows up first, then compute row by row: `f(table[ids])`, not `f(table)[ids]`. What "
    "mixes rows, as a graph does, has a dense gradient."
)
_CALLS = (*CALLS, *REMATS)
_LOOPS = ("scan", "cond")  # that are run equation by equation, with a rule
# The equations that ask what is known of their operands, here or in what they run.
_ASKING = FOLLOWED | {*SUMS, *_CALLS, *_LOOPS, "scatter-add"}
_ROW_MAKERS = (
    "scatter-add",
    "dynamic_update_slice",
    "pad",
    "bcoo_dot_general",
    sharded_rows.ADD.name,
)

Flags = Sequence[bool]
Values = Sequence[Value]
Outputs = Value | list[Value] | None


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one primitive treats demanded variables.

    Attributes:
        demand: takes wanted outputs and the equation that made each variable; returns wanted
            inputs.
        apply: takes inputs and wanted outputs; returns the output, a list of several, or None
            to run the primitive on dense inputs. Outputs of other shapes or dtypes than the
            equation has count as None.
    """

    demand: Callable[[JaxprEqn, Flags, "Interpreter", dict[Var, JaxprEqn]], Flags]
    apply: Callable[[JaxprEqn, Values, Flags, "Interpreter"], Outputs]


@dataclasses.dataclass(frozen=True)
class Demand:
    """Result of the backward pass over one jaxpr.

    Attributes:
        wanted: the variables that reach a wanted output through linear rules only.
        followed: the variables that reach rows to be scattered, through equations that add to
            what is known of their operands, and how many more calls to enter on the way.
        asked: the variables whose facts an equation may ask for.
        live: the equations whose result is used or that have an effect, in order.
        definitions: the equation that makes a variable.
    """

    wanted: set[Var]
    followed: dict[Var, int]
    asked: set[Var]
    live: list[JaxprEqn]
    definitions: dict[Var, JaxprEqn]

    def of(self, variables: Sequence[Atom]) -> list[bool]:
        return [not isinstance(v, Literal) and v in self.wanted for v in variables]

    def calls(self, variables: Sequence[Atom]) -> list[int]:
        """Return how many calls to enter on the way to each variable; -1: not followed."""
        return [-1 if isinstance(v, Literal) else self.followed.get(v, -1) for v in variables]

    def follow(self, variables: Sequence[Atom], calls: Sequence[int]) -> None:
        """Enter so many calls on the way to these variables."""
        for v, count in zip(variables, calls, strict=True):
            if not isinstance(v, Literal) and count >= 0:
                self.followed[v] = max(count, self.followed.get(v, 0))


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """Runs jaxprs by a table of rules, one for each primitive name.

    Attributes:
        branching: axes of a `shard_map` along which devices may be in different branches.
    """

    rules: dict[str, Rule]
    branching: frozenset[str] = frozenset()

    def demand(
        self, jaxpr: Jaxpr, wanted_outputs: Flags, calls: Sequence[int] | None = None
    ) -> Demand:
        """Return what is wanted, followed and live in `jaxpr`: the backward pass.

        `calls` says of each output how many calls to enter on the way to it.
        """
        used = _marked(jaxpr.outvars, [True] * len(jaxpr.outvars))
        wanted = _marked(jaxpr.outvars, wanted_outputs)
        definitions = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        result = Demand(wanted, {}, set(used), [], definitions)
        result.follow(jaxpr.outvars, calls or [-1] * len(jaxpr.outvars))
        for eqn in reversed(jaxpr.eqns):
            if not (eqn.effects or any(v in used for v in eqn.outvars)):
                continue
            result.live.append(eqn)
            operands = [v for v in eqn.invars if not isinstance(v, Literal)]
            used.update(operands)
            outputs_wanted, calls = result.of(eqn.outvars), result.calls(eqn.outvars)
            is_wanted, most, name = any(outputs_wanted), max(calls, default=-1), name_of(eqn)
            if name in _ASKING:
                result.asked.update(operands)
            if name in _CALLS and (is_wanted or most > 0):
                inner = called(eqn)[0]
                inside = self.demand(inner, outputs_wanted, calls)
                wanted |= _marked(eqn.invars, inside.of(inner.invars))
                result.follow(eqn.invars, [n - 1 for n in inside.calls(inner.invars)])
                continue
            if most >= 0 and name in FOLLOWED:
                result.follow(eqn.invars, [most] * len(eqn.invars))
            rule = self.rules.get(name)
            if rule is None or not is_wanted:
                continue
            flags = rule.demand(eqn, outputs_wanted, self, definitions)
            wanted |= _marked(eqn.invars, flags)
            if name == "scatter-add":
                result.follow(eqn.invars, [-1, -1, _CALLS_ENTERED])
        result.live.reverse()
        return result

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Value],
        inputs: Sequence[Value],
        wanted_outputs: Flags,
        calls: Sequence[int] | None = None,
    ) -> list[Value]:
        """Return the outputs of `jaxpr`, wanted ones possibly symbolic: the forward pass."""
        demand = self.demand(jaxpr, wanted_outputs, calls)
        values: dict[Var, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))
        operands = [v for eqn in demand.live for v in eqn.invars] + jaxpr.outvars
        uses: Counter[Atom] = Counter(v for v in operands if not isinstance(v, Literal))
        value_of = functools.partial(read, values)

        # Bag sums of several tables that do not need each other run in one loop.
        for eqns in side_by_side(demand.live, BAG_SUM.primitive.name):
            eqn = eqns[0]
            name, arguments = name_of(eqn), [value_of(v) for v in eqn.invars]
            outputs_wanted = demand.of(eqn.outvars)
            stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
            traceback = eqn.source_info.traceback
            with (
                source_info_util.user_context(traceback, name_stack=stack),
                eqn.ctx.manager,
            ):
                if name == BAG_SUM.primitive.name:
                    sum_operands: list[Value] = []
                    for each in eqns:
                        arrays = self._as_arrays(each, [value_of(v) for v in each.invars])
                        sum_operands += views.sums_through_views(each, arrays)
                    outputs = BAG_SUM.joined([each.params for each in eqns], sum_operands)
                elif name in _CALLS and _is_entered(eqn, arguments, demand):
                    note_uses(eqn, arguments, uses)
                    if name in REMATS and is_recomputed_apart(eqn):
                        arguments = _behind_a_barrier(arguments)
                    calls = demand.calls(eqn.outvars)
                    outputs = self.run(*called(eqn), arguments, outputs_wanted, calls)
                elif any(outputs_wanted) or (
                    name in _LOOPS and views.looks_up_views(eqn, arguments)
                ):
                    outputs = self._run_wanted(eqn, name, arguments, outputs_wanted)
                else:
                    arguments = self._as_arrays(eqn, arguments)
                    rows = views.read_through_view(eqn, name, arguments)
                    total = sum_of_lookups(eqn, name, arguments, uses)
                    if total is not None:
                        outputs = [total]
                    elif rows is not None:
                        outputs = [rows]
                    elif name == "gather" and _is_slow_gather(eqn):
                        outputs = [views.gather_of(eqn)(*arguments)]
                    else:
                        outputs = _run_on_arrays(eqn, arguments)
                    if len(outputs) == 1 and rows is None and eqn.outvars[0] in demand.asked:
                        is_scattered = eqn.outvars[0] in demand.followed
                        note_facts(eqn, name, arguments, outputs[0], uses, is_scattered)
                    views.note_view(eqn, name, arguments, outputs)
            results = [v for each in eqns for v in each.outvars]
            values.update(zip(results, outputs, strict=True))
        return [value_of(v) for v in jaxpr.outvars]

    def _run_wanted(
        self, eqn: JaxprEqn, name: str, arguments: list[Value], wanted: Flags
    ) -> list[Value]:
        """Return the outputs of an equation, symbolic where its rule keeps them so."""
        rule = self.rules.get(name)
        if name != eqn.primitive.name:  # of a form that is not known
            for v, is_wanted in zip(eqn.outvars, wanted, strict=True):
                if is_wanted and makes_rows(eqn, aval_of(v).shape):
                    report_dense(aval_of(v), eqn, what_is_unknown(eqn))
        elif rule is not None:
            # A rule may decline with None, or make what does not fit the output: then the
            # equation runs as it is.
            outputs = rule.apply(eqn, arguments, wanted, self)
            outputs = outputs if outputs is None or isinstance(outputs, list) else [outputs]
            if outputs is not None and all(map(_fits, outputs, eqn.outvars)):
                return outputs
        return self.run_dense(eqn, arguments)

    def run_dense(self, eqn: JaxprEqn, arguments: Sequence[Value]) -> list[jax.Array]:
        """Run the equation itself, on arrays."""
        return _run_on_arrays(eqn, self._as_arrays(eqn, arguments))

    def _as_arrays(self, eqn: JaxprEqn, arguments: Sequence[Value]) -> list[Value]:
        """Return arguments as arrays, in a `shard_map` typed as `eqn` was traced for."""
        return [
            varying_like(made_dense(x, eqn), aval_of(v)) if is_symbolic(x) else x
            for x, v in zip(arguments, eqn.invars, strict=True)
        ]


def made_dense(value: Value, eqn: JaxprEqn) -> Value:
    """Return `value` as an array; the equation that needs it so is named in a warning."""
    if isinstance(value, RowSum) and value.looked_up:
        reason = f"`{eqn.primitive.name}` has no row-sparse form"
        report_dense(value, eqn, reason, LOOK_UP_FIRST)
    return dense(value)


def _run_on_arrays(eqn: JaxprEqn, arrays: Sequence[Value]) -> list[jax.Array]:
    """Run an equation on arrays that are typed as it was traced for."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays) and not holds_jaxprs(eqn):
        # Under jit it would be a constant, which fails where nobody knows what it is.
        raise TypeError(
            "a ShapeDtypeStruct, which stands for a table, has no numbers: use "
            "table.todense(), or jmask.tree.norm for the norm of all parameters"
        )
    outputs = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _fits(value: Value, v: Atom) -> bool:
    """Decide whether a symbolic value is of the shape and dtype that the equation says."""
    if not is_symbolic(value):
        return True
    return (value.shape, value.dtype) == (aval_of(v).shape, aval_of(v).dtype)


def report_dense(value: Value, eqn: JaxprEqn, reason: str, remedy: str = "") -> None:
    """Say that a row-sparse gradient became dense, why, and at which line of user code.

    Nothing is said of a table that has no more rows than are looked up, such as a matrix of
    transitions: its dense gradient costs no more than rows would.
    """
    if isinstance(value, RowSum) and value.covers(1):
        return
    size = math.prod(value.shape) * jnp.dtype(value.dtype).itemsize
    report_fallback(
        f"the gradient of a {value.dtype}{list(value.shape)} table ({in_bytes(size)}) became "
        f"dense, at O(table) cost in each step: {reason}",
        place_of(eqn),
        tuple(value.shape),
        remedy,
    )


def makes_rows(eqn: JaxprEqn, shape: Shape | None = None) -> bool:
    """Decide whether an equation, or what it runs, writes rows of arrays of this shape."""
    return any(
        e.primitive.name in _ROW_MAKERS and shape in (None, aval_of(e.outvars[0]).shape)
        for e in within([eqn])
    )


def nothing_to_do(jaxpr: Jaxpr, inputs: Sequence[Value]) -> bool:
    """Decide whether an equation that runs `jaxpr` may be run as it is."""
    return not any(map(makes_rows, jaxpr.eqns)) and not any(
        isinstance(x, RowSum) for x in inputs
    )


def place_of(eqn: JaxprEqn) -> Place | None:
    """Return the line of user code that an equation comes from."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    place = place_among((frame.file_name, frame.line_num) for frame in frames)
    if place is None:
        match = re.match(r"(.+?):(\d+)", source_info_util.summarize(eqn.source_info))
        place = Place(match[1], int(match[2])) if match else None
    return place


def _is_slow_gather(eqn: JaxprEqn) -> bool:
    """Decide whether a gather can be faster."""
    return views.gather_of(eqn).is_slow_copy(aval_of(eqn.invars[0]))


def _is_entered(eqn: JaxprEqn, arguments: Sequence[Value], demand: Demand) -> bool:
    """Decide whether a call is run equation by equation: wanted values or rows are made in it.

    It may look up rows, or make those that are scattered.
    """
    inner, _ = called(eqn)
    if any(demand.of(eqn.outvars)):
        return not nothing_to_do(inner, arguments)
    # Of other calls a rule for derivatives would be lost.
    if eqn.primitive.name not in ("jit", "pjit"):
        return name_of(eqn) in REMATS and views.looks_up_views(eqn, arguments)
    is_traced = any(isinstance(x, jax.core.Tracer) for x in arguments)
    if any(isinstance(FACTS.of(x), Gathered) for x in arguments):
        return True
    if is_traced and max(demand.calls(eqn.outvars), default=-1) > 0:
        return True
    if any(map(views.is_of_tables, arguments)) and views.makes_views(inner):
        return True
    lookups = [e for e in within(inner.eqns) if name_of(e) in views.LOOKUPS]
    return bool(lookups) if is_traced else any(map(_is_slow_gather, lookups))


def _behind_a_barrier(inputs: Values) -> list[Value]:
    """Return the inputs of a `remat`, so that it is not merged with the forward pass."""
    # In a `shard_map` all that goes through one barrier comes out typed alike.
    groups: dict[frozenset[str], dict[int, jax.Array]] = {}
    for i, x in enumerate(inputs):
        # What is made of tables is read from these, and a barrier would need it whole.
        if isinstance(x, jax.Array) and views.view_of(x) is None:
            groups.setdefault(varying_axes(x), {})[i] = x
    behind: dict[int, jax.Array] = {}
    for group in groups.values():
        behind |= jax.lax.optimization_barrier(group)
    views.note_tables([x for i, x in behind.items() if views.is_of_tables(inputs[i])])
    return [behind.get(i, x) for i, x in enumerate(inputs)]


def _marked(variables: Sequence[Atom], flags: Flags) -> set[Var]:
    """Return the variables with a flag, literals apart."""
    pairs = zip(variables, flags, strict=True)
    return {v for v, flag in pairs if flag and not isinstance(v, Literal)}
