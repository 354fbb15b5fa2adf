"""Run equations that run programs, with views among their operands.

| equation     | views                                                                       |
|--------------|-----------------------------------------------------------------------------|
| remat        | go in: what JAX recomputes reads tables from outside of it                  |
| scan         | go in as constants, as carries that do not change, and array by array of a  |
|              | stack; each tap has one more dimension, for the rounds                      |
| cond, switch | go into each branch; all branches share taps, as many as one of them needs  |
| shard_map    | go in if the table is on every device; each device has taps of its own      |
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec as P

from jmask._autodiff.needed import Flags, Needed
from jmask._autodiff.taps import Tap, Taps
from jmask._autodiff.views import TableView, View, element, view_of_table
from jmask._base.forms import (
    REMATS,
    Opened,
    aval_of,
    branches_of,
    called,
    is_recomputed_apart,
    recomputed_how,
    scan_of,
    shard_map_of,
)
from jmask._base.jaxprs import forwarded
from jmask._base.row_ids import id_dtype
from jmask._base.shardings import on_every_device, varying_axes, varying_over
from jmask._base.types import PyTree, Shaped, Value


class Runs(Protocol):
    """What runs the programs: `Forward`."""

    leaves: Sequence[Shaped]
    needed: Needed

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Value],
        inputs: Sequence[Value],
        taps: Taps,
        wanted: Flags,
    ) -> list[Value]: ...

    def array(
        self, x: Value, eqn: JaxprEqn | None, taps: Taps, is_constant: bool = False
    ) -> Value: ...


def _abstract(eqn: JaxprEqn) -> list[Value]:
    return [aval_of(v) for v in eqn.outvars]


def _in_trial(args: Sequence[Value], jaxpr: Jaxpr) -> list[Value]:
    """Return views as they are, and the abstract arrays that a program has for the others."""
    return [
        x if isinstance(x, View) else aval_of(v)
        for x, v in zip(args, jaxpr.invars, strict=True)
    ]


# --- remat --------------------------------------------------------------------------------


def _remat(
    forward: Runs, eqn: JaxprEqn, args: list[Value], taps: Taps, flags: Flags
) -> list[Value]:
    jaxpr, consts = called(eqn)
    if is_recomputed_apart(eqn):  # of a gradient that the program took itself
        return forward.run(jaxpr, consts, _behind_a_barrier(args, taps), taps, flags)
    views = {i: x for i, x in enumerate(args) if isinstance(x, View)}
    # What it returns as it came in may still be looked up in.
    passed = {i: views[s] for i, s in enumerate(forwarded(jaxpr)) if s in views}
    inner: list[PyTree] = []  # not what holds tracers: JAX keeps what it has traced

    def body(arrays: Sequence[Value] | None, plain: Sequence[Value]) -> tuple[PyTree, PyTree]:
        taps_inside = taps.inside(arrays)
        inner.append(taps_inside.specs)
        rest = iter(plain)
        inputs = [views[i] if i in views else next(rest) for i in range(len(args))]
        outs = forward.run(jaxpr, consts, inputs, taps_inside, flags)
        arrays_out = [
            forward.array(x, None, taps_inside, not flags[i])
            for i, x in enumerate(outs)
            if i not in passed
        ]
        return arrays_out, taps_inside.ids

    if taps.is_trial:
        body(None, [aval_of(v) for i, v in enumerate(jaxpr.invars) if i not in views])
        outs, ids = [aval_of(v) for i, v in enumerate(eqn.outvars) if i not in passed], []
    else:
        plain = [x for x in args if not isinstance(x, View)]
        outs, ids = jax.checkpoint(body, **recomputed_how(eqn))(taps.of_nested(), plain)
    taps.add(inner[-1], ids)
    rest = iter(outs)
    return [passed[i] if i in passed else next(rest) for i in range(len(eqn.outvars))]


def _behind_a_barrier(args: Sequence[Value], taps: Taps) -> list[Value]:
    """Return operands so that what is recomputed is not merged with what was computed."""
    if taps.is_trial:
        return list(args)
    # In a `shard_map` all that goes through one barrier comes out typed alike.
    groups: dict[frozenset[str], dict[int, jax.Array]] = defaultdict(dict)
    for i, x in enumerate(args):
        if isinstance(x, jax.Array):
            groups[varying_axes(x)][i] = x
    behind: dict[int, jax.Array] = {}
    for group in groups.values():
        behind |= lax.optimization_barrier(group)
    return [behind.get(i, x) for i, x in enumerate(args)]


# --- scan ---------------------------------------------------------------------------------


def _scan(
    forward: Runs, eqn: JaxprEqn, args: list[Value], taps: Taps, flags: Flags
) -> list[Value]:
    scan = scan_of(eqn)
    (jaxpr, body_consts), first, count = scan.body, scan.consts, scan.carry
    consts, init, scanned = args[:first], args[first : first + count], args[first + count :]
    passed = forwarded(jaxpr)
    kept = {i: x for i, x in enumerate(init) if isinstance(x, View) and passed[i] == first + i}
    stacks = {i: x for i, x in enumerate(scanned) if isinstance(x, View)}
    wanted, length = forward.needed.of_scan(eqn, flags), scan.how["length"]
    init = [
        forward.array(x, eqn, taps, not wanted[i]) for i, x in enumerate(init) if i not in kept
    ]
    inner: list[PyTree] = []  # not what holds tracers: JAX keeps what it has traced

    def step(carry: Sequence[Value], xs: PyTree) -> tuple[list[Value], PyTree]:
        number, plain, arrays = xs
        taps_inside = taps.inside(arrays)
        inner.append(taps_inside.specs)
        rest, others = iter(carry), iter(plain)
        inputs = [
            *consts,
            *(kept[i] if i in kept else next(rest) for i in range(count)),
            *(
                element(stacks[i], number) if i in stacks else next(others)
                for i in range(len(scanned))
            ),
        ]
        if taps.is_trial:
            inputs = _in_trial(inputs, jaxpr)
        outs = forward.run(jaxpr, body_consts, inputs, taps_inside, wanted)
        new = [
            forward.array(x, None, taps_inside, not wanted[i])
            for i, x in enumerate(outs[:count])
            if i not in kept
        ]
        stacked = zip(outs[count:], wanted[count:], strict=True)
        ys = [forward.array(x, None, taps_inside, not flag) for x, flag in stacked]
        return new, (ys, taps_inside.ids)

    plain = [x for i, x in enumerate(scanned) if i not in stacks]
    ids: PyTree
    if taps.is_trial:
        step(init, (None, plain, None))
        outs, ids = _abstract(eqn), []
    else:
        numbers = lax.iota(id_dtype(length), length)
        xs = numbers, plain, taps.of_nested()
        carry, (ys, ids) = lax.scan(step, init, xs, **scan.how)
        rest = iter(carry)
        outs = [*(None if i in kept else next(rest) for i in range(count)), *ys]

    def of_rounds(tap: Tap) -> Tap:
        return dataclasses.replace(tap, batch=(length, *tap.batch))

    taps.add(jax.tree.map(of_rounds, inner[-1]), ids)
    return [kept.get(i, x) for i, x in enumerate(outs)]


# --- cond ---------------------------------------------------------------------------------


def _cond(
    forward: Runs, eqn: JaxprEqn, args: list[Value], taps: Taps, flags: Flags
) -> list[Value]:
    which, *operands = args
    which = forward.array(which, eqn, taps, is_constant=True)
    branches = branches_of(eqn)

    def run(branch: Opened, inputs: Sequence[Value], taps: Taps) -> list[Value]:
        outs = forward.run(*branch, inputs, taps, flags)
        pairs = zip(outs, flags, strict=True)
        return [forward.array(x, None, taps, not flag) for x, flag in pairs]

    # 1. How many rows of each table a branch looks up; all branches return as many.
    trials = [taps.inside(None, rows_only=True) for _ in branches]
    for branch, trial in zip(branches, trials, strict=True):
        run(branch, _in_trial(operands, branch[0]), trial)
    keys = dict.fromkeys(tap.key for trial in trials for tap in trial.found())
    shared = [_shared(key, trials) for key in keys]
    if taps.is_trial:
        taps.add(shared, [])
        return _abstract(eqn)
    arrays = dict(zip(keys, taps.of_nested() or (), strict=True))

    # 2. Each with its part of the taps, and ids that are padded.
    def with_taps(branch: Opened, trial: Taps) -> Callable[[], tuple[PyTree, PyTree]]:
        def build() -> tuple[list[Value], list[jax.Array]]:
            used: dict[object, int] = defaultdict(int)

            def part(tap: Tap) -> jax.Array:
                begin = used[tap.key]
                used[tap.key] = begin + tap.count
                rows = arrays[tap.key][begin : begin + tap.count]
                return tap.sharded(rows.reshape(tap.whole_shape))

            inside = taps.inside(jax.tree.map(part, trial.specs), rows_only=True)
            outs = run(branch, operands, inside)
            found = list(zip(inside.found(), jax.tree.leaves(inside.ids), strict=True))
            return outs, [_padded(forward, tap, found) for tap in shared]

        return build

    cases = [with_taps(*pair) for pair in zip(branches, trials, strict=True)]
    outs, ids = lax.switch(which, cases)
    taps.add(shared, ids)
    return outs


def _shared(key: object, branches: Sequence[Taps]) -> Tap:
    """Return the tap that branches share for all of theirs with this key."""
    of_branches = [[tap for tap in taps.found() if tap.key == key] for taps in branches]
    every = [tap for found in of_branches for tap in found]
    count = max(sum(tap.count for tap in found) for found in of_branches)
    varies = frozenset[str]().union(*(tap.varies for tap in every))
    return dataclasses.replace(
        every[0],
        shape=(count, *every[0].row),
        rows=count,
        kind="rows",
        varies=varies,
        sharding=None,
        batch=(),
    )


def _padded(forward: Runs, shared: Tap, found: Sequence[tuple[Tap, jax.Array]]) -> jax.Array:
    """Return the ids of a branch, with padding for rows that it does not look up."""
    table = forward.leaves[shared.table]
    rows = shared.rows_of(table.shape)
    of_key = [x for tap, x in found if tap.key == shared.key]
    ids = [on_every_device(x, jax.typeof(x)).reshape(-1) for x in of_key]
    missing = shared.rows - sum(x.shape[0] for x in ids)
    ids.append(jnp.full((missing,), rows, id_dtype(rows)))
    return jnp.concatenate([varying_over(shared.varies, x) for x in ids])


# --- shard_map ----------------------------------------------------------------------------


def _shard_map(
    forward: Runs, eqn: JaxprEqn, args: list[Value], taps: Taps, flags: Flags
) -> list[Value]:
    form = shard_map_of(eqn)
    jaxpr, consts = form.body
    axes = frozenset(form.how["axis_names"])
    devices = math.prod(form.how["mesh"].shape[axis] for axis in axes)
    # Of a table that is whole on every device rows are looked up there; others are arrays.
    tables = {
        i: x for i, x in enumerate(args) if isinstance(x, TableView) and form.in_specs[i] == P()
    }
    arrays = [
        x.array if i in tables else forward.array(x, eqn, taps) for i, x in enumerate(args)
    ]
    inner: list[PyTree] = []  # not what holds tracers: JAX keeps what it has traced

    def body(of_taps: Sequence[Value] | None, *inputs: Value) -> tuple[list[Value], PyTree]:
        taps_inside = taps.inside(of_taps, rows_only=True)
        inner.append(taps_inside.specs)
        views = [
            view_of_table(tables[i].number, x) if i in tables else x
            for i, x in enumerate(inputs)
        ]
        outs = forward.run(jaxpr, consts, views, taps_inside, flags)
        pairs = zip(outs, flags, strict=True)
        outs = [forward.array(x, None, taps_inside, not flag) for x, flag in pairs]
        return outs, jax.tree.map(lambda x: varying_over(axes, x), taps_inside.ids)

    def by_device(tap: Tap) -> P:
        return P(*(None,) * len(tap.batch), tuple(sorted(axes)))

    # A trial in any case: of each tap inside the spec is to be known before it runs.
    body(None, *(aval_of(v) for v in jaxpr.invars))
    if taps.is_trial:
        outs, ids = _abstract(eqn), list[PyTree]()
    else:
        specs = jax.tree.map(by_device, inner[-1])
        outs, ids = jax.shard_map(
            body,
            in_specs=(specs, *form.in_specs),
            out_specs=(list(form.out_specs), specs),
            **form.how,
        )(taps.of_nested(), *arrays)

    def of_all(tap: Tap) -> Tap:
        shape = devices * tap.shape[0], *tap.shape[1:]
        rows, varies = devices * tap.rows, tap.varies - axes
        return dataclasses.replace(tap, shape=shape, rows=rows, varies=varies)

    taps.add(jax.tree.map(of_all, inner[-1]), ids)
    return outs


RULES = dict.fromkeys(REMATS, _remat) | {
    "scan": _scan,
    "cond": _cond,
    "shard_map": _shard_map,
}
