"""Run equations that run programs, with views among their operands.

| equation     | views                                                                       |
|--------------|-----------------------------------------------------------------------------|
| remat        | go in: what JAX recomputes reads tables from outside of it                  |
| scan         | go in as constants, as carries that do not change, and array by array of a  |
|              | stack; each tap has one more dimension, for the rounds                      |
| cond, switch | go into each branch; all branches share taps, as many as one of them needs. |
|              | Branches by platform (`lax.platform_dependent`) are branches, too           |
| shard_map    | go in if the table is on every device; each device has taps of its own for  |
|              | rows that differ from one to the other                                      |
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from jmask._autodiff.taps import Tap
from jmask._autodiff.views import Positions, Reading, TableView, View, tables_of, view_of_table
from jmask._base.array_types import is_known
from jmask._base.forms import (
    PLAIN_CALLS,
    REMATS,
    Opened,
    aval_of,
    bodies_of,
    branches_of,
    called,
    is_recomputed_apart,
    name_of,
    recomputed_how,
    scan_of,
    shard_map_of,
    switch_like,
    writes_reference,
)
from jmask._base.jaxprs import forwarded
from jmask._base.row_ids import id_dtype
from jmask._base.shardings import on_every_device, varying_axes
from jmask._base.types import Argument, ArrayFunction, Atom, PyTree

if TYPE_CHECKING:  # it runs these rules
    from jmask._autodiff.forward import Forward

# --- what a gradient goes through -----------------------------------------------------------
#
#     y = argmax x        no gradient comes through y: x is not needed for it
#     z = sum (x * y)     it comes through x
#
# A table that is used without a gradient, in a metric or behind a `stop_gradient`, is an array
# there, and its gradient is rows all the same.

Flags = Sequence[bool]
"""Of each variable whether a gradient is taken of it, or comes through it."""

_NO_GRADIENT = frozenset("stop_gradient floor ceil round sign nextafter".split())


class Needed:
    """Finds the variables that a gradient goes through; remembers programs that run twice."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, tuple[bool, ...]], tuple[Jaxpr, set[Var]]] = {}

    def within(self, jaxpr: Jaxpr, wanted: Flags) -> set[Var]:
        """Return the variables through which the gradient of the wanted outputs goes."""
        key = "gradient", id(jaxpr), tuple(wanted)
        if key in self._known:
            return self._known[key][1]
        pairs = zip(jaxpr.outvars, wanted, strict=True)
        live = {v for v, flag in pairs if flag and _is_real(v)}
        for eqn in reversed(jaxpr.eqns):
            flags = [v in live for v in eqn.outvars]
            is_needed = any(flags) and eqn.primitive.name not in _NO_GRADIENT
            if not is_needed and not writes_reference(eqn):
                continue
            name, of_inputs = name_of(eqn), [True] * len(eqn.invars)
            if name in (*PLAIN_CALLS, *REMATS, "cond", "scan"):
                flags = self.outputs_of_scan(eqn, flags) if name == "scan" else flags
                each = [self._inputs(body, flags) for body, _ in bodies_of(eqn)]
                of_bodies = [any(x) for x in zip(*each, strict=True)]
                of_inputs = [False] * (len(eqn.invars) - len(of_bodies)) + of_bodies
            inputs = zip(eqn.invars, of_inputs, strict=True)
            live.update(v for v, flag in inputs if flag and _is_real(v))
        self._known[key] = jaxpr, live
        return live

    def only_summed(self, jaxpr: Jaxpr, outputs: Flags) -> set[Var]:
        """Return the variables that one sum needs, and nothing else.

        Args:
            outputs: which outputs are such where the program is called.
        """
        key = "sum", id(jaxpr), tuple(outputs)
        if key in self._known:
            return self._known[key][1]
        variables = lambda atoms: [v for v in atoms if not isinstance(v, Literal)]
        uses = Counter(variables(jaxpr.outvars))
        for eqn in jaxpr.eqns:
            uses.update(variables(eqn.invars))
        pairs = zip(jaxpr.outvars, outputs, strict=True)
        summed = {v for v in variables(v for v, flag in pairs if flag) if uses[v] == 1}
        for eqn in reversed(jaxpr.eqns):
            name = eqn.primitive.name
            waits = name in ("convert_element_type", "mul") and eqn.outvars[0] in summed
            if name == "reduce_sum" or waits:
                summed.update(v for v in variables(eqn.invars) if uses[v] == 1)
        self._known[key] = jaxpr, summed
        return summed

    def outputs_of_scan(self, eqn: JaxprEqn, flags: Flags) -> list[bool]:
        """Return which outputs of its body a scan needs, all the way around."""
        scan, wanted = scan_of(eqn), list(flags)
        while True:  # each round adds a carry, or is the last
            inputs = self._inputs(scan.body[0], wanted)[scan.consts :]
            pairs = zip(wanted[: scan.carry], inputs[: scan.carry], strict=True)
            carry = [a or b for a, b in pairs]
            if carry == wanted[: scan.carry]:
                return wanted
            wanted[: scan.carry] = carry

    def _inputs(self, jaxpr: Jaxpr, flags: Flags) -> list[bool]:
        live = self.within(jaxpr, flags)
        return [v in live for v in jaxpr.invars]


