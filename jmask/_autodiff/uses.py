"""Find how a program uses each input: it looks rows up in it, or needs all of it.

    def loss(table, ids):
        rows = jnp.take(table, ids, axis=0)        lookup
        return jnp.sum(rows @ table.T)             `dot_general` needs all of it

The uses are read from the jaxpr of the function itself. A copy, a cast, a transpose or a
multiple of an array is that array still, so a use of it is a use of the input. So is a lookup
in what was computed from all of an array, row by row: in `(table / norms)[ids]` the division
needs all of it, and the lookup shows that rows were meant. A product with a one-hot matrix,
which compares ids with the numbers of all rows, is a lookup that reads all of a table.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn

from jmask._autodiff.forward import Need
from jmask._autodiff.lookups import LOOKUPS as _LOOKING_UP
from jmask._base.array_types import is_known
from jmask._base.fallback import (
    LARGE,
    Fallback,
    Place,
    in_bytes,
    place_among,
    report_fallback,
)
from jmask._base.forms import (
    aval_of,
    bodies_of,
    holds_jaxprs,
    name_of,
    parameter,
    shard_map_of,
    what_is_unknown,
    within,
)
from jmask._base.jaxprs import ARITHMETIC, interpret
from jmask._base.types import Atom, Shaped

# `get` reads from a reference, `jax.new_ref(table)[ids]`.
_LOOKUPS = (*_LOOKING_UP, "dynamic_slice", "get")
_ONE_HOT = "one-hot product"
# What `custom_root` is: nobody sees what it runs.
_OPAQUE = "call_hi_primitive"
LOOK_UP_FIRST = (
    "Look rows up first, then compute row by row: `f(table[ids])`, not `f(table)[ids]`. What "
    "mixes rows, as a graph does, has a dense gradient."
)
MULTIPLIED = "multiplied by a one-hot matrix, which reads all of it"
_STILL_THE_SAME = (
    "concatenate convert_element_type copy copy_p expand_dims name neg new_ref pcast pvary "
    "reshape reshard rev sharding_constraint slice split squeeze stack transpose unstack"
).split()


class Use(NamedTuple):
    """One use of an input: the primitive, or `_ONE_HOT`, and the line of the user's code.

    `is_computed` says that it is a use of what was computed from all of the input, `is_local`
    that it is one of the part of it that a device has in a `shard_map`.
    """

    primitive: str
    place: Place | None
    is_computed: bool = False
    is_local: bool = False

    @property
    def is_lookup(self) -> bool:
        return self.primitive in _LOOKUPS


def uses_of_inputs(jaxpr: Jaxpr) -> list[list[Use]]:
    """Find how each input of a program is used, in order."""
    count = len(jaxpr.invars)
    return _uses(jaxpr, [_Origin(i, False) for i in range(count)], count)[0]


def place_of(eqn: JaxprEqn) -> Place | None:
    """Return the line of user code that an equation comes from."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    place = place_among((frame.file_name, frame.line_num) for frame in frames)
    if place is None:
        match = re.match(r"(.+?):(\d+)", source_info_util.summarize(eqn.source_info))
        place = Place(match[1], int(match[2])) if match else None
    return place


def is_multiplied_alone(uses: Sequence[Use]) -> bool:
    """Decide whether an input is multiplied by one-hot matrices, and used in no other way."""
    return bool(uses) and all(use.primitive == _ONE_HOT for use in uses)


def report_dense(
    jaxpr: Jaxpr, names_of: Callable[[], Sequence[str]], dense: Mapping[int, Sequence[Need]]
) -> None:
    """Warn of tables with dense gradients, once each, at the line that needs all of it.

    Args:
        names_of: returns the names of the inputs of the program, in backticks.
        dense: what the program needs of each input that might have been a table.
    """
    inputs = [aval_of(v) for v in jaxpr.invars]
    looked_up = {i for i, needs in dense.items() if _is_looked_up(inputs[i], needs)}
    large = {i for i in dense if _size(inputs[i]) >= LARGE}
    if not looked_up and not large:
        return
    names, uses = names_of(), uses_of_inputs(jaxpr)
    for i in sorted(looked_up | large):
        is_looked_up = i in looked_up
        report = _report(names[i], inputs[i], uses[i], dense[i], is_looked_up)
        if report is not None:
            report_fallback(*report)


def _is_looked_up(table: Shaped, needs: Sequence[Need]) -> bool:
    """Decide whether fewer rows are looked up than a table has.

    Nothing is said of others, such as a matrix of transitions: a dense gradient costs no more
    than rows would.
    """
    if any(use.rows is None and _hides_lookups(use.eqn, table) for use in needs):
        return True
    shares = [
        use.rows / max(use.of, 1) if is_known(use.rows) else 0.0
        for use in needs
        if use.is_lookup and use.rows is not None
    ]
    return bool(shares) and sum(shares) < 1


def _hides_lookups(eqn: JaxprEqn | None, table: Shaped) -> bool:
    """Decide whether an equation that needs all of a table runs what looks rows up."""
    if eqn is None:
        return False
    if eqn.primitive.name == _OPAQUE:
        return _size(table) >= LARGE
    inner = within([eqn])[1:] if holds_jaxprs(eqn) else []
    return any(e.primitive.name in _LOOKUPS for e in inner)


