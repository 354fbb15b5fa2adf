"""Rules of the gradient program for equations that hold jaxprs.

| equation                        | becomes                                               |
|---------------------------------|-------------------------------------------------------|
| remat                           | the same behind an optimization barrier, so that what |
|                                 | is recomputed is not merged with the forward pass     |
| scan with a table cotangent     | the rows of every iteration stacked as an output; the |
| in the carry                    | table leaves the carry                                |
| scan over a stack of tables     | the rows of every table, with ids that number all     |
| cond                            | every branch padded to one capacity                   |

scan and cond must know what their bodies return before they are built: the body is first
traced for its outputs alone, with warnings muted.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from jmask._autodiff.interpreter import (
    Flags,
    Interpreter,
    Outputs,
    Rule,
    Values,
    nothing_to_do,
    report_dense,
)
from jmask._autodiff.rules import none_wanted, same_wanted
from jmask._autodiff.values import IdsAndRows, RowSum, refuse, trial
from jmask._base.array_types import varying_axes
from jmask._base.fallback import muted
from jmask._base.forms import (
    REMATS,
    Opened,
    Scan,
    branches_of,
    called,
    is_recomputed_apart,
    parameter,
    scan_of,
    shard_map_of,
    summed_axes,
)
from jmask._base.row_ids import id_dtype
from jmask._base.types import Value

# --- remat -------------------------------------------------------------------------------


def _call_demand(
    eqn: JaxprEqn, wanted: Flags, interpreter: Interpreter, _: object
) -> list[bool]:
    jaxpr, _ = called(eqn)
    return interpreter.demand(jaxpr, wanted).of(jaxpr.invars)


def _remat(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    jaxpr, consts = called(eqn)
    if nothing_to_do(jaxpr, inputs):
        return None
    if is_recomputed_apart(eqn):
        inputs = _behind_a_barrier(inputs)
    return interpreter.run(jaxpr, consts, inputs, wanted)


def _behind_a_barrier(inputs: Values) -> list[Any]:
    # In a `shard_map` all that goes through one barrier comes out typed alike.
    groups: dict[Any, dict[int, jax.Array]] = {}
    for i, x in enumerate(inputs):
        if isinstance(x, jax.Array):
            groups.setdefault(varying_axes(x), {})[i] = x
    behind: dict[int, jax.Array] = {}
    for group in groups.values():
        behind |= jax.lax.optimization_barrier(group)
    return [behind.get(i, x) for i, x in enumerate(inputs)]


def _is_zero(x: Value) -> bool:
    return isinstance(x, RowSum) and x.is_zero


# --- scan --------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Carry:
    """The identity of one scan carry, and how many dimensions its ids number."""

    leading: int = 1


def _scan_demand(
    eqn: JaxprEqn, wanted: Flags, interpreter: Interpreter, _: object
) -> list[bool]:
    # A fixed point, reached in at most `count` rounds: each drops a carry or is the last.
    scan = scan_of(eqn)
    (jaxpr, _), first, count = scan.body, scan.consts, scan.carry
    carry, scanned = list(wanted[:count]), list(wanted[count:])
    while True:
        inputs = interpreter.demand(jaxpr, carry + scanned).of(jaxpr.invars)
        # A carry is only kept sparse if it is so all the way around the loop.
        around = [a and b for a, b in zip(carry, inputs[first:], strict=False)]
        if around == carry:
            break
        carry = around
    others = [False] * (len(eqn.invars) - first - count)
    return [False] * first + carry + others


def _scan(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    scan = scan_of(eqn)
    (body, _), first, count = scan.body, scan.consts, scan.carry
    consts, init = inputs[:first], list(inputs[first : first + count])
    scanned_in = [interpreter.dense(x, eqn) for x in inputs[first + count :]]
    carry_wanted = _scan_demand(eqn, wanted, interpreter, None)[first:]
    # The gradient program of a scan that looks rows up carries the table's cotangent and adds
    # rows in each round: O(length * V). Without that carry the rows of all rounds are an
    # output, stacked by `lax.scan` itself: O(length * n).
    keys = {
        i: _Carry() for i, x in enumerate(init) if isinstance(x, RowSum) and carry_wanted[i]
    }
    if not (keys or any(wanted[count:])):
        return None
    if nothing_to_do(body, [x for x in init if not _is_zero(x)]):
        return None
    consts = [interpreter.dense(x, eqn) for x in consts]
    loop = _Loop(eqn, scan, interpreter, consts, init, wanted, [])
    with muted():
        keys = loop.additive(keys, scanned_in)
    carry, (scanned, parts) = loop.run(keys, loop.dense_init(keys), scanned_in)
    dense_carry = iter(carry)
    totals = [
        _with_stacked(x, parts[i], keys[i].leading) if i in keys else next(dense_carry)
        for i, x in enumerate(init)
    ]
    stacks = [
        x if rows is None else _stack_of(rows, x)
        for x, rows in zip(scanned, loop.stacked, strict=True)
    ]
    return [*totals, *stacks]


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A scan equation, to be run without the carries that only collect rows.

    `stacked` says, once `run` has traced the body, of each stacked output what rows of one
    round it is; None of an array.
    """

    eqn: JaxprEqn
    scan: Scan
    interpreter: Interpreter
    consts: Sequence[Any]
    init: Sequence[Any]
    wanted: Flags
    stacked: list[RowSum | None]

    def additive(self, keys: dict[int, _Carry], scanned: Sequence[Any]) -> dict[int, _Carry]:
        """Return the carries among `keys` to which the body does nothing but add rows."""
        # A carry that is refused becomes dense, and what it is added to may then be refused
        # too: tried again without it, at most once for each carry.
        while keys:
            with trial() as refused:
                run = functools.partial(self.run, keys)
                jax.eval_shape(run, self.dense_init(keys), list(scanned))
            if refused.isdisjoint(keys.values()):
                break
            keys = {i: key for i, key in keys.items() if key not in refused}
        return keys

    def run(self, keys: dict[int, _Carry], init: list[Any], scanned: list[Any]) -> Any:
        """Return the scan without the carries in `keys`."""
        return jax.lax.scan(self.step(keys), init, scanned, **self.scan.how)

    def dense_init(self, keys: dict[int, _Carry]) -> list[Any]:
        """Return the initial values of the carries that stay."""
        return [
            self.interpreter.dense(x, self.eqn)
            for i, x in enumerate(self.init)
            if i not in keys
        ]

    def step(self, keys: dict[int, _Carry]) -> Callable[..., Any]:
        """Return the body without the carries in `keys`, whose rows are an output instead."""
        body, body_consts = self.scan.body

        def step(dense_carry: list[Any], scanned: list[Any]) -> Any:
            remaining = iter(dense_carry)
            carry = [
                RowSum(x.shape, x.dtype, carry=keys[i]) if i in keys else next(remaining)
                for i, x in enumerate(self.init)
            ]
            outputs = self.interpreter.run(
                body, body_consts, [*self.consts, *carry, *scanned], self.wanted
            )
            parts = {i: _parts_added_to(key, outputs[i]) for i, key in keys.items()}
            count = len(self.init)
            dense = [
                self.interpreter.dense(x, self.eqn)
                for i, x in enumerate(outputs[:count])
                if i not in keys
            ]
            # Of a table of the stack that is scanned: rows are stacked, and not tables.
            are_rows = [
                isinstance(x, RowSum) and x.looked_up and bool(x.parts) and x.carry is None
                for x in outputs[count:]
            ]
            pairs = list(zip(outputs[count:], are_rows, strict=True))
            self.stacked[:] = [
                dataclasses.replace(x, parts=()) if is_rows else None for x, is_rows in pairs
            ]
            return dense, (
                [
                    x.parts if is_rows else self.interpreter.dense(x, self.eqn)
                    for x, is_rows in pairs
                ],
                parts,
            )

        return step