def _is_real(v: Atom) -> TypeGuard[Var]:
    is_array = isinstance(v, Var) and hasattr(aval_of(v), "dtype")
    return is_array and jnp.issubdtype(aval_of(v).dtype, jnp.inexact)


# --- what runs other programs ---------------------------------------------------------------


def _in_trial(args: Sequence[Argument], jaxpr: Jaxpr) -> list[Argument]:
    """Return views as they are, and the abstract arrays that a program has for the others."""
    pairs = zip(args, jaxpr.invars, strict=True)
    return [x if isinstance(x, View) else aval_of(v) for x, v in pairs]


def _merged(known: Mapping[int, Argument], others: Sequence[Argument]) -> list[Argument]:
    """Return known values at their places, and the others in the places that are left."""
    rest, count = iter(others), len(known) + len(others)
    return [known[i] if i in known else next(rest) for i in range(count)]


# --- remat --------------------------------------------------------------------------------


def _remat(
    forward: "Forward", eqn: JaxprEqn, args: list[Argument], flags: Flags
) -> list[Argument]:
    program, taps = called(eqn), forward.taps
    if is_recomputed_apart(eqn):  # of a gradient that the program took itself
        # Behind a barrier XLA does not merge what is recomputed with what was computed. In a
        # `shard_map` all that goes through one barrier comes out typed alike.
        groups: dict[frozenset[str], dict[int, jax.Array]] = defaultdict(dict)
        for i, x in enumerate(args):
            if isinstance(x, jax.Array) and not taps.is_trial:
                groups[varying_axes(x)][i] = x
        behind: dict[int, jax.Array] = {}
        for group in groups.values():
            behind |= lax.optimization_barrier(group)
        return forward.run(program, [behind.get(i, x) for i, x in enumerate(args)], flags)
    views = {i: x for i, x in enumerate(args) if isinstance(x, View)}
    # Inputs that it returns unchanged stay views.
    passed = {i: views[s] for i, s in enumerate(forwarded(program[0])) if s in views}
    specs, arrays = taps.next_nested()

    def body(arrays: PyTree, plain: Sequence[Argument]) -> tuple[list[Argument], PyTree]:
        inside = taps.inside(specs, arrays)
        outs = forward.arrays(program, _merged(views, plain), flags, passed, inside)
        return outs, inside.record

    plain = [x for x in args if not isinstance(x, View)]
    run = body if taps.is_trial else jax.checkpoint(body, **recomputed_how(eqn))
    outs, record = run(arrays, plain)
    taps.record.append(record)
    return _merged(passed, outs)


# --- scan ---------------------------------------------------------------------------------


