"""Say of each dense gradient what needs all of its table, and what to write instead.

    def loss(table, ids):
        rows = jnp.take(table, ids, axis=0)        looked up
        return jnp.sum(rows @ table.T)             `dot_general` needs all of it

What a program needs of its tables is what a trial of it notes (`forward.Need`). A product with
a one-hot matrix, which compares ids with the numbers of all rows, is a lookup that reads all
of a table: it is found here, and so is a lookup in what is computed of all of a table.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn

from jmask._autodiff.forward import Need
from jmask._autodiff.lookups import LOOKUPS
from jmask._base.array_types import at_most, is_known
from jmask._base.fallback import LARGE, Place, in_bytes, place_among, report_fallback
from jmask._base.forms import (
    PLAIN_CALLS,
    aval_of,
    bodies_of,
    holds_jaxprs,
    name_of,
    parameter,
    shard_map_of,
    what_is_unknown,
    within,
)
from jmask._base.jaxprs import interpret
from jmask._base.types import Shape

# `get` reads from a reference, `jax.new_ref(table)[ids]`.
LOOKING_UP = (*LOOKUPS, "dynamic_slice", "get", "new_ref")
MULTIPLIED = "multiplied by a one-hot matrix, which reads all of it"
# What `custom_root` is: nobody sees what it runs.
_OPAQUE = "call_hi_primitive"
_LOOK_UP_FIRST = (
    "Look rows up first, then compute row by row: `f(table[ids])`, not `f(table)[ids]`. What "
    "mixes rows, as a graph does, has a dense gradient."
)
_KEEP_ROWS = (
    "Keep rows last, ids first: `table[ids]` of (V, D), `table[m, ids]` or `table[:, ids]` of "
    "(M, V, D), not `table[:, ids]` or `table.T[ids]` of a matrix, nor a `jax.new_ref` of it; "
    "columns after that, `table[ids][:, j]`."
)
_PENALTY = (
    "A penalty is on the rows that are looked up, or is the `weight_decay` of the optimizer; a "
    "parameter that scales the table scales its rows, `s * table[ids]`; what else depends on "
    "every row has a dense gradient."
)
_SOFTMAX = (
    "The logits of a softmax that shares the table have a dense gradient: of sampled rows, "
    "`hidden @ table[sampled].T`, it is rows; for the whole softmax `jmask.densify()` takes "
    "the place of jmask.lazy."
)
_SHARDED = (
    "Let `jmask.embedding_lookup(jmask.sharded(table, mesh), ids)` take the place of the "
    "`shard_map`, or take jmask.grad and the step inside it."
)


def report_dense(
    jaxpr: Jaxpr, leaf_name: Callable[[int], str], dense: Mapping[int, Sequence[Need]]
) -> None:
    """Warn of tables with dense gradients, once each, at the line that needs all of it."""
    computed = Computed(jaxpr, dense)
    for i in dense:
        table = aval_of(jaxpr.invars[i])
        size = math.prod(table.shape) * table.dtype.itemsize
        why = reason(computed, i, size)
        if why is not None:
            message, place, remedy = why
            report_fallback(
                f"the gradient of {leaf_name(i)}, a {table.dtype}{list(table.shape)} table "
                f"({in_bytes(size)}), became dense, at O(table) cost in each step: it is "
                f"{message}",
                place,
                remedy,
            )


def reason(
    computed: "Computed", table: int, size: float
) -> tuple[str, Place | None, str] | None:
    """Return why a table is dense, where, and the remedy; None if there is nothing to say."""
    needs = computed.needs.get(table, ())
    shape = tuple(aval_of(computed.jaxpr.invars[table]).shape)
    lookups = [n for n in needs if n.is_lookup and not _may_be_of_logits(n, needs, len(shape))]
    # Nothing is said where as many rows are looked up as there are, as of transitions between
    # tags: a dense gradient costs no more than rows would.
    share = lambda n: n.rows / n.total if is_known(n.rows, n.total) else 0.0
    shares = [share(n) for n in lookups if n.rows and n.total]
    hidden = next((need for need in needs if _hides_lookups(need, shape, size)), None)
    is_small = not at_most(LARGE, size) and hidden is None and not (shares and sum(shares) < 1)
    if not needs or is_small:
        return None
    others = [need for need in needs if not need.is_lookup]
    by_columns = [need for need in others if _name(need) in LOOKING_UP]
    whole = next((need for need in others if need not in by_columns), None)
    if whole is not None and whole.eqns and name_of(whole.eqns[-1]) != _name(whole):
        return what_is_unknown(whole.eqns[-1]), place_of(whole), "Please report it."
    products, all_lookups = computed.products_and_lookups
    of_computed = all_lookups.get(table, [])
    lookups += of_computed
    if all(any(n.eqns and n.eqns[-1] is eqn for eqn in products) for n in needs):
        remedy = "`table[ids]` is the product `jax.nn.one_hot(ids, len(table)) @ table`."
        return MULTIPLIED, place_of(needs[0]), remedy
    if lookups and whole is not None:
        where = place_of(lookups[0])
        looked_up = f"looked up ({where})" if where else "looked up"
        is_softmax = _name(whole) == "dot_general"
        remedy = _SOFTMAX if is_softmax else _PENALTY
        remedy = _LOOK_UP_FIRST if of_computed else remedy
        return f"{looked_up}, but `{_name(whole)}` needs all of it", place_of(whole), remedy
    is_map = hidden is not None and _name(hidden) == "shard_map"
    if hidden is not None and is_map and any(map(any, shard_map_of(hidden.eqns[-1]).in_specs)):
        return "sharded by the `shard_map` that looks it up", place_of(hidden), _SHARDED
    if hidden is not None:
        why = f"looked up inside of `{_name(hidden)}`, which is not looked into"
        return why, place_of(hidden), "Look rows up before, and give it the rows."
    if by_columns:
        why = f"looked up ({place_of(by_columns[0])}), but not by whole rows"
        return why, place_of(by_columns[0]), _KEEP_ROWS
    if lookups and not others:
        remedy = "`jax.sharding.reshard` adds what devices have before it is looked up."
        return "looked up, but every device has a summand of it", place_of(lookups[0]), remedy
    return None


def place_of(need: Need) -> Place | None:
    """Return the line of user code that a use is in."""
    for eqn in reversed(need.eqns):  # what JAX itself calls (`jnp.sort`) has no line inside
        frames = getattr(eqn.source_info.traceback, "frames", ())
        place = place_among((frame.file_name, frame.line_num) for frame in frames)
        if place is None:
            match = re.match(r"(.+?):(\d+)", source_info_util.summarize(eqn.source_info))
            place = Place(match[1], int(match[2])) if match else None
        if place is not None:
            return place
    return None


def _name(need: Need) -> str:
    return need.eqns[-1].primitive.name if need.eqns else "return"


def _may_be_of_logits(need: Need, needs: Sequence[Need], dimensions: int) -> bool:
    """Decide whether a lookup may be of the logits of labels, which are needed as a whole, too.

    They are a product, or made with a bias.
    """
    eqn = need.computed_by
    if eqn is None or not (dimensions == 1 or name_of(eqn) == "dot_general"):
        return False
    return any(n.rows is None and n.eqns and n.eqns[-1] is eqn for n in needs)


def _hides_lookups(need: Need, shape: Shape, size: float) -> bool:
    """Decide whether an equation that needs all of a table runs what looks its rows up."""
    if need.rows is not None or not need.eqns:
        return False
    eqn = need.eqns[-1]
    if eqn.primitive.name == _OPAQUE:
        return at_most(LARGE, size)
    inner = within([eqn])[1:] if holds_jaxprs(eqn) else []
    lookups = [e for e in inner if e.primitive.name in LOOKING_UP]
    if eqn.primitive.name == "shard_map":  # where a table may be in parts
        return bool(lookups)
    # The lookups may be in another array: a loop over lookups that starts from a trained state.
    # Or they read every row, as a solver does that permutes rows.
    size_of = lambda v: math.prod(getattr(aval_of(v), "shape", ()))
    pairs = [(size_of(v), size_of(e.outvars[0])) for e in lookups for v in e.invars]
    return any(size == math.prod(shape) > found for size, found in pairs)


# --- what is computed before it is looked up ------------------------------------------------

_STILL_THE_SAME = (
    "broadcast_in_dim concatenate convert_element_type copy copy_p expand_dims name neg pcast "
    "pvary reshape reshard rev sharding_constraint slice split squeeze stack stop_gradient "
    "transpose unstack"
).split()
# What they return need not have the rows of a table.
_NOT_ROWS = ("scan", "shard_map", "while")


_NO_TABLES: frozenset[int] = frozenset()


class _Label(NamedTuple):
    """Label an array: "numbers" of rows, or "one-hot"; and the tables it is computed of."""

    kind: str = ""
    tables: frozenset[int] = _NO_TABLES


@dataclasses.dataclass(frozen=True)
class Computed:
    """Find what a program computes of whole tables, of all tables in one walk."""

    jaxpr: Jaxpr
    needs: Mapping[int, Sequence[Need]]  # what it needs of each table

    @functools.cached_property
    def products_and_lookups(self) -> tuple[list[JaxprEqn], dict[int, list[Need]]]:
        """Products with one-hot matrices; lookups in what has the rows of what is computed.

        One-hot matrices are made of comparisons with the numbers of rows.
        """
        shapes: dict[int, Shape] = {
            i: tuple(aval_of(self.jaxpr.invars[i]).shape) for i in self.needs
        }
        wholes: dict[int, frozenset[int]] = {}
        for i, needs in self.needs.items():
            for need in needs:
                if need.rows is None and need.eqns:
                    key = id(need.eqns[-1])
                    wholes[key] = wholes.get(key, _NO_TABLES) | {i}
        products: list[JaxprEqn] = []
        lookups: dict[int, list[Need]] = {}

        def run(
            jaxpr: Jaxpr, inputs: Sequence[_Label], outer: tuple[JaxprEqn, ...]
        ) -> list[_Label]:
            rule = lambda eqn, given: results(eqn, given, (*outer, eqn))
            none = _Label()
            return interpret(jaxpr, [none] * len(jaxpr.constvars), inputs, rule, lambda _: none)

        def results(
            eqn: JaxprEqn, given: list[_Label], eqns: tuple[JaxprEqn, ...]
        ) -> list[_Label]:
            name, kinds = eqn.primitive.name, [x.kind for x in given]
            tables = wholes.get(id(eqn), _NO_TABLES).union(*(x.tables for x in given))
            made = [tuple(getattr(aval_of(v), "shape", ())) for v in eqn.outvars]
            kept = [_NO_TABLES] * len(made)
            if tables and name in LOOKING_UP:
                for i in tables:
                    lookups.setdefault(i, []).append(Need(i, eqns, 0, 0, True))
            elif tables and name not in _NOT_ROWS and name not in PLAIN_CALLS:
                # Of `hidden @ table.T` entries are looked up, as the logits of labels, and no
                # rows.
                other = aval_of(eqn.invars[1]).shape if name == "dot_general" else ()
                rows = {i: shapes[i][0] for i in tables if shapes[i][0] not in other}
                # A vector is added to each row of a matrix, as a bias is.
                has_rows = lambda i, x: min(len(x), len(shapes[i])) > 1 and x[0] >= rows[i]
                kept = [frozenset(i for i in rows if has_rows(i, x)) for x in made]
                given = [_Label(x) for x in kinds]
            for body, _ in bodies_of(eqn):
                labels = run(body, given[len(given) - len(body.invars) :], eqns)
                # A result with the shape of a table is that table, updated by a loop.
                changed = (frozenset(i for i in tables if shapes[i] == x) for x in made)
                every = zip(labels, kept, changed, strict=True)
                return [_Label(x.kind, x.tables | y | z) for x, y, z in every]
            kind = ""
            if name == "iota":
                kind = "numbers"
            elif name == "eq" and "numbers" in kinds:
                kind = "one-hot"
            elif name in _STILL_THE_SAME:
                kind = kinds[0]
            elif name == "dot_general" and "one-hot" in kinds:
                # Where ids are as many as rows, as of the experts of a layer, all may be read.
                shape = aval_of(eqn.invars[kinds.index("one-hot")]).shape
                (contracted, _), _ = parameter(eqn, "dimension_numbers")
                numbers = math.prod(shape[d] for d in contracted)
                if math.prod(shape) < numbers * numbers:
                    products.append(eqn)
            return [_Label(kind, x) for x in kept]

        run(self.jaxpr, [_Label()] * len(self.jaxpr.invars), ())
        return products, lookups