def _parts_added_to(key: _Carry, output: Value) -> tuple[IdsAndRows, ...]:
    # Rows of slices with fixed bounds are better summed than stacked.
    additive = isinstance(output, RowSum) and output.carry is key
    if additive and (output.looked_up or not output.parts):
        key.leading = output.leading
        return output.parts
    refuse(key)
    return ()


def _with_stacked(total: RowSum, stacked: tuple[IdsAndRows, ...], leading: int) -> RowSum:
    """Add parts whose ids (length, n) and rows (length, n, *row) are stacked to `total`."""
    parts = tuple(
        (
            ids.reshape(ids.shape[0] * ids.shape[1]),
            rows.reshape((ids.shape[0] * ids.shape[1], *rows.shape[2:])),
        )
        for ids, rows in stacked
    )
    return total.plus(parts, looked_up=True, leading=leading)


def _stack_of(one: RowSum, stacked: tuple[IdsAndRows, ...]) -> RowSum:
    """Return the stack of arrays that are rows, ids (length, n) and rows (length, n, *row)."""
    (ids, _), *_ = stacked
    length = ids.shape[0]
    leading = one.leading + 1
    total = dataclasses.replace(one, shape=(length, *one.shape), leading=leading)
    first = jnp.arange(length, dtype=id_dtype(total.count))[:, None] * one.count
    parts = tuple(
        (jnp.where(ids < one.count, first + ids.astype(first.dtype), total.count), rows)
        for ids, rows in stacked
    )
    return _with_stacked(total, parts, leading)