def _scan(
    forward: "Forward", eqn: JaxprEqn, args: list[Argument], flags: Flags
) -> list[Argument]:
    scan, taps = scan_of(eqn), forward.taps
    jaxpr, first, count = scan.body[0], scan.consts, scan.carry
    consts, init, scanned = args[:first], args[first : first + count], args[first + count :]
    passed = forwarded(jaxpr)
    kept = {i: x for i, x in enumerate(init) if isinstance(x, View) and passed[i] == first + i}
    stacks = {i: x for i, x in enumerate(scanned) if isinstance(x, View)}
    wanted, length = forward.needed.outputs_of_scan(eqn, flags), scan.length
    init = [forward.array(x, not wanted[i]) for i, x in enumerate(init) if i not in kept]
    specs, arrays = taps.next_nested()

    def step(carry: list[Argument], xs: PyTree) -> tuple[list[Argument], PyTree]:
        number, plain, arrays = xs
        inside = taps.inside(specs, arrays)
        elements = {i: _element(x, number) for i, x in stacks.items()}
        inputs = [*consts, *_merged(kept, carry), *_merged(elements, plain)]
        if taps.is_trial:
            inputs = _in_trial(inputs, jaxpr)
        outs = forward.arrays(scan.body, inputs, wanted, kept, inside)
        new = count - len(kept)
        return outs[:new], (outs[new:], inside.record)

    plain = [x for i, x in enumerate(scanned) if i not in stacks]
    if taps.is_trial:
        begin, needs = len(forward.needs), forward.needs
        _, (_, record) = step(init, (None, plain, None))
        # The rounds read different arrays of a stack, together `length` times the rows
        # of one: of a stack of layers, every row. An open number of rounds, as of examples in a
        # batch, multiplies nothing.
        tables = tables_of(stacks.values() if is_known(length) else ())
        for k, need in enumerate(needs[begin:], begin):
            if need.rows and need.table in tables:
                needs[k] = need._replace(rows=need.rows * length)
        of_rounds = lambda tap: dataclasses.replace(tap, batch=(length, *tap.batch))
        outs, record = [aval_of(v) for v in eqn.outvars], jax.tree.map(of_rounds, record)
    else:
        xs = lax.iota(id_dtype(length), length), plain, arrays
        carry, (ys, record) = lax.scan(step, init, xs, **scan.how)
        outs = [*_merged(kept, carry), *ys]
    taps.record.append(record)
    return [kept.get(i, x) for i, x in enumerate(outs)]


def _element(x: View, number: jax.Array) -> View:
    """Return one array of a stack of them, by its number."""

    def reading(p: Positions) -> Reading:
        at = lambda: ([number, *p.along], p.valid)
        return [(x, Positions(p.count + 1, p.entries, at))], lambda rows: rows

    def make(made: ArrayFunction) -> jax.Array:
        return lax.dynamic_index_in_dim(made(x), number, 0, keepdims=False)

    return View(
        x.shape[1:],
        x.dtype,
        reading,
        make,
        x.tables,
        x.equations,
        is_lookup=x.is_lookup,
        varies=x.varies,
        computed_by=x.computed_by,
    )


# --- cond ---------------------------------------------------------------------------------


def _cond(
    forward: "Forward", eqn: JaxprEqn, args: list[Argument], flags: Flags
) -> list[Argument]:
    (which, *operands), taps = args, forward.taps
    which = forward.array(which, is_constant=True)
    branches = branches_of(eqn)

    # 1. How many rows of each table a branch looks up; all branches return as many.
    trials = [taps.inside(None, None, rows_only=True) for _ in branches]
    for branch, trial in zip(branches, trials, strict=True):
        forward.arrays(branch, _in_trial(operands, branch[0]), flags, taps=trial)
    of_branches: list[list[Tap]] = [jax.tree.leaves(trial.record) for trial in trials]
    every = [tap for of_one in of_branches for tap in of_one]
    keys, shared = dict.fromkeys(tap.key for tap in every), list[Tap]()
    for key in keys:
        alike = [tap for tap in every if tap.key == key]
        # Sizes that are not known are not compared: there is space for all that differ.
        counts = {sum(x.count for x in of_one if x.key == key) for of_one in of_branches}
        count = max(counts) if is_known(*counts) else sum(counts)
        varies = frozenset[str]().union(*(tap.varies for tap in alike))
        table, leading, row, dtype = key
        width = alike[0].width
        tap = Tap(table, leading, (count, *row), dtype, count, varies=varies, width=width)
        shared.append(tap)
    if taps.is_trial:
        taps.record.append(shared)
        return [aval_of(v) for v in eqn.outvars]
    arrays = dict(zip(keys, taps.next_nested()[1], strict=True))

    # 2. Each with its part of the taps, and ids that are padded.
    def with_taps(branch: Opened, specs: PyTree) -> Callable[[], tuple[PyTree, PyTree]]:
        def build() -> tuple[list[Argument], list[jax.Array]]:
            used: dict[object, int] = defaultdict(int)

            def part(tap: Tap) -> jax.Array:
                begin = used[tap.key]
                used[tap.key] = begin + tap.count
                rows = arrays[tap.key][begin : begin + tap.count]
                return tap.in_shape(rows)

            inside = taps.inside(specs, jax.tree.map(part, specs), rows_only=True)
            outs = forward.arrays(branch, operands, flags, taps=inside)
            pairs = zip(jax.tree.leaves(specs), jax.tree.leaves(inside.record), strict=True)
            ids = defaultdict(list)
            for tap, x in pairs:
                ids[tap.key].append(x)
            return outs, [_padded(forward, tap, ids[tap.key]) for tap in shared]

        return build

    cases = [with_taps(x, trial.record) for x, trial in zip(branches, trials, strict=True)]
    outs, ids = switch_like(eqn, which, cases)
    taps.record.append(ids)
    return outs