def _report(
    name: str,
    table: Shaped,
    uses: Sequence[Use],
    needs: Sequence[Need],
    is_looked_up: bool,
) -> Fallback | None:
    """Report a table that is looked up and needed as a whole, or not looked up by rows."""
    lookups = [use.place for use in uses if use.is_lookup]
    others = [use for use in uses if not use.is_lookup]
    is_multiplied = is_multiplied_alone(others)
    whole = next((use.eqn for use in needs if use.rows is None and use.eqn is not None), None)
    is_hidden = not lookups and any(_hides_lookups(use.eqn, table) for use in needs)
    if not lookups and not is_multiplied and not is_hidden:
        return None
    place = (others or uses)[0].place
    if whole is not None and name_of(whole) != whole.primitive.name:
        why, remedy = what_is_unknown(whole), "Please report it."
    elif is_multiplied:
        why = MULTIPLIED
        remedy = "`table[ids]` is the product `jax.nn.one_hot(ids, len(table)) @ table`."
    elif is_hidden:
        why = f"looked up inside of `{others[0].primitive}`, which is not looked into"
        remedy = "Look rows up before, and give it the rows."
    elif others:
        looked_up = f"looked up ({lookups[0]})" if lookups[0] else "looked up"
        why = f"{looked_up}, but `{others[0].primitive}` needs all of it"
        remedy = (
            "A penalty is on the rows that are looked up, or is the `weight_decay` of the "
            "optimizer; a parameter that scales the table scales its rows, `s * table[ids]`; "
            "what else depends on every row has a dense gradient."
        )
        if any(use.is_lookup and use.is_computed for use in uses):
            remedy = LOOK_UP_FIRST
        elif others[0].primitive == "dot_general":
            remedy = (
                "The logits of a softmax that shares the table have a dense gradient: of "
                "sampled rows, `hidden @ table[sampled].T`, it is rows; for the whole softmax "
                "`jmask.densify()` takes the place of jmask.lazy."
            )
    elif any(use.is_local for use in uses):
        why = "sharded by the `shard_map` that looks it up"
        remedy = (
            "Let `jmask.embedding_lookup(jmask.sharded(table, mesh), ids)` take the place of "
            "the `shard_map`, or take jmask.grad and the step inside it."
        )
    elif is_looked_up and whole is not None:
        looked_up = f"looked up ({lookups[0]})" if lookups[0] else "looked up"
        why = f"{looked_up}, but `{whole.primitive.name}` needs all of it"
        place, remedy = place_of(whole), LOOK_UP_FIRST
    else:
        why = "looked up in a way that does not read whole rows"
        remedy = (
            "Keep rows last, ids first: `table[ids]` of (V, D), `table[m, ids]` or "
            "`table[:, ids]` of (M, V, D), not `table[:, ids]` or `table.T[ids]` of a matrix, "
            "nor a `jax.new_ref` of it; columns after that, `table[ids][:, j]`."
        )
    return Fallback(
        f"the gradient of {name}, a {table.dtype}{list(table.shape)} table "
        f"({in_bytes(_size(table))}), became dense, at O(table) cost in each step: it is {why}",
        place,
        tuple(table.shape),
        remedy,
    )


def _size(table: Shaped) -> int:
    return math.prod(table.shape) * table.dtype.itemsize


class _Origin(NamedTuple):
    """A variable: an input, or a result computed from all of it, row by row.

    `number` is the input's, or what the variable is otherwise: `_NUMBERS` or `_ONE_HOT_MATRIX`.

    `is_repeated` says that it is several copies: lookups in them are meant as lookups in the
    input, but not those in what is computed with them, as of positions and a batch of hidden
    states. `is_stopped` says that no gradient comes from it: what uses it is no use.
    """

    number: int
    is_computed: bool
    is_repeated: bool = False
    is_stopped: bool = False

    @property
    def is_input(self) -> bool:
        return self.number >= 0


# An iota, and its comparison with ids.
_NUMBERS, _ONE_HOT_MATRIX = _Origin(-1, False), _Origin(-2, False)


