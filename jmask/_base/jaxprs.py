"""Running jaxprs, which outputs depend on which inputs, and what is mere arithmetic.

{ lambda ; a b. let c = jit[{ d. sin d }] a in (c, b) }      inlined   c = sin a
                                                             evaluate  [sin(x), y]
                                                             origins   [1, 2]
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeVar

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from jmask._base.forms import CALLS, REMATS, called, name_of, within
from jmask._base.shardings import varying_alike
from jmask._base.types import Argument, ArrayFunction, Atom

_Value = TypeVar("_Value")

# Each entry of the result is computed of the same entries of the operands.
ARITHMETIC = frozenset(
    "abs add add_any and atan2 cbrt ceil clamp convert_element_type copy copy_p cos div eq exp "
    "exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg "
    "nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sqrt square "
    "stop_gradient sub tan tanh xor".split()
)
# A bitcast of arrays may add a dimension.
ON_SCALARS = ARITHMETIC | {"bitcast_convert_type"}


def only_arithmetic(jaxpr: Jaxpr, names: Collection[str] = ON_SCALARS) -> bool:
    """Decide whether a program of scalars has nothing but these operations on entries."""
    known = {*names, *CALLS}
    return not jaxpr.effects and all(name_of(eqn) in known for eqn in within(jaxpr.eqns))


def lifted(program: ClosedJaxpr) -> Jaxpr:
    """Return program as a function of its constants, then of its arguments; it holds no array.

    What JAX keeps, such as a function given to `custom_jvp`, must not hold a tracer.
    """
    jaxpr = program.jaxpr
    return jaxpr.replace(constvars=(), invars=(*jaxpr.constvars, *jaxpr.invars))


def with_consts(jaxpr: Jaxpr, consts: Sequence[Argument]) -> ClosedJaxpr:
    """Undo `lifted`: return the program with constants in place of its first arguments."""
    constvars, invars = jaxpr.invars[: len(consts)], jaxpr.invars[len(consts) :]
    return ClosedJaxpr(jaxpr.replace(constvars=constvars, invars=invars), consts)


def inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program with the equations of what it calls in place of the calls."""
    consts = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    eqns: list[JaxprEqn] = []
    outputs = _add_inlined(program.jaxpr, {}, eqns, consts)
    jaxpr = program.jaxpr.replace(constvars=list(consts), eqns=eqns, outvars=outputs)
    return ClosedJaxpr(jaxpr, list(consts.values()))


def in_sequence(
    first: ClosedJaxpr, second: ClosedJaxpr, sources: Sequence[int | None]
) -> ClosedJaxpr:
    """Return two programs as one, with the outputs of the first and then of the second.

    Args:
        sources: for each input of `second` its index among the outputs of `first` and, after
            them, the inputs of `first`; None for an input of its own, which is added last.
    """
    pairs = [zip(x.jaxpr.constvars, x.consts, strict=True) for x in (first, second)]
    consts: dict[Var, Argument] = dict(itertools.chain(*pairs))
    eqns: list[JaxprEqn] = []
    outputs = _add_inlined(first.jaxpr, {}, eqns, consts)
    known = [*outputs, *first.jaxpr.invars]
    inputs, more = second.jaxpr.invars, list[Var]()
    given: dict[Var, Atom] = {}
    for v, source in zip(inputs, sources, strict=True):
        if source is None:
            more.append(Var(v.aval))
        given[v] = more[-1] if source is None else known[source]
    outputs += _add_inlined(second.jaxpr, given, eqns, consts)
    jaxpr = first.jaxpr.replace(
        constvars=[*consts], invars=[*first.jaxpr.invars, *more], eqns=eqns, outvars=outputs
    )
    return ClosedJaxpr(jaxpr, [*consts.values()])


# It calls itself. As a closure it would be a cycle, which holds the constants until Python
# collects garbage.
def _add_inlined(
    jaxpr: Jaxpr, names: dict[Var, Atom], eqns: list[JaxprEqn], consts: dict[Var, Argument]
) -> list[Atom]:
    """Add the equations of a jaxpr, calls in line; return its outputs as named there."""
    calls = (*CALLS, *REMATS)
    for eqn in jaxpr.eqns:
        inputs = [names.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]
        if eqn.primitive.name in calls and name_of(eqn) in calls:
            inner, inner_consts = called(eqn)
            consts.update(zip(inner.constvars, inner_consts, strict=True))
            given = dict(zip(inner.invars, inputs, strict=True))
            outputs = _add_inlined(inner, given, eqns, consts)
        else:  # a jaxpr may be called twice: its variables get new names each time
            outvars = [Var(v.aval) for v in eqn.outvars]
            eqns.append(eqn.replace(invars=inputs, outvars=outvars))
            outputs = [*outvars]
        names.update(zip(eqn.outvars, outputs, strict=True))
    return [names.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars]


def read(values: dict[Var, _Value], v: Atom) -> _Value:
    """Return the value of a variable or literal."""
    return v.val if isinstance(v, Literal) else values[v]