# --- cond --------------------------------------------------------------------------------


def _cond_demand(
    eqn: JaxprEqn, wanted: Flags, interpreter: Interpreter, _: object
) -> list[bool]:
    flags = [
        interpreter.demand(branch, wanted).of(branch.invars) for branch, _ in branches_of(eqn)
    ]
    return [False] + [any(column) for column in zip(*flags, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Output:
    """The result of the branches of a cond in one place: rows, or (None) dense."""

    rows: RowSum | None
    capacity: int = 0


def _cond(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    which, *operands = inputs
    branches = branches_of(eqn)
    if all(nothing_to_do(branch, operands) for branch, _ in branches):
        return None
    axes = interpreter.branching | varying_axes(which)
    interpreter = dataclasses.replace(interpreter, branching=axes)

    def outputs_of(branch: Opened) -> list[Any]:
        return interpreter.run(*branch, operands, wanted)

    # Branches of a cond must return arrays of one shape, so both are traced twice: once to see
    # how many rows each returns, then padded to the most of them.
    with muted():
        common = _common_outputs([_trial(outputs_of, branch) for branch in branches])

    def build(branch: Opened) -> Callable[[], list[Any]]:
        def call() -> list[Any]:
            return [
                interpreter.dense(x, eqn)
                if form.rows is None
                else x.refined(form.rows.leading).concatenated(form.capacity)
                for x, form in zip(outputs_of(branch), common, strict=True)
            ]

        return call

    results = jax.lax.switch(which, [build(branch) for branch in branches])
    return [
        x if form.rows is None else dataclasses.replace(form.rows, parts=(x,))
        for x, form in zip(results, common, strict=True)
    ]


def _trial(function: Callable[..., list[Any]], branch: Opened) -> list[_Output]:
    """Trace what a branch returns, for kinds and capacities only: no tracer leaves it."""
    seen: list[_Output] = []

    def trace() -> None:
        for x in function(branch):
            rows = dataclasses.replace(x, parts=()) if isinstance(x, RowSum) else None
            seen.append(_Output(rows, x.capacity if isinstance(x, RowSum) else 0))

    jax.eval_shape(trace)
    return seen


def _common_outputs(branches: list[list[_Output]]) -> list[_Output]:
    forms = []
    for outputs in zip(*branches, strict=True):
        rows = [x.rows for x in outputs if x.rows is not None]
        if len(rows) < len(outputs) or any(x.carry is not rows[0].carry for x in rows):
            forms.append(_Output(None))
            continue
        looked_up = any(x.looked_up for x in rows)
        leading = max(x.leading for x in rows)
        form = dataclasses.replace(rows[0], looked_up=looked_up, leading=leading)
        capacity = max(x.capacity * form.count // x.rows.count for x in outputs)
        forms.append(_Output(form, capacity))
    return forms


CONTROL_FLOW_RULES: dict[str, Rule] = {
    "scan": Rule(_scan_demand, _scan),
    "cond": Rule(_cond_demand, _cond),
    **{name: Rule(_call_demand, _remat) for name in REMATS},
}


# --- collectives --------------------------------------------------------------------------
#
# Rules of the gradient program for programs over several devices.
#
# | equation                        | becomes                                              |
# |---------------------------------|------------------------------------------------------|
# | psum of a table cotangent       | all-gather of the ids and the rows: n * D numbers    |
# |                                 | cross the network and not V * D; dense in a branch   |
# |                                 | that not all devices take, where n may differ        |
# | pvary, pcast, reshard           | on the ids and the rows                              |
# | shard_map, table replicated     | its equations, with ids and rows as replicated       |
# |                                 | outputs in place of the table                        |


def _on_parts(inputs: Values, function: Callable[[jax.Array], jax.Array]) -> Outputs:
    """Apply `function` to ids and rows of every input, if all are rows and no carry."""
    if not all(isinstance(x, RowSum) and x.carry is None for x in inputs):
        return None
    return [
        dataclasses.replace(x, parts=tuple((function(i), function(r)) for i, r in x.parts))
        for x in inputs
    ]


def _psum(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    axes = summed_axes(eqn)
    if axes is None:
        return None
    if interpreter.branching.intersection(axes):
        for x in inputs:
            if isinstance(x, RowSum) and x.looked_up:
                report_dense(x, eqn, "devices may take different branches of a `cond`")
        with muted():
            return interpreter.run_dense(eqn, inputs)
    to = "invarying" if eqn.primitive.name == "psum_invariant" else "varying"

    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, axes, tiled=True, to=to)

    return _on_parts(inputs, gather)


def _cast(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    params = eqn.primitive.get_bind_params(eqn.params)

    def bind(x: jax.Array) -> jax.Array:
        result = eqn.primitive.bind(x, **params)
        return result[0] if eqn.primitive.multiple_results else result

    return _on_parts(inputs, bind)


def _reshard_demand(eqn: JaxprEqn, wanted: Flags, *_: Any) -> list[bool]:
    """Leave a gradient of which each device holds a summand to JAX, which makes it dense."""
    spec = parameter(eqn, "dst_sharding").spec
    is_summed = getattr(spec, "unreduced", None) or getattr(spec, "reduced", None)
    return [not is_summed and any(wanted)]


def _reshard(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    """For a row-sharded table, replicate ids and update rows on every device."""
    params = eqn.primitive.get_bind_params(eqn.params)
    if not isinstance(inputs[0], RowSum):
        return None
    sharding = parameter(eqn, "dst_sharding")
    mesh, (_, *row) = sharding.mesh, sharding.spec

    def bind(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(None, *(row if x.ndim > 1 else ()))
        return eqn.primitive.bind(x, **params | {"dst_sharding": NamedSharding(mesh, spec)})

    return _on_parts(inputs, bind)


def _shard_map(
    eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter
) -> Outputs:
    form = shard_map_of(eqn)
    body, consts = form.body
    if nothing_to_do(body, inputs):
        return None
    specs = form.out_specs
    # Rows of a table that is itself sharded by rows stay an array.
    sparse = [w and spec == PartitionSpec() for w, spec in zip(wanted, specs, strict=True)]
    kinds: list[RowSum | None] = []

    def run(*arrays: jax.Array) -> list[Any]:
        outputs = interpreter.run(body, consts, arrays, sparse)
        kinds[:] = [
            dataclasses.replace(x, parts=()) if isinstance(x, RowSum) and keep else None
            for x, keep in zip(outputs, sparse, strict=True)
        ]
        return [
            interpreter.dense(x, eqn) if kind is None else x.parts
            for x, kind in zip(outputs, kinds, strict=True)
        ]

    results = jax.shard_map(
        run,
        in_specs=tuple(form.in_specs),
        out_specs=list(specs),
        **form.how,
    )(*(interpreter.dense(x, eqn) for x in inputs))
    return [
        x if kind is None else dataclasses.replace(kind, parts=tuple(x))
        for x, kind in zip(results, kinds, strict=True)
    ]


COLLECTIVE_RULES: dict[str, Rule] = {
    "psum": Rule(same_wanted, _psum),
    "psum_invariant": Rule(same_wanted, _psum),
    "pvary": Rule(same_wanted, _cast),
    "pcast": Rule(same_wanted, _cast),
    "reshard": Rule(_reshard_demand, _reshard),
    # What comes in is a table on every device or a part of one: it is an array.
    "shard_map": Rule(none_wanted, _shard_map),
}
