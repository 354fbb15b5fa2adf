"""What a program does with each of its inputs: looks rows up in it, or needs all of it.

    def loss(table, ids):
        rows = jnp.take(table, ids, axis=0)        lookup
        return jnp.sum(rows @ table.T)             `dot_general` needs all of it

The uses are read from the jaxpr of the function itself. A copy, a cast, a transpose or a
multiple of an array is that array still, so a use of it is a use of the input.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmask._fallback import Fallback, Place, in_bytes
from jmask._gradient_program import place_of
from jmask._jaxprs import CALLS, REMATS, aval_of, opened

_LOOKUPS = ("gather", "dynamic_slice")
_STILL_THE_SAME = (
    "convert_element_type copy copy_p expand_dims name neg reshape sharding_constraint "
    "squeeze transpose"
).split()
# Equations that run a jaxpr on their last inputs: parameter names of the jaxprs.
_INNER = dict.fromkeys((*CALLS, *REMATS, "scan", "shard_map"), ("jaxpr", "call_jaxpr")) | {
    "cond": ("branches",),
    "while": ("body_jaxpr",),
}


class Use(NamedTuple):
    """One use of an input: the primitive, and the line of the user's code."""

    primitive: str
    place: Place | None

    @property
    def is_lookup(self) -> bool:
        return self.primitive in _LOOKUPS


def uses_of_inputs(jaxpr: Jaxpr) -> list[list[Use]]:
    """For every input of a program, in order, how it is used."""
    return _uses(jaxpr, list(range(len(jaxpr.invars))), len(jaxpr.invars))[0]


def refined_report(jaxpr: Jaxpr, names: Sequence[str], report: Fallback) -> Fallback:
    """A report about the gradient of a table, at the line that needs all of the table.

    A gradient program adds the two gradients of a table that is looked up and used otherwise
    too, and the sum is made at the line of whichever use comes first.

    Args:
        jaxpr: the gradient program.
        names: what its inputs are called, in backticks.
        report: about one of them, which only its shape tells.
    """
    for name, variable, uses in zip(names, jaxpr.invars, uses_of_inputs(jaxpr), strict=True):
        table = aval_of(variable)
        lookups = [use.place for use in uses if use.is_lookup]
        others = [use for use in uses if not use.is_lookup and use.place is not None]
        if tuple(table.shape) != report.shape or not lookups or not others:
            continue
        size = math.prod(table.shape) * table.dtype.itemsize
        looked_up = f"looked up ({lookups[0]})" if lookups[0] else "looked up"
        return Fallback(
            f"the gradient of {name}, a {table.dtype}{list(table.shape)} table "
            f"({in_bytes(size)}), became dense, at O(table) cost in each step: it is "
            f"{looked_up}, but `{others[0].primitive}` needs all of it",
            others[0].place,
            report.shape,
        )
    return report


def _uses(
    jaxpr: Jaxpr, inputs: Sequence[int | None], count: int
) -> tuple[list[list[Use]], list[int | None]]:
    """The uses of `count` inputs, and which of them each output of `jaxpr` is, if any.

    Args:
        jaxpr: a program.
        inputs: for each of its variables which of the inputs it is, or None.
        count: the number of inputs.
    """
    uses: list[list[Use]] = [[] for _ in range(count)]
    same: dict[Var, int] = {
        v: i for v, i in zip(jaxpr.invars, inputs, strict=True) if i is not None
    }

    def of(v: Any) -> int | None:
        return None if isinstance(v, Literal) else same.get(v)

    for eqn in jaxpr.eqns:
        found = [of(v) for v in eqn.invars]
        if all(i is None for i in found) or eqn.primitive.name == "stop_gradient":
            continue
        inner = _inner(eqn)
        for body in inner:
            theirs, outputs = _uses(body, found[len(found) - len(body.invars) :], count)
            for mine, more in zip(uses, theirs, strict=True):
                # What JAX itself calls (`jnp.sort`) has no line of the user inside.
                mine.extend(u if u.place else u._replace(place=place_of(eqn)) for u in more)
            same.update(
                (v, i) for v, i in zip(eqn.outvars, outputs, strict=False) if i is not None
            )
        if inner:
            continue
        which = next(i for i in found if i is not None)
        if _is_the_same(eqn):
            same[eqn.outvars[0]] = which
            continue
        for i in dict.fromkeys(found):
            if i is not None:
                uses[i].append(Use(eqn.primitive.name, place_of(eqn)))
    return uses, [of(v) for v in jaxpr.outvars]


def _inner(eqn: JaxprEqn) -> list[Jaxpr]:
    bodies: list[Any] = []
    for name in _INNER.get(eqn.primitive.name, ()):
        found = eqn.params.get(name, ())
        bodies += found if isinstance(found, tuple) else [found]
    jaxprs = [opened(body)[0] for body in bodies]
    return [jaxpr for jaxpr in jaxprs if len(jaxpr.invars) <= len(eqn.invars)]


def _is_the_same(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name in ("mul", "div"):
        return any(aval_of(v).ndim == 0 for v in eqn.invars)
    return eqn.primitive.name in _STILL_THE_SAME
