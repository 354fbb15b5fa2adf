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
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmask._autodiff.origins import Origins, Program, plain
from jmask._autodiff.sums_of_lookups import SUMS, sum_of_lookups
from jmask._autodiff.values import Filled, RowSum
from jmask._base.array_types import varying_like
from jmask._base.fallback import Place, in_bytes, place_among, report_fallback
from jmask._base.forms import (
    CALLS,
    aval_of,
    called,
    holds_jaxprs,
    name_of,
    names_in,
    parameter,
    what_is_unknown,
    within,
)
from jmask._base.jaxprs import side_by_side
from jmask._kernels.bag_sum import BAG_SUM, bag_sums
from jmask._kernels.gather import Gather

# The user's line in a fallback warning must not be a line of this library.
source_info_util.register_exclusion(str(Path(__file__).parents[1]))


# Which are told what is known of the origin of an operand.
_TAKE_MADE = ("scatter-add", *CALLS)
_ROW_MAKERS = ("scatter-add", "dynamic_update_slice", "pad", "bcoo_dot_general")

Flags = Sequence[bool]
Values = Sequence[Any]
Outputs = list[Any] | None


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one primitive treats demanded variables.

    Attributes:
        demand: (eqn, wanted outputs, interpreter, definitions) -> wanted inputs, as
            flags; `definitions` maps a variable to the equation that made it.
        apply: (eqn, inputs, wanted outputs, interpreter) -> outputs, or None to run the
            primitive on dense inputs. Outputs of other shapes or dtypes than the equation
            has count as None.
    """

    demand: Callable[..., Sequence[bool]]
    apply: Callable[..., list[Any] | None]


@dataclasses.dataclass(frozen=True)
class Demand:
    """Result of the backward pass over one jaxpr.

    Attributes:
        wanted: the variables that reach a wanted output through linear rules only.
        live: the equations whose result is used or that have an effect.
        definitions: the equation that makes a variable.
    """

    wanted: set[Var]
    live: set[int]
    definitions: dict[Var, JaxprEqn]

    def of(self, variables: Sequence[Any]) -> list[bool]:
        return [not isinstance(v, Literal) and v in self.wanted for v in variables]


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """Runs jaxprs by a table of rules, one rule for each primitive name.

    Attributes:
        rules: by name.
        branching: axes of a `shard_map` along which devices may be in different branches.
    """

    rules: dict[str, Rule]
    branching: frozenset[str] = frozenset()

    def demand(self, jaxpr: Jaxpr, wanted_outputs: Sequence[bool]) -> Demand:
        """The backward pass: what is wanted and what is live in `jaxpr`."""
        outputs = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
        wanted = {
            v
            for v, is_wanted in zip(jaxpr.outvars, wanted_outputs, strict=True)
            if is_wanted and not isinstance(v, Literal)
        }
        used, live = set(outputs), set[int]()
        definitions = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        result = Demand(wanted, live, definitions)
        for number, eqn in reversed(list(enumerate(jaxpr.eqns))):
            if not (eqn.effects or any(v in used for v in eqn.outvars)):
                continue
            live.add(number)
            inputs = [v for v in eqn.invars if not isinstance(v, Literal)]
            used.update(inputs)
            outputs_wanted = result.of(eqn.outvars)
            rule = self.rules.get(name_of(eqn))
            if rule is None or not any(outputs_wanted):
                continue
            flags = rule.demand(eqn, outputs_wanted, self, definitions)
            wanted.update(
                v
                for v, flag in zip(eqn.invars, flags, strict=True)
                if flag and not isinstance(v, Literal)
            )
        return result

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        inputs: Sequence[Any],
        wanted_outputs: Sequence[bool],
    ) -> list[Any]:
        """The forward pass: outputs of `jaxpr`, the wanted ones possibly symbolic."""
        demand = self.demand(jaxpr, wanted_outputs)
        values: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        live = [eqn for number, eqn in enumerate(jaxpr.eqns) if number in demand.live]
        origins = Origins(Program(live, jaxpr.outvars), values)

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else plain(values[v])

        for eqn, *others in side_by_side(live, BAG_SUM):
            if others:
                values.update(self._run_together([eqn, *others], read))
                continue
            arguments, outputs_wanted = [read(v) for v in eqn.invars], demand.of(eqn.outvars)
            if any(outputs_wanted) and name_of(eqn) in _TAKE_MADE:
                arguments = list(map(origins.made, eqn.invars, arguments))
            stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
            traceback = eqn.source_info.traceback
            with (
                source_info_util.user_context(traceback, name_stack=stack),
                eqn.ctx.manager,
            ):
                sums = None if any(outputs_wanted) else sum_of_lookups(eqn, origins)
                outputs = (
                    self._run_equation(eqn, arguments, outputs_wanted)
                    if sums is None
                    else [sums]
                )
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _run_together(
        self, eqns: Sequence[JaxprEqn], read: Callable[[Any], Any]
    ) -> Iterator[tuple[Var, Any]]:
        """What the sums of bags of several tables make, in one equation."""
        given = [self.dense(read(v), eqn) for eqn in eqns for v in eqn.invars]
        outputs = bag_sums([eqn.params for eqn in eqns], given)
        return zip((v for eqn in eqns for v in eqn.outvars), outputs, strict=True)

    def _run_equation(
        self, eqn: JaxprEqn, arguments: list[Any], wanted: list[bool]
    ) -> list[Any]:
        rule = self.rules.get(name_of(eqn))
        if any(wanted):
            report_unknown(eqn, wanted)
        if rule is not None and any(wanted):
            outputs = rule.apply(eqn, arguments, wanted, self)
            if outputs is not None and all(map(_fits, outputs, eqn.outvars)):
                return outputs
        elif holds_slow_gather(eqn) or may_sum_lookups(eqn):
            return self._run_lookup(eqn, arguments)
        return self.run_dense(eqn, arguments)

    def run_dense(self, eqn: JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
        """The equation itself, on arrays."""
        arguments = [
            self._dense_as_traced(plain(x), v, eqn)
            for x, v in zip(arguments, eqn.invars, strict=True)
        ]
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in arguments) and not holds_jaxprs(
            eqn
        ):
            # Under jit it would be a constant, which fails where nobody knows what it is.
            raise TypeError("a ShapeDtypeStruct, which stands for a table, has no numbers")
        outputs = eqn.primitive.bind(*arguments, **eqn.primitive.get_bind_params(eqn.params))
        return list(outputs) if eqn.primitive.multiple_results else [outputs]

    def _dense_as_traced(self, value: Any, v: Any, eqn: JaxprEqn) -> Any:
        """`value` as an array, in a `shard_map` typed as the equation was traced for."""
        dense = self.dense(value, eqn)
        return dense if dense is value else varying_like(dense, aval_of(v))

    def _run_lookup(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        """A lookup of the forward pass, or a call that makes one (`jnp.take`)."""
        if name_of(eqn) == "gather":
            operand, indices = (self.dense(x, eqn) for x in arguments)
            return [gather_of(eqn)(operand, indices)]
        jaxpr, consts = called(eqn)
        return self.run(jaxpr, consts, arguments, [False] * len(eqn.outvars))

    @staticmethod
    def dense(value: Any, eqn: JaxprEqn) -> Any:
        """`value` as an array; the equation that needs it so is named in a warning."""
        if not isinstance(value, RowSum | Filled):
            return value
        if isinstance(value, RowSum) and value.looked_up:
            report_dense(value, eqn, f"`{eqn.primitive.name}` has no row-sparse form")
        return value.todense()


def _fits(value: Any, v: Any) -> bool:
    """Whether a symbolic value is of the shape and dtype that the equation says."""
    if not isinstance(value, RowSum | Filled):
        return True
    return (value.shape, value.dtype) == (aval_of(v).shape, aval_of(v).dtype)


def report_dense(value: Any, eqn: JaxprEqn, reason: str) -> None:
    """Say that a row-sparse gradient became dense, why, and at which line of user code."""
    size = math.prod(value.shape) * jnp.dtype(value.dtype).itemsize
    report_fallback(
        f"the gradient of a {value.dtype}{list(value.shape)} table ({in_bytes(size)}) became "
        f"dense, at O(table) cost in each step: {reason}",
        place_of(eqn),
        tuple(value.shape),
    )


def makes_rows(eqn: JaxprEqn, shape: tuple[int, ...] | None = None) -> bool:
    """Whether an equation or what it runs writes rows, of arrays of this shape if given."""
    return any(
        e.primitive.name in _ROW_MAKERS and shape in (None, aval_of(e.outvars[0]).shape)
        for e in within([eqn])
    )


def report_unknown(eqn: JaxprEqn, wanted: Flags) -> None:
    """Say which gradients become dense since JAX gives an equation a form that is not known."""
    reason = what_is_unknown(eqn)
    if reason is None:
        return
    for v, is_wanted in zip(eqn.outvars, wanted, strict=True):
        if is_wanted and makes_rows(eqn, aval_of(v).shape):
            report_dense(aval_of(v), eqn, reason)


def place_of(eqn: JaxprEqn) -> Place | None:
    """The line of user code that an equation comes from."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    place = place_among((frame.file_name, frame.line_num) for frame in frames)
    if place is None:
        found = re.match(r"(.+?):(\d+)", source_info_util.summarize(eqn.source_info))
        place = Place(found[1], int(found[2])) if found else None
    return place


def holds_slow_gather(eqn: JaxprEqn) -> bool:
    """Whether an equation is a gather that can be faster, or a call of a function with one."""
    if name_of(eqn) == "gather":
        return gather_of(eqn).is_slow_copy(aval_of(eqn.invars[0]))
    return name_of(eqn) == "jit" and any(map(holds_slow_gather, called(eqn)[0].eqns))


def may_sum_lookups(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call of a function that looks up rows and sums something."""
    names = names_in(called(eqn)[0]) if name_of(eqn) == "jit" else set[str]()
    return "gather" in names and not names.isdisjoint(SUMS)


def gather_of(eqn: JaxprEqn) -> Gather:
    """The parameters of a `gather` equation."""
    return Gather(**{f.name: parameter(eqn, f.name) for f in dataclasses.fields(Gather)})
