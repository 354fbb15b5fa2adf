"""Prove that an update on rows is exact on them, and run the program that was proved.

    inner.update on whole tables        traced once, for the proof
    inner.update on rows                traced once, for the proof and to run

The program on rows is a jaxpr, and the proof knows the kind of each of its variables. The plain
update evaluates the program on gathered rows. The one pass makes its combiner of the equations
that compute rows.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var

from jmask._base.array_types import automatically, explicit_sharding, spec_of
from jmask._base.jaxprs import bound, inlined, interpret, origins
from jmask._lazy.lattice import Kind, NotRowLocal, Replicated, RowWise
from jmask._lazy.leaves import LazyCall, shape_of_leaf
from jmask._lazy.psum_over_shards import with_sums_over
from jmask._lazy.row_locality import classify
from jmask._updates.checks import NotRowLocalError


@dataclasses.dataclass(frozen=True)
class ProvedUpdate:
    """`inner.update` on rows.

    Attributes:
        traced: as `inner` is written; of gradients, state, parameters and arrays among the
            extra arguments, flat. Its results are updates and state.
        program: the same with its calls in line.
        kinds: what is known of each of its variables.
        unordered: see `_unordered`.
    """

    traced: ClosedJaxpr
    program: ClosedJaxpr
    kinds: dict[Var, Kind]
    unordered: Mapping[int, int]

    def update(self, call: LazyCall) -> tuple[Any, Any]:
        """Return updates and state of a call of this signature."""
        on_rows = functools.partial(self._run, call)
        return call.update(on_rows, self.unordered)

    def _run(self, call: LazyCall, *inputs: Any) -> list[Any]:
        sharded, avals = call.sharded_axes(), self.traced.in_avals
        arrays = [  # a table without lookups has a row here
            x if jnp.shape(x) == aval.shape else jnp.zeros(aval.shape, aval.dtype)
            for x, aval in zip(inputs, avals, strict=True)
        ]
        if sharded:
            return with_sums_over(sharded, self.program, self.kinds, *arrays)
        # Types that say where an array is were not known when the program was traced.
        if all(jax.typeof(x) == aval for x, aval in zip(arrays, avals, strict=True)):
            return jax.core.eval_jaxpr(self.traced.jaxpr, self.traced.consts, *arrays)
        sharding = explicit_sharding(*arrays)
        if sharding is None:
            return interpret(self.program.jaxpr, self.program.consts, arrays, bound)
        # It was traced for no mesh. Updates and state lie where gradients and state did.
        specs = [spec_of(x) for x in arrays[: len(self.traced.out_avals)]]
        return automatically(call.run_flat(), *arrays, like=sharding, spec=specs)


def proved(call: LazyCall, known: set[Any], *, same_dtypes: bool = False) -> ProvedUpdate:
    """Return the update of a call; refuse it unless it is exact on the touched rows.

    Args:
        call: with rows.
        known: signatures that were proved; added to.
        same_dtypes: whether numbers of the state that belong to no row must keep their dtype.
            (Rows do: they are stored in the dtype of their table.)

    Raises:
        NotRowLocalError: with the first operation that mixes or counts rows.
        TypeError: from `inner`, or by `same_dtypes`.
    """
    run, signature = call.run_flat(), call.signature()
    dense = None
    if signature is None or signature not in known:
        dense = jax.make_jaxpr(run)(*call.shapes())
        if same_dtypes:
            _check_dtypes(call, dense)
    try:
        traced = jax.make_jaxpr(run)(*call.shapes_of_rows())
    except (TypeError, ValueError) as error:
        (reason, *_) = str(error).splitlines() or [type(error).__name__]
        raise NotRowLocalError(f"it runs on whole tables and not on rows ({reason})") from error
    program = inlined(traced)
    inputs = [  # untouched rows of a gradient are 0
        Replicated()
        if leaf.table is None
        else RowWise(leaf.table, 0, off_support=0 if leaf.kind == "gradient" else None)
        for leaf in call.leaves
    ]
    outputs, kinds = classify(program if dense is None else inlined(dense), program, inputs)
    if dense is not None:
        avals = zip(dense.out_avals, traced.out_avals, strict=True)
        for leaf, kind, (x, y) in zip(call.leaves, outputs, avals, strict=False):
            why = _why_not(leaf.table, kind)
            if why is None and leaf.table is None and x.shape != y.shape:
                why = "what it returns has a shape that depends on the number of rows"
            if why is not None:
                raise NotRowLocalError(why)
        if signature is not None:
            known.add(signature)
    return ProvedUpdate(traced, program, kinds, _unordered(call, program))


def _check_dtypes(call: LazyCall, dense: ClosedJaxpr) -> None:
    for leaf, new in zip(call.leaves, dense.out_avals, strict=False):
        old = shape_of_leaf(leaf.value)
        if leaf.kind == "state" and leaf.table is None and old.dtype != new.dtype:
            raise TypeError(f"update makes a state of {new.dtype} of one of {old.dtype}")


def _unordered(call: LazyCall, program: ClosedJaxpr) -> dict[int, int]:
    """Return outputs that are written to rows which they do not depend on, and these rows.

    A new row of the state that does not depend on the old one; an update that does not depend
    on the parameter where the state does (an average of parameters).

    Returns:
        A dict from the position of the output to the position of the leaf that is read.
    """
    inputs = origins(program.jaxpr, [1 << i for i in range(len(program.jaxpr.invars))])
    params = {leaf.table: i for i, leaf in enumerate(call.leaves) if leaf.kind == "param"}
    written = {
        i: i if leaf.kind == "state" else params.get(leaf.table)
        for i, leaf in enumerate(call.leaves)
        if leaf.kind in ("state", "gradient") and leaf.table is not None
    }
    return {
        i: read
        for i, read in written.items()
        if read is not None
        and not inputs[i] >> read & 1
        and any(bits >> read & 1 for bits in inputs)
    }


def _why_not(table: int | None, kind: Kind) -> str | None:
    """Say why an output is not what it must be: rows of its table, or shared."""
    if isinstance(kind, NotRowLocal):
        return kind.why
    if isinstance(kind, Replicated):
        by_position = table is not None and 0 not in kind.uniform
        return "it treats rows by their position" if by_position else None
    stays = (kind.table, kind.axis, kind.merged) == (table, 0, (1, 1))
    return None if stays else "it moves rows elsewhere"