def _padded(forward: "Forward", shared: Tap, ids_of_taps: Sequence[jax.Array]) -> jax.Array:
    """Return the ids of a branch, with padding for rows that it does not look up."""
    rows = shared.rows_of(forward.leaves[shared.table].shape)
    ids = [on_every_device(x).reshape(-1) for x in ids_of_taps]
    missing = shared.rows - sum(x.shape[0] for x in ids)
    ids.append(jnp.full((missing,), rows, id_dtype(rows)))
    return jnp.concatenate([shared.varying(x) for x in ids])


# --- shard_map ----------------------------------------------------------------------------


def _shard_map(
    forward: "Forward", eqn: JaxprEqn, args: list[Argument], flags: Flags
) -> list[Argument]:
    form, taps = shard_map_of(eqn), forward.taps
    axes = frozenset(form.how["axis_names"])
    # Of a table that is whole on every device rows are looked up there; others are arrays.
    tables = {
        i: x for i, x in enumerate(args) if isinstance(x, TableView) and form.in_specs[i] == P()
    }
    inputs = [x.array if i in tables else forward.array(x) for i, x in enumerate(args)]
    specs, arrays = taps.next_nested()

    def body(arrays: PyTree, *inputs: Argument) -> tuple[list[Argument], PyTree]:
        inside = taps.inside(specs, arrays, rows_only=True)
        views = {i: view_of_table(x.number, inputs[i]) for i, x in tables.items()}
        with_views = [views.get(i, x) for i, x in enumerate(inputs)]
        return forward.arrays(form.body, with_views, flags, taps=inside), inside.record

    def axes_of(tap: Tap) -> tuple[str, ...]:
        """Return the axes over which rows differ: all of them, if types do not say."""
        return tuple(sorted(tap.varies & axes if form.how["check_vma"] else axes))

    def on_all_devices(tap: Tap) -> Tap:
        devices = math.prod(form.how["mesh"].shape[axis] for axis in axes_of(tap))
        shape = devices * tap.shape[0], *tap.shape[1:]
        return dataclasses.replace(tap, shape=shape, rows=devices * tap.rows)

    if taps.is_trial:
        _, record = body(None, *_in_trial(inputs, form.body[0]))
        outs, record = [aval_of(v) for v in eqn.outvars], jax.tree.map(on_all_devices, record)
    else:
        # Of the loops that a tap is in, those outside of the `shard_map` have taken their part.
        by_device = lambda tap, x: P(*(None,) * (x.ndim - len(tap.shape)), axes_of(tap))
        places = jax.tree.map(by_device, specs, arrays)
        outs, record = jax.shard_map(
            body,
            in_specs=(places, *form.in_specs),
            out_specs=(list(form.out_specs), places),
            **form.how,
        )(arrays, *inputs)
    taps.record.append(record)
    return outs


RULES = dict.fromkeys(REMATS, _remat) | {"scan": _scan, "cond": _cond, "shard_map": _shard_map}