Context = contextlib.AbstractContextManager[object]


def contexts_of(eqn: JaxprEqn) -> tuple[Context, Context]:
    """Return the contexts in which an equation was traced: its line and names, and its mesh.

    Two of them, since one around both calls eight functions more, for each equation.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    names = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    return names, eqn.ctx.manager


def bound(eqn: JaxprEqn, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Bind an equation to `inputs`.

    In a `shard_map` JAX asks that operands vary over the same axes. They are made to, for the
    equation may have been traced for other types.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:  # tested first: each equation comes by
        inputs = varying_alike(*inputs)
    outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def bound_to_differentiate(eqn: JaxprEqn, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Bind an equation as `jax.numpy` does its operations, under `jax.jit`, to be inlined.

    JAX keeps the linearization of what is jitted: tracing the gradient of many layers of the
    same shapes is 1.5 times faster.
    """
    # What has several results may call functions of the user's, which are not to be kept.
    is_kept = not (eqn.primitive.multiple_results or eqn.effects)
    if is_kept and not jax.sharding.get_abstract_mesh().manual_axes:
        try:
            jitted = _jitted(eqn.primitive, tuple(eqn.params.items()))
        except TypeError:  # parameters that are not hashable
            return bound(eqn, inputs)
        return [jitted(*inputs)]
    return bound(eqn, inputs)


# While tracing. Where JAX has `Inline`, True means while lowering, which takes twice as long.
_IN_LINE = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True


@functools.lru_cache(1024)
def _jitted(primitive: Primitive, params: tuple[tuple[str, Hashable], ...]) -> ArrayFunction:
    def bind(*inputs: jax.Array) -> jax.Array:
        return primitive.bind(*inputs, **primitive.get_bind_params(dict(params)))

    return jax.jit(bind, inline=_IN_LINE)


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[_Value],
    inputs: Sequence[_Value],
    rule: Callable[[JaxprEqn, list[_Value]], Sequence[_Value]],
    literal: Callable[[Argument], _Value] = lambda value: value,
) -> list[_Value]:
    """Return the outputs of a jaxpr on values of any kind.

    `rule(equation, values of its operands)` returns the values of its results; `literal` the
    value that stands for a number in the program.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
    run(jaxpr.eqns, values, rule, literal)
    return [literal(v.val) if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def run(
    eqns: Sequence[JaxprEqn],
    values: dict[Var, _Value],
    rule: Callable[[JaxprEqn, list[_Value]], Sequence[_Value]],
    literal: Callable[[Argument], _Value] = lambda value: value,
) -> None:
    """Add the results of equations to `values`; see `interpret`."""
    for eqn in eqns:
        given = [literal(v.val) if isinstance(v, Literal) else values[v] for v in eqn.invars]
        values.update(zip(eqn.outvars, rule(eqn, given), strict=True))


def needed_for(
    wanted: Iterable[Atom], eqns: Sequence[JaxprEqn], source: Var | None = None
) -> tuple[list[JaxprEqn], dict[Var, None]]:
    """Return the equations that compute `wanted`, and all variables that they need.

    Those with effects are needed whatever is wanted. What computes `source` is left out.
    """
    needed = dict.fromkeys(v for v in wanted if isinstance(v, Var))
    chosen = []
    for eqn in reversed(eqns):
        is_needed = bool(eqn.effects) or not needed.keys().isdisjoint(eqn.outvars)
        if source not in eqn.outvars and is_needed:
            chosen.append(eqn)
            needed.update({v: None for v in eqn.invars if isinstance(v, Var)})
    return chosen[::-1], needed


def origins(jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
    """Return, for each output of an inlined jaxpr, the bits of the inputs it may depend on."""

    def rule(eqn: JaxprEqn, given: list[int]) -> list[int]:
        return [functools.reduce(operator.or_, given, 0)] * len(eqn.outvars)

    return interpret(jaxpr, [0] * len(jaxpr.constvars), inputs, rule, lambda _: 0)


def forwarded(jaxpr: Jaxpr) -> list[int | None]:
    """Return, for each output of a jaxpr, the number of the input that it is, or None."""
    inputs: dict[Var, int] = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        if name_of(eqn) in (*CALLS, *REMATS):
            sources = forwarded(called(eqn)[0])
        elif name_of(eqn) == "optimization_barrier":
            sources = list(range(len(eqn.invars)))
        else:
            continue
        for v, source in zip(eqn.outvars, sources, strict=True):
            outer = None if source is None else eqn.invars[source]
            if isinstance(outer, Var) and outer in inputs:
                inputs[v] = inputs[outer]
    return [inputs.get(v) if isinstance(v, Var) else None for v in jaxpr.outvars]


def evaluate(
    program: ClosedJaxpr,
    *args: jax.Array,
    rule: Callable[[JaxprEqn, list[jax.Array]], Sequence[jax.Array]] = bound,
) -> list[jax.Array]:
    """Return outputs of a program that was traced for other types of arrays: see `bound`."""
    program = inlined(program)
    return interpret(program.jaxpr, program.consts, args, rule)
