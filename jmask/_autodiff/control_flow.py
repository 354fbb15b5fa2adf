"""Rules of the gradient program for equations that hold jaxprs.

| equation                        | becomes                                               |
|---------------------------------|-------------------------------------------------------|
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
    made_dense,
    nothing_to_do,
    report_dense,
)
from jmask._autodiff.rules import none_wanted, same_wanted
from jmask._autodiff.values import IdsAndRows, RowSum, refuse, trial
from jmask._autodiff.views import looks_up_views
from jmask._base.fallback import muted
from jmask._base.forms import (
    Opened,
    branches_of,
    parameter,
    scan_of,
    shard_map_of,
    summed_axes,
)
from jmask._base.jaxprs import bound
from jmask._base.row_ids import id_dtype
from jmask._base.shardings import varying_axes
from jmask._base.types import PyTree, Value

# --- scan --------------------------------------------------------------------------------


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
    (body, body_consts), first, count = scan.body, scan.consts, scan.carry
    consts, init = inputs[:first], inputs[first : first + count]
    scanned_in = [made_dense(x, eqn) for x in inputs[first + count :]]
    carry_wanted = _scan_demand(eqn, wanted, interpreter, None)[first:]
    # The gradient program of a scan that looks rows up carries the table's cotangent and adds
    # rows in each round: O(length * V). Without that carry the rows of all rounds are an
    # output, stacked by `lax.scan` itself: O(length * n). An object is the identity of a carry.
    keys = {
        i: object() for i, x in enumerate(init) if isinstance(x, RowSum) and carry_wanted[i]
    }
    is_empty = nothing_to_do(
        body, [x for x in init if not (isinstance(x, RowSum) and x.is_zero)]
    )
    makes_rows = (keys or any(wanted[count:])) and not is_empty
    if not makes_rows and not looks_up_views(eqn, inputs):
        return None
    consts = [made_dense(x, eqn) for x in consts]

    def without(keys: dict[int, object], values: Values) -> list[jax.Array]:
        """Return the carries that are not in `keys` as arrays."""
        return [made_dense(x, eqn) for i, x in enumerate(values) if i not in keys]

    def run(keys: dict[int, object], dense_init: Values, scanned_in: Values) -> PyTree:
        """Run the scan without the carries in `keys`, whose rows are outputs instead."""

        def step(dense_carry: Values, scanned: Values) -> tuple[list[jax.Array], PyTree]:
            remaining = iter(dense_carry)
            carry = [
                RowSum(x.shape, x.dtype, carry=keys[i]) if i in keys else next(remaining)
                for i, x in enumerate(init)
            ]
            outputs = interpreter.run(body, body_consts, [*consts, *carry, *scanned], wanted)
            rows = {i: _rows_added_to(key, outputs[i]) for i, key in keys.items()}
            # Of a table of the stack that is scanned: rows are stacked, and not tables.
            stacks = [
                x
                if isinstance(x, RowSum) and x.looked_up and x.parts and x.carry is None
                else made_dense(x, eqn)
                for x in outputs[count:]
            ]
            return without(keys, outputs[:count]), (stacks, rows)

        return jax.lax.scan(step, dense_init, scanned_in, **scan.how)

    # A carry that is refused becomes dense, and what it is added to may then be refused too:
    # tried again without it, at most once for each carry.
    with muted():
        while keys:
            with trial() as refused:
                jax.eval_shape(functools.partial(run, keys), without(keys, init), scanned_in)
            if refused.isdisjoint(keys.values()):
                break
            keys = {i: key for i, key in keys.items() if key not in refused}
    carry, (stacks, rows) = run(keys, without(keys, init), scanned_in)
    dense_carry = iter(carry)
    totals = [
        x.plus(
            dataclasses.replace(rows[i], parts=_joined_rounds(rows[i].parts), looked_up=True)
        )
        if i in keys
        else next(dense_carry)
        for i, x in enumerate(init)
    ]
    return [*totals, *(_stack_of(x) if isinstance(x, RowSum) else x for x in stacks)]


def _rows_added_to(key: object, output: Value) -> RowSum:
    # Rows of slices with fixed bounds are better summed than stacked.
    additive = isinstance(output, RowSum) and output.carry is key
    if additive and (output.looked_up or not output.parts):
        return dataclasses.replace(output, carry=None)
    refuse(key)
    return RowSum(output.shape, output.dtype)


def _joined_rounds(parts: Sequence[IdsAndRows]) -> tuple[IdsAndRows, ...]:
    """Join stacked ids (length, n) and rows (length, n, *row) of the rounds of a loop."""
    return tuple(
        (ids.reshape(ids.size), rows.reshape(ids.size, *rows.shape[2:])) for ids, rows in parts
    )


def _stack_of(one: RowSum) -> RowSum:
    """Return the stack of arrays that are rows, whose ids (length, n) and rows are stacked."""
    length = one.parts[0][0].shape[0]
    leading = one.leading + 1
    total = dataclasses.replace(one, shape=(length, *one.shape), leading=leading)
    first = jnp.arange(length, dtype=id_dtype(total.count))[:, None] * one.count
    parts = tuple(
        (jnp.where(ids < one.count, first + ids.astype(first.dtype), total.count), rows)
        for ids, rows in one.parts
    )
    return dataclasses.replace(total, parts=_joined_rounds(parts))


# --- cond --------------------------------------------------------------------------------


def _cond_demand(
    eqn: JaxprEqn, wanted: Flags, interpreter: Interpreter, _: object
) -> list[bool]:
    flags = [
        interpreter.demand(branch, wanted).of(branch.invars) for branch, _ in branches_of(eqn)
    ]
    return [False] + [any(column) for column in zip(*flags, strict=True)]


def _cond(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    which, *operands = inputs
    branches = branches_of(eqn)
    is_empty = all(nothing_to_do(branch, operands) for branch, _ in branches)
    if is_empty and not looks_up_views(eqn, inputs):
        return None
    axes = interpreter.branching | varying_axes(which)
    interpreter = dataclasses.replace(interpreter, branching=axes)

    def outputs_of(branch: Opened) -> list[Value]:
        return interpreter.run(*branch, operands, wanted)

    # Branches of a cond must return arrays of one shape, so both are traced twice: once to see
    # how many rows each returns, then padded to the most of them.
    with muted():
        shapes = [jax.eval_shape(functools.partial(outputs_of, x)) for x in branches]
    common = [_common_rows(outputs) for outputs in zip(*shapes, strict=True)]

    def build(branch: Opened) -> Callable[[], list[Value]]:
        return lambda: [
            made_dense(x, eqn)
            if rows is None
            else dataclasses.replace(rows, parts=(x.refined(rows).concatenated(nse),))
            for x, (rows, nse) in zip(outputs_of(branch), common, strict=True)
        ]

    return list(jax.lax.switch(which, list(map(build, branches))))


def _common_rows(outputs: Sequence[Value]) -> tuple[RowSum | None, int]:
    """Return a result of the branches as rows, without any, and how many; or None: dense."""
    rows = [x for x in outputs if isinstance(x, RowSum)]
    if len(rows) < len(outputs) or any(x.carry is not rows[0].carry for x in rows):
        return None, 0
    looked_up = any(x.looked_up for x in rows)
    finest = max(rows, key=lambda x: x.fineness)
    common = dataclasses.replace(finest, looked_up=looked_up, parts=())
    return common, max(x.nse * common.count // x.count for x in rows)


CONTROL_FLOW_RULES: dict[str, Rule] = {
    "scan": Rule(_scan_demand, _scan),
    "cond": Rule(_cond_demand, _cond),
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
    return jax.tree.map(function, list(inputs))


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
    return _on_parts(inputs, lambda x: bound(eqn, [x])[0])


def _reshard_demand(eqn: JaxprEqn, wanted: Flags, *_: object) -> list[bool]:
    """Leave a gradient of which each device holds a summand to JAX, which makes it dense."""
    spec = parameter(eqn, "dst_sharding").spec
    is_summed = getattr(spec, "unreduced", None) or getattr(spec, "reduced", None)
    return [not is_summed and any(wanted)]


def _reshard(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    """For a row-sharded table, replicate ids and update rows on every device."""
    params = eqn.primitive.get_bind_params(eqn.params)
    (rows,) = inputs
    if not isinstance(rows, RowSum):
        return None
    sharding = parameter(eqn, "dst_sharding")
    mesh, row = sharding.mesh, sharding.spec[rows.leading :]

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

    def run(*arrays: jax.Array) -> list[Value]:
        outputs = interpreter.run(body, consts, arrays, sparse)
        return [
            x if isinstance(x, RowSum) and keep else made_dense(x, eqn)
            for x, keep in zip(outputs, sparse, strict=True)
        ]

    return jax.shard_map(
        run,
        in_specs=tuple(form.in_specs),
        out_specs=list(specs),
        **form.how,
    )(*(made_dense(x, eqn) for x in inputs))


COLLECTIVE_RULES: dict[str, Rule] = {
    "psum": Rule(same_wanted, _psum),
    "psum_invariant": Rule(same_wanted, _psum),
    "pvary": Rule(same_wanted, _cast),
    "pcast": Rule(same_wanted, _cast),
    "reshard": Rule(_reshard_demand, _reshard),
    # What comes in is a table on every device or a part of one: it is an array.
    "shard_map": Rule(none_wanted, _shard_map),
}