def _uses(
    jaxpr: Jaxpr, inputs: Sequence[_Origin | None], count: int
) -> tuple[list[list[Use]], list[_Origin | None]]:
    """Return the uses of `count` inputs, and which of them each output is, if any."""
    uses: list[list[Use]] = [[] for _ in range(count)]

    def rule(eqn: JaxprEqn, sources: list[_Origin | None]) -> list[_Origin | None]:
        outputs: list[_Origin | None] = [None] * len(eqn.outvars)
        if eqn.primitive.name == "iota":
            return [_NUMBERS]
        bodies = [body for body, _ in bodies_of(eqn)]
        if not any(sources) and not bodies:
            return outputs
        if eqn.primitive.name == "stop_gradient":
            return [source and source._replace(is_stopped=True) for source in sources]
        live = [None if x is None or x.is_stopped or not x.is_input else x for x in sources]
        origins = dict.fromkeys(origin for origin in live if origin is not None)
        for body in bodies:
            inner_uses, results = _uses(body, sources[len(sources) - len(body.invars) :], count)
            parts = _parts(eqn, sources)
            for number, (known, more) in enumerate(zip(uses, inner_uses, strict=True)):
                if number in parts:
                    more = [u._replace(is_local=True) for u in more]
                # What JAX itself calls (`jnp.sort`) has no line of the user inside.
                known.extend(u if u.place else u._replace(place=place_of(eqn)) for u in more)
            outputs = [new or old for new, old in zip(results, outputs, strict=False)]
        if bodies:
            return outputs
        if not origins and not any(source and source.is_input for source in sources):
            return [_origin_without_input(eqn, sources)] * len(outputs)
        if _is_the_same(eqn) or _selects_one(eqn, sources):
            return [next(iter(origins), next(filter(None, sources)))] * len(outputs)
        place, name = place_of(eqn), eqn.primitive.name
        if _is_one_hot_product(eqn, sources):
            name = _ONE_HOT
        for origin in origins:
            # Of what was computed only lookups count: they are meant as lookups in the input.
            use = Use(name, place, origin.is_computed)
            if use.is_lookup or not origin.is_computed:
                uses[origin.number].append(use)
        for v, source in zip(eqn.invars, live, strict=True):
            if source is None or source.is_repeated:
                continue
            for i, result in enumerate(eqn.outvars):
                if _keeps_rows(eqn, v, result):
                    outputs[i] = outputs[i] or _Origin(source.number, True)
                elif name == "broadcast_in_dim" and _repeats(v, result):
                    outputs[i] = _Origin(source.number, True, is_repeated=True)
        return outputs

    consts: list[_Origin | None] = [None] * len(jaxpr.constvars)
    return uses, interpret(jaxpr, consts, inputs, rule, lambda _: None)


def _keeps_rows(eqn: JaxprEqn, v: Atom, result: Atom) -> bool:
    """Decide whether every row of `v` is found in a row of a result, computed on: `v / norms`.

    Products do not count: the labels' entries of logits `v @ x` are no rows looked up. In one
    dimension arithmetic alone counts: what sorts or sums a vector keeps no rows of it.
    """
    table = tuple(aval_of(v).shape)
    rows = tuple(getattr(aval_of(result), "shape", ()))
    if eqn.primitive.name in (*_LOOKUPS, "dot_general") or not table:
        return False
    if len(table) == 1 and eqn.primitive.name not in ARITHMETIC:
        return False
    return len(rows) == len(table) and rows[1:] == table[1:] and rows[0] >= table[0]


def _repeats(v: Atom, result: Atom) -> bool:
    """Decide whether a result is copies of a matrix, as `jnp.broadcast_to(v, (2, V, D))`."""
    table = tuple(aval_of(v).shape)
    return len(table) > 1 and tuple(aval_of(result).shape)[-len(table) :] == table


def _origin_without_input(eqn: JaxprEqn, sources: Sequence[_Origin | None]) -> _Origin | None:
    """Return what is made of numbers of rows and ids: a one-hot matrix, or the same still."""
    if eqn.primitive.name == "eq":
        return _ONE_HOT_MATRIX if _NUMBERS in sources else None
    is_moved = eqn.primitive.name in (*_STILL_THE_SAME, "broadcast_in_dim", "stop_gradient")
    return sources[0] if is_moved else None


def _is_one_hot_product(eqn: JaxprEqn, sources: Sequence[_Origin | None]) -> bool:
    """Decide whether an equation reads fewer rows of a table, by a product, than there are."""
    if eqn.primitive.name != "dot_general" or _ONE_HOT_MATRIX not in sources:
        return False
    # Where ids are as many as rows, as of the experts of a layer, all of them may be read.
    matrix = aval_of(eqn.invars[sources.index(_ONE_HOT_MATRIX)])
    (contracted, _), _ = parameter(eqn, "dimension_numbers")
    rows = math.prod(matrix.shape[d] for d in contracted)
    return math.prod(matrix.shape) < rows * rows


def _is_the_same(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name in ("mul", "div"):
        return any(aval_of(v).ndim == 0 for v in eqn.invars)
    return eqn.primitive.name in _STILL_THE_SAME


def _parts(eqn: JaxprEqn, sources: Sequence[_Origin | None]) -> set[int]:
    """Return which inputs a `shard_map` gives its body a part of, on each device."""
    if name_of(eqn) != "shard_map":
        return set()
    pairs = zip(shard_map_of(eqn).in_specs, sources, strict=True)
    return {x.number for spec, x in pairs if x is not None and any(spec)}


def _selects_one(eqn: JaxprEqn, sources: Sequence[_Origin | None]) -> bool:
    """Decide whether an equation selects between copies with and without gradients.

    The branches of a `cond` under `vmap`, whose predicate differs along the batch, begin so.
    """
    cases = {source and source._replace(is_stopped=False) for source in sources[1:]}
    is_one = len(cases) == 1 and all(x is not None and x.is_repeated for x in cases)
    return eqn.primitive.name == "select_n" and is_one
