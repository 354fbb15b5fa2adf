"""Apply a lazy update to the parameters in one pass over the rows.

    update, then add        gather rows; compute; scatter state; scatter-add updates
    in one pass             one scatter with the optimizer as its combiner, for each table

The shapes of the program that was proved, whose number of rows is open, take it apart:

    count -> count + 1 -> 1 - 0.9 ** count        ()          computed before the pass
    g -> g * g -> sum                             ()          of the gradient alone: so is this
    full_like(g, 0.1)                             (rows, D)   entry by entry: one number
    m, g  -> 0.9 m + 0.1 g -> / (1 - 0.9 ** c)    (rows, D)   entry by entry
    mean(g * g, 1)                                (rows,)     row by row

Where all is entry by entry it is the combiner of a scatter, if that has room for the scalars
that change from step to step: it takes one operand fewer than there are tables. Adam with a
fixed rate needs two scalars, and a scatter of parameter and both moments takes two; constants
are compiled in and need none. A value made of the gradient alone (clipped by the norm of all
gradients) can replace the gradient, which saves its scalars. A mask is one operand more.

Everything else is computed on gathered rows; see `_update_of`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Var

from jmask._base.array_types import (
    added,
    is_complex,
    is_known,
    is_narrow,
    joint_dtype,
    trailing,
)
from jmask._base.forms import aval_of, holds_jaxprs, parameter
from jmask._base.jaxprs import ARITHMETIC, bound, interpret, needed_for, read, run
from jmask._base.shardings import explicit_mesh
from jmask._base.types import Argument, Atom, Function, PyTree
from jmask._kernels import tuning
from jmask._kernels.gathered_rows import gathered, scaled
from jmask._kernels.lines import marked, unmarked
from jmask._kernels.rows import add_rows, gather_unique_rows, ids_after_reading, set_rows
from jmask._kernels.scatter_update import entry_by_entry, update_elementwise
from jmask._kernels.sharded_rows import summed_over_rows
from jmask._kernels.update_rows import (
    ADDITION,
    RowUpdate,
    Update,
    add_to_rows,
    updated_together,
)
from jmask._lazy.checks import keep_valid, unchanged_where_masked
from jmask._lazy.open_rows import Dimension, axes_of_rows, params_with_sizes
from jmask._lazy.row_local import RowLocal
from jmask._lazy.step import LazyStep, Leaf, with_row
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import stored_values


@dataclasses.dataclass(frozen=True)
class Replaced:
    """In place of an update, the parameter that it is added to already."""

    param: jax.Array


def applied(step: LazyStep) -> tuple[PyTree, PyTree]:
    """Return updates and state, of tables that are updated in one pass what they become."""
    parts = _taken_apart(step)
    combiners: dict[int, Combiner] = {}
    if parts is not None:
        for table in parts.proof.rows:
            combiner = _combiner(step, parts, table, by_rows=table in parts.proof.by_rows)
            if combiner is not None:
                combiners[table] = combiner
    if parts is None or len(combiners) < len(parts.proof.rows):
        return step.update()
    leaves, proof, jaxpr = step.leaves, parts.proof, parts.proof.program.jaxpr

    # --- before the pass: what does not depend on rows, or on the gradient alone
    sources = {table: c.source for table, c in combiners.items()}
    computed = {v for table, v in sources.items() if v is not jaxpr.invars[table]}
    sums = {table: _sums_in_rounds(leaves[table], parts, table) for table in combiners}
    known = dict(zip(jaxpr.constvars, proof.program.consts, strict=True))
    for of_table in sums.values():
        known |= of_table or {}
    eqns = [eqn for eqn in jaxpr.eqns if known.keys().isdisjoint(eqn.outvars)]
    shared = [v for eqn in eqns for v in eqn.outvars if v not in proof.owners]
    before, needed = needed_for([*shared, *computed], eqns)
    for v, leaf in zip(jaxpr.invars, leaves, strict=True):
        if leaf.table is None:
            known[v] = leaf.value
        elif v in needed:
            known[v] = leaf.to_inner(stored_values(leaf.coalesced_value))
    tables = {proof.owners[v] for v in needed if v in proof.owners}
    _run(before, known, {proof.rows[i]: leaves[i].coalesced_value.nse for i in tables})

    # --- the pass
    results: dict[int, Argument] = {}
    updates: list[RowUpdate | list[jax.Array]] = []
    for table, c in combiners.items():
        leaf, scalars = leaves[table], [known[v] for v in c.scalars]
        gradient = leaf.value
        # Rows of equal ids are summed here only if something was computed of the sums. Then
        # nothing is gained by adding them one at a time.
        if c.source in known:
            gradient = leaf.coalesced_value.with_values(leaf.from_inner(known[c.source]))
            c = c._replace(is_linear=False)
        updates.append(_update_of(c, [leaves[i] for i in c.places], gradient, scalars))
    of_rows = iter(updated_together([x for x in updates if isinstance(x, RowUpdate)]))
    for c, update in zip(combiners.values(), updates, strict=True):
        new = next(of_rows) if isinstance(update, RowUpdate) else update
        for i, x in zip(c.places, new, strict=True):
            given: Argument = leaves[i].as_given(x)  # an array, as `x` is
            results[i] = Replaced(given) if leaves[i].kind == "param" else given
    for i, (leaf, output) in enumerate(zip(leaves, parts.outputs, strict=False)):
        if leaf.table is None and leaf.kind == "state":
            results[i] = keep_valid(read(known, output), leaf.value, leaf.valid)
        elif leaf.table is None and leaf.kind == "param":
            results[i] = unchanged_where_masked(read(known, output), leaf.valid)
    gradient_tree, state_tree, *_ = step.trees
    of_kind = lambda kind: [results[i] for i, x in enumerate(leaves) if x.kind == kind]
    return gradient_tree.unflatten(of_kind("param")), state_tree.unflatten(of_kind("state"))


# --- the update, taken apart -------------------------------------------------------------


class Parts(NamedTuple):
    """The equations of a proved update, by what they compute."""

    proof: RowLocal
    outputs: list[Atom]  # what each leaf becomes; of a parameter, what is added to it
    from_gradient: set[Var]  # rows or entries that are made of a gradient alone
    # Of each table what is computed over its gradient and shared.
    reduced: dict[int, list[JaxprEqn]]
    equations: dict[int, list[JaxprEqn]]  # that make rows or entries of each table
    arithmetic: dict[Var, tuple[int, JaxprEqn]]  # that makes a shared variable, by its place
    constants: dict[Var, Argument]  # shared numbers that are the same in each step


def _taken_apart(step: LazyStep) -> Parts | None:
    """Return the parts of an update, or None if one pass cannot do it.

    It does not where something shared is computed of old rows. Outside jit a scatter with the
    optimizer inside would be compiled anew in each step.
    """
    proof, values = step.proof, [x.value for x in step.leaves]
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(values))
    if proof is None or not is_traced or any(values[i].nse == 0 for i in proof.rows):
        return None
    jaxpr, owners = proof.program.jaxpr, proof.owners
    from_gradient = {jaxpr.invars[i] for i in proof.rows}
    reduced: dict[int, list[JaxprEqn]] = {}
    equations: dict[int, list[JaxprEqn]] = {table: [] for table in proof.rows}
    arithmetic: dict[Var, tuple[int, JaxprEqn]] = {}
    for place, eqn in enumerate(jaxpr.eqns):
        operands = {v for v in eqn.invars if isinstance(v, Var) and v in owners}
        is_from_gradient = operands <= from_gradient
        if not owners.keys() & {*eqn.outvars}:
            if not is_from_gradient:
                return None
            for table in {owners[v] for v in operands}:
                reduced.setdefault(table, []).append(eqn)
            if eqn.primitive.name in _CHEAP:
                arithmetic[eqn.outvars[0]] = place, eqn
            continue
        is_mixed = len({owners.get(v) for v in (*operands, *eqn.outvars)}) > 1
        if is_mixed or eqn.effects or holds_jaxprs(eqn):
            return None
        equations[owners[eqn.outvars[0]]].append(eqn)
        if is_from_gradient:
            from_gradient.update(eqn.outvars)
    constants: dict[Var, Argument] = {
        v: np.asarray(x, aval_of(v).dtype)
        for v, x in proof.known.items()
        if x is not None and not aval_of(v).ndim
    }
    outputs = [*jaxpr.outvars, *jaxpr.outvars[: len(step.gradients)]]
    return Parts(proof, outputs, from_gradient, reduced, equations, arithmetic, constants)


def _run(
    eqns: Sequence[JaxprEqn], values: dict[Var, Argument], numbers: Mapping[Dimension, int]
) -> None:
    """Add results of equations to `values`: of so many rows of tables, or of entries."""

    def rule(eqn: JaxprEqn, values: list[jax.Array]) -> Sequence[jax.Array]:
        if eqn.primitive.name in ARITHMETIC:
            return bound(eqn, values)
        if not numbers and any(map(axes_of_rows, eqn.outvars)):
            return values[:1]  # a fill: one entry stands for all
        return bound(eqn.replace(params=params_with_sizes(eqn, numbers)), values)

    run(eqns, values, rule)


def _sums_in_rounds(leaf: Leaf, parts: Parts, table: int) -> dict[Var, jax.Array] | None:
    """Return what is summed over a gradient whose rows go to their shards in rounds.

    None if they do not go in rounds, or if what is computed over all rows is not a sum of what
    the gradient has in each.
    """
    eqns = parts.reduced.get(table, [])
    if leaf.exchange is None or not eqns:
        return None
    operands = [v for eqn in eqns for v in eqn.invars]
    chosen, needed = needed_for(operands, parts.equations[table])
    made = {v for eqn in chosen for v in eqn.outvars}
    inputs = needed.keys() - made - parts.constants.keys()
    are_sums = all(x.primitive.name == "reduce_sum" and 0 in parameter(x, "axes") for x in eqns)
    if len(inputs) != 1 or not are_sums:
        return None
    (gradient,), wanted = inputs, [eqn.outvars[0] for eqn in eqns]
    constants, dimension = parts.constants, parts.proof.rows[table]

    def sums(rows: jax.Array) -> list[jax.Array]:
        values: dict[Var, Argument] = constants | {gradient: rows}
        _run([*chosen, *eqns], values, {dimension: rows.shape[0]})
        return [values[v] for v in wanted]

    g = leaf.value
    totals = summed_over_rows(leaf.exchange, g.row_ids(), g.values, g.shape[0], sums)
    return dict(zip(wanted, totals, strict=True))


# What may be computed again for each entry.
_CHEAP = frozenset("add convert_element_type div max min mul neg sub".split())


# --- combiners ---------------------------------------------------------------------------


class Combiner(NamedTuple):
    """A way to compute new rows of a table."""

    places: list[int]  # of the leaves that are replaced: state and parameters of one table
    source: Var  # the gradient, or what is made of it
    scalars: list[Var]  # shared numbers
    # Rows of the leaves, of `source`, and `scalars` -> new rows, of a parameter what is added;
    # or entries, if the table is updated entry by entry.
    function: Function
    is_elementwise: bool
    # Whether the result is what is added to a parameter, is not computed of that, and is linear
    # in the gradient: rows of equal ids may be added one at a time.
    is_linear: bool
    # Leaves whose old rows are read before they are written; see `LazyStep.read_first`.
    read_first: frozenset[int]


def _combiner(step: LazyStep, parts: Parts, table: int, *, by_rows: bool) -> Combiner | None:
    """Return how to compute new rows of a table, or None if it takes more than one pass.

    It starts from the gradient if one scatter, or a linear step, computes the rows from that;
    else from the first such value made of the gradient alone, as one clipped by a norm; else
    from the gradient.

    Args:
        by_rows: whether to compute with rows that are gathered, as for what is more than
            arithmetic on entries.
    """
    leaves, table_of, constants = step.leaves, parts.proof.owners, parts.constants
    dimension, jaxpr = parts.proof.rows[table], parts.proof.program.jaxpr
    read_first = frozenset(step.read_first.values())
    of_table = [i for i, x in enumerate(leaves) if x.table == table and x.kind != "gradient"]
    places = sorted(of_table, key=lambda i: leaves[i].kind != "param")  # parameters first
    inputs, new = [jaxpr.invars[i] for i in places], [parts.outputs[i] for i in places]
    wanted = [v for v in new if isinstance(v, Var)]  # all of them: no literal has rows

    def evaluated(
        chosen: Sequence[JaxprEqn], given: Sequence[Var], *arrays: jax.Array
    ) -> list[jax.Array]:
        # JAX keeps what calls this: it closes over no array that is traced, as a constant of
        # the proof may be.
        values: dict[Var, Argument] = constants | dict(zip(given, arrays, strict=True))
        if not by_rows:
            _run(chosen, values, {})
            return [values[v] for v in wanted]
        values |= {v: with_row(values[v], aval_of(v).shape[1:]) for v in given if v in table_of}
        _run(chosen, values, {dimension: arrays[0].shape[0]})
        old = zip(wanted, arrays, strict=False)
        return [with_row(values[v], x.shape[1:]) for v, x in old]

    equations, gradient = parts.equations[table], jaxpr.invars[table]
    made = [v for e in equations for v in e.outvars if v in parts.from_gradient]
    first: Combiner | None = None
    # What is made of a gradient that goes to its shards in rounds is made of what they bring.
    is_made_first = not by_rows and leaves[table].exchange is None
    for source in (gradient, *(made if is_made_first else ())):
        chosen, needed = needed_for(wanted, equations, source)
        scalars = [v for v in needed if v not in table_of and v not in constants]
        more, scalars = _with_fewer_scalars(scalars, parts)
        if any(aval_of(v).ndim for v in scalars):
            break
        if source is not gradient and gradient in needed:
            continue
        chosen = [*more, *chosen]
        function = functools.partial(evaluated, chosen, (*inputs, source, *scalars))
        is_step = [leaves[i].kind for i in places] == ["param"] and inputs[0] not in needed
        is_linear = is_step and all(_scales(eqn, table_of) for eqn in chosen)
        way = Combiner(places, source, scalars, function, not by_rows, is_linear, read_first)
        # A scatter has room for so many scalars, and is of one dtype.
        dtypes = {leaves[i].value.dtype for i in places} | {aval_of(v).dtype for v in scalars}
        has_room = len(scalars) + (leaves[table].valid is not None) < len(places)
        fits = not by_rows and has_room and dtypes == {aval_of(source).dtype}
        if fits or is_linear:
            return way
        first = first or way
    # Only where rows are gathered can a write be made to come after a read.
    if not by_rows and not read_first.isdisjoint(places):
        return _combiner(step, parts, table, by_rows=True)
    return first


def _with_fewer_scalars(scalars: list[Var], parts: Parts) -> tuple[list[JaxprEqn], list[Var]]:
    """Return equations, and fewer scalars that they compute the given ones of.

    -rate and rate * decay are two scalars, and the rate is one. Powers, as in a bias
    correction, are computed once: in a combiner they would be for each entry, and no kernel of
    a TPU has them of scalars.
    """
    chosen: list[JaxprEqn] = []
    while True:
        made = dict(sorted(parts.arithmetic[v] for v in scalars if v in parts.arithmetic))
        operands = [v for e in made.values() for v in e.invars if isinstance(v, Var)]
        others = [v for v in scalars if v not in parts.arithmetic]
        others += [v for v in operands if v not in parts.constants]
        fewer = list(dict.fromkeys(others))
        if len(fewer) >= len(scalars):
            return chosen, scalars
        chosen, scalars = [*made.values(), *chosen], fewer


def _scales(eqn: JaxprEqn, table_of: Mapping[Var, int]) -> bool:
    """Decide whether an equation multiplies entries by a number."""
    are_entries = [isinstance(v, Var) and v in table_of for v in eqn.invars]
    name = eqn.primitive.name
    if name in ("mul", "div"):
        return sum(are_entries) == 1 and (name == "mul" or are_entries[0])
    return name == "neg" and all(are_entries)


# --- ways to update rows, read from the top ------------------------------------------------
#
#     ADD      linear in the gradient, and of its dtype an accumulating scatter
#     DENSE    few rows for each lookup                 the table, kept where not touched
#     ROWS     not entry by entry                       gather, compute, scatter of unique rows
#     SCATTER  anything else                            one scatter, the update its combiner
#
# How a device does ADD, ROWS and SCATTER is found in `_kernels.update_rows`.
#
# With V = 10 rows and 8 lookups a dense update does little more than one of rows, on all cores
# and without looking for equal ids. Made lazy it is
#
#     table' = where(touched, new(table, gradient), table)        touched (V, 1)
#
# bit for bit the old table in the rows that no id names.


def _update_of(
    combiner: Combiner,
    leaves: Sequence[Leaf],
    gradient: RowSparse,
    scalars: Sequence[jax.Array],
) -> RowUpdate | list[jax.Array]:
    """Return the update of these leaves, or the arrays after it: equal ids are summed first."""
    tables, are_steps = [x.value for x in leaves], [x.kind == "param" for x in leaves]
    are_first = [i in combiner.read_first for i in combiner.places]
    valid, table, count = leaves[0].valid, tables[0], len(tables)
    is_masked = valid is not None  # JAX keeps `new_rows`, which must not keep the mask
    # The gradient is opened once: what follows takes canonical ids, rows, and their order.
    ids, rows, order = gradient.row_ids(), gradient.rows(), gradient.order
    is_exact = table.dtype == gradient.dtype and not is_narrow(table.dtype)
    if combiner.is_linear and is_exact:
        step = lambda rows: combiner.function(rows, rows, *scalars)[0]  # no old row is read
        added_rows = scaled(gradient.values, step)
        added_rows = unchanged_where_masked(added_rows, valid)
        return RowUpdate(ADDITION, tables, ids, gathered(added_rows), [], order)

    def new_entries(*entries: jax.Array) -> list[jax.Array]:
        made = zip(entries, combiner.function(*entries), are_steps, strict=False)
        return [(added(x, y) if is_step else y).astype(x.dtype) for x, y, is_step in made]

    if valid is None and is_saturated(gradient, tables):
        function = entry_by_entry(new_entries) if combiner.is_elementwise else new_entries
        dense = add_to_rows(jnp.zeros_like(table, gradient.dtype), ids, rows, order)
        touched = set_rows(jnp.zeros(table.shape[:1], bool), ids, jnp.ones_like(ids, bool))
        return _kept_where_untouched(function, touched, tables, [dense, *scalars])

    def new_rows(x: RowUpdate) -> list[jax.Array]:
        *others, mask = x.scalars if is_masked else (*x.scalars, None)
        old = [gather_unique_rows(table, x.ids, x.order) for table in x.tables]
        # See `LazyStep.rows`.
        reads = zip(old, are_first, strict=True)
        old = [lax.optimization_barrier(y) if is_first else y for y, is_first in reads]
        made, new = combiner.function(*old, x.rows, *others), []
        ways = zip(x.tables, old, made, are_steps, are_first, strict=True)
        for table, before, y, is_step, is_first in ways:
            ids = ids_after_reading(x.ids, before) if is_first else x.ids
            y = unchanged_where_masked(y, mask) if is_step else keep_valid(y, before, mask)
            if is_step and table.dtype == joint_dtype(table, y):
                # Without reading the old rows.
                new.append(add_rows(table, ids, y, x.order) if ids.shape[0] else table)
            else:
                y = added(before, y) if is_step else y
                new.append(set_rows(table, ids, y, x.order))
        return new

    if not combiner.is_elementwise:
        others = [*scalars] if valid is None else [*scalars, valid]
        by_rows = Update(new_rows, by_rows=True)
        return RowUpdate(by_rows, tables, ids, rows, others, order)
    if valid is None:
        return update_elementwise(new_entries, tables, ids, rows, scalars, order)

    # Lines have their mask in their bits. It is a number else: a scatter takes one dtype.
    has_marks = order == "unique" and not is_complex(gradient)

    def new_valid_entries(*entries: jax.Array) -> list[jax.Array]:
        if has_marks:
            given = [*entries]
            given[count], mask = unmarked(given[count])
            mask = mask.astype(jnp.int32)
        else:
            *given, mask = entries
        pairs = zip(new_entries(*given), given, strict=False)
        return [jnp.where(mask != 0, x, y) for x, y in pairs]

    if has_marks:
        rows, others = marked(gradient.values, valid), [*scalars]
    else:
        others = [*scalars, valid.astype(gradient.dtype)]
    return update_elementwise(new_valid_entries, tables, ids, rows, others, order)


def _kept_where_untouched(
    function: Function,
    touched: jax.Array,
    tables: Sequence[jax.Array],
    others: Sequence[jax.Array],
) -> list[jax.Array]:
    """Return `function(*tables, *others)`, tables, and the old ones in untouched rows."""
    given = [*tables, *others]
    program = jax.make_jaxpr(function)(*given)
    outputs, done = program.jaxpr.outvars, set[Var]()
    kept = lambda new, old: jnp.where(trailing(touched, old.ndim), new, old)

    def rule(eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
        # What is computed of a new table is computed of the one that is kept, the same in rows
        # that are touched. Else XLA would copy the old table, which it needs to the end.
        results = bound(eqn, inputs)
        for i, v in enumerate(eqn.outvars):
            if outputs.count(v) == 1:
                results[i] = kept(results[i], tables[outputs.index(v)])
                done.add(v)
        return results

    new = interpret(program.jaxpr, program.consts, given, rule)
    return [
        x if v in done else kept(x, y) for v, x, y in zip(outputs, new, tables, strict=True)
    ]


def is_saturated(gradient: RowSparse, tables: Sequence[jax.Array]) -> bool:
    """Decide whether to update whole tables, arrays of which the gradient touches most rows."""
    # 16-bit gradients are summed in float32, which `todense` has no reason to do.
    return (
        is_known(gradient.shape[0], gradient.nse)
        and gradient.shape[0] <= tuning.DENSE_ROWS_FOR_EACH_LOOKUP * gradient.nse
        and not is_narrow(gradient.dtype)
        and explicit_mesh(*tables) is None
    )
