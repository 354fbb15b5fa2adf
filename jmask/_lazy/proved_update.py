"""An update on rows with the proof that it is exact on them: what is proved is what runs.

    inner.update on whole tables        traced once, for the proof
    inner.update on rows                traced once, for the proof and to run

The program on rows is a jaxpr, and of each of its variables the proof has found what it is. The
plain update evaluates the program on the rows that are gathered, and the one pass over rows
makes its combiner of those of its equations that make rows.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var

from jmask._base.jaxprs import bound, inlined, interpret, origins
from jmask._lazy.call import LazyCall, arrays_of, shape_of_leaf
from jmask._lazy.lattice import Kind, NotRowLocal, Replicated, RowWise
from jmask._lazy.row_locality import classify
from jmask._lazy.spread_sums import Axes, with_sums_over
from jmask._updates.checks import NotRowLocalError


@dataclasses.dataclass(frozen=True)
class ProvedUpdate:
    """`inner.update` on rows.

    Attributes:
        traced: as `inner` is written; of gradients, state, parameters and arrays among the
            extra arguments, flat. Its results are updates and state.
        program: the same with its calls in line.
        kinds: what is known of each of its variables.
        overwritten: positions in the state of rows whose new values do not depend on the old.
    """

    traced: ClosedJaxpr
    program: ClosedJaxpr
    kinds: dict[Var, Kind]
    overwritten: Collection[int]

    def update(self, call: LazyCall, extra_args: dict[str, Any]) -> tuple[Any, Any]:
        """Updates and state of a call of this signature."""
        on_rows = functools.partial(self._run, call.spread())
        return call.update(on_rows, extra_args, self.overwritten)

    def _run(self, spread: Mapping[int, Axes], *inputs: Any) -> list[Any]:
        avals = self.traced.in_avals
        given = [  # a table without lookups has a row here
            x if jnp.shape(x) == aval.shape else jnp.zeros(aval.shape, aval.dtype)
            for x, aval in zip(inputs, avals, strict=True)
        ]
        if spread:
            return with_sums_over(spread, self.program, self.kinds, given)
        # Types that say where an array is were not known when the program was traced.
        if all(jax.typeof(x) == aval for x, aval in zip(given, avals, strict=True)):
            return jax.core.eval_jaxpr(self.traced.jaxpr, self.traced.consts, *given)
        return interpret(self.program.jaxpr, self.program.consts, given, bound)


def proved(
    call: LazyCall,
    extra_args: dict[str, Any],
    known: dict[Any, Collection[int]],
    *,
    same_dtypes: bool = False,
) -> ProvedUpdate:
    """The update of a call, refused unless it is exact on the touched rows.

    Args:
        call: with rows.
        extra_args: of its `update`.
        known: of signatures that were proved, what was found. Added to.
        same_dtypes: whether numbers of the state that belong to no row must keep their dtype.
            (Rows do: they are stored in the dtype of their table.)

    Raises:
        NotRowLocalError: with the first operation that mixes or counts rows.
        TypeError: from `inner`, or by `same_dtypes`.
    """
    arrays = list(map(shape_of_leaf, arrays_of(extra_args)[0]))
    run = call.run_flat(extra_args)

    def on_rows() -> ClosedJaxpr:
        return jax.make_jaxpr(run)(*call.shapes(of_rows=True), *arrays)

    inputs = _kinds(call, len(arrays))
    signature = call.signature(extra_args)
    if signature in known:
        traced = on_rows()
        program = inlined(traced)
        _, kinds = classify(program, program, inputs)
        return ProvedUpdate(traced, program, kinds, known[signature])
    dense = jax.make_jaxpr(run)(*call.shapes(of_rows=False), *arrays)
    if same_dtypes:
        _check_dtypes(call, dense)
    try:
        traced = on_rows()
    except (TypeError, ValueError) as error:
        (reason, *_) = str(error).splitlines() or [type(error).__name__]
        raise NotRowLocalError(f"it runs on whole tables and not on rows ({reason})") from error
    program = inlined(traced)
    outputs, kinds = classify(inlined(dense), program, inputs)
    tables = call.gradient_tables + call.state_tables
    avals = zip(dense.out_avals, traced.out_avals, strict=True)
    for table, kind, (x, y) in zip(tables, outputs, avals, strict=True):
        why = _why_not(table, kind)
        if why is None and table is None and x.shape != y.shape:
            why = "what it returns has a shape that depends on the number of rows"
        if why is not None:
            raise NotRowLocalError(why)
    overwritten = _overwritten(call, program)
    if signature is not None:
        known[signature] = overwritten
    return ProvedUpdate(traced, program, kinds, overwritten)


def _check_dtypes(call: LazyCall, dense: ClosedJaxpr) -> None:
    new_state = dense.out_avals[len(call.gradients) :]
    for table, old, new in zip(call.state_tables, call.state, new_state, strict=True):
        if table is None and shape_of_leaf(old).dtype != new.dtype:
            raise TypeError(f"update makes a state of {new.dtype} of one of {old.dtype}")


def _kinds(call: LazyCall, arrays: int) -> list[Kind]:
    """What is known of gradients, state, parameters and arrays among extra arguments."""
    kinds: list[Kind] = [
        Replicated() if table is None else RowWise(table, 0, off_support=0)
        for table in call.gradient_tables
    ]
    kinds += [
        Replicated() if table is None else RowWise(table, 0)
        for table in call.state_tables + call.param_tables
    ]
    return kinds + [Replicated()] * arrays


def _overwritten(call: LazyCall, program: ClosedJaxpr) -> frozenset[int]:
    found = origins(program.jaxpr, [1 << i for i in range(len(program.jaxpr.invars))])
    first = len(call.gradients)
    return frozenset(
        place
        for place, table in enumerate(call.state_tables)
        if table is not None and not found[first + place] >> first + place & 1
    )


def _why_not(table: int | None, kind: Kind) -> str | None:
    """Why an output is not what it must be: rows of its table, or shared."""
    if isinstance(kind, NotRowLocal):
        return kind.why
    if isinstance(kind, Replicated):
        by_position = table is not None and 0 not in kind.uniform
        return "it treats rows by their position" if by_position else None
    stays = (kind.table, kind.axis, kind.merged) == (table, 0, (1, 1))
    return None if stays else "it moves rows elsewhere"
