"""Measure what an optimizer does to a row without a gradient, by giving it rows to do it to.

Nothing is known of an optimizer but how to run it. In each step it gets, beside the rows of the
batch, a few rows of numbers with a gradient of zero:

    row          p    m    v            what the step makes of it tells
    unit         1    0    0            decay of p:           A[0, 0]
    unit         0    1    0            b1, and c / e:        A[1, 1], the quotient at v = 0
    unit         0    0    1            b2:                   A[2, 2]
    quotient     0    1    e²           the quotient where e counts as much as √v
    check        random                 whether all of this predicts a step

The structure, which of these numbers may differ from 0, is found in the same way when a state
is made (`form_of`), at several counts of steps. The check is made in every step: what a step
does beyond that structure makes rows that wait read as nan.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmask._base.array_types import is_narrow, wide
from jmask._base.forms import aval_of, name_of
from jmask._base.jaxprs import bound, inlined, interpret
from jmask._base.types import ArraysFunction, HostArray, OptState, PyTreeDef, Shape, Value
from jmask._deferred.missed_steps import Form, Pair, Step, terms_for
from jmask._tables.rows_at import shape_of
from jmask._updates.checks import NotRowLocalError
from jmask._updates.state_rows import rows_of_state

# An optimizer rounds b x, and so does a measurement, at one x always in the same direction. The
# mean over so many x is b but for 2e-9, and thousands of steps add up to no more than rounding.
_ENTRIES = 64
# The greatest difference of a step from its prediction: relative to the terms of its sum, and
# to what it is added to.
_RELATIVE, _OF_ENTRY = 2e-4, 1e-6


class NotDeferrableError(ValueError):
    """Say why rows cannot wait for a transformation."""

    def __init__(self, why: str):
        super().__init__(
            f"jmask.deferred cannot take this `inner`: {why}. Use jmask.densify() before it "
            "for the dense trajectory, or jmask.lazy, with which rows without a gradient rest."
        )


def _moved(
    step: Step, quotient: Pair | None, sign: int | None, x: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """Return by how much a step moves entries, and the sum of the sizes of its terms."""
    terms: list[list[Value]] = [[] for _ in x]
    for (i, j), change in step.changes.items():
        terms[i].append(change * x[j])
    if quotient is not None:
        a, b = quotient
        terms[0].append(step.c * x[a] / (x[b] ** 0.5 + step.e))
    if sign is not None:
        terms[0].append(step.sign * np.sign(x[sign]))
    nothing = [0.0 * entry for entry in x]
    moves = [sum(of, start=zero) for of, zero in zip(terms, nothing, strict=True)]
    sizes = [sum(map(abs, of), start=zero) for of, zero in zip(terms, nothing, strict=True)]
    return moves, sizes


# --- the structure ------------------------------------------------------------------------
#
# Rows of one entry: a unit for each entry, units with a v beside them, and random ones.

# Counts of steps at which the structure of a step is looked at: a rate may begin at 0.
_LATER = (1_000, 100_000)
# Numbers under the root that tell c / (√v + e) from c / √(v + e).
_UNDER_ROOT = (1.0, 1e-4, 1e-8, 1e-12, 1e-16)


def questions(width: int) -> HostArray:
    """Return the rows (R, width) of which `form_of` wants to know what a step makes."""
    unit = np.eye(width)
    rows = [np.zeros(width), *unit, *-unit]
    rows += [unit[a] + v * unit[b] for a, b in _pairs(width) for v in _UNDER_ROOT]
    rng = np.random.default_rng(1)
    sizes = 10.0 ** np.concatenate(
        [rng.uniform(-3, 3, (64, width)), rng.uniform(-8, 0, (64, width))]
    )
    return np.stack([*rows, *sizes, *sizes[::8] * rng.choice([-1, 1], (16, width))])


def _pairs(width: int) -> Iterator[Pair]:
    return itertools.permutations(range(1, width), 2)


def form_of(steps: Sequence[HostArray], per_row: Sequence[bool]) -> Form:
    """Return the structure of steps without a gradient.

    Args:
        steps: for each of several counts, what it makes of the `questions`: the update of the
            parameter and the new state, (R, width).
        per_row: of which entries a row has one.

    Raises:
        NotDeferrableError: if the steps have none of the structures of `missed_steps`.
    """
    width = len(per_row)
    x = questions(width)
    moves = [new - x * (np.arange(width) > 0) for new in steps]
    positive = tuple(
        i for i in range(width) if not all(np.isfinite(y[1 + width + i]).all() for y in moves)
    )
    asked = np.array([not (row[[*positive]] < 0).any() for row in x])
    if not all(np.isfinite(y[asked]).all() for y in moves):
        raise NotDeferrableError(
            "in a row without a gradient it divides by 0, as by the gradient itself, or with "
            "`eps` 0"
        )
    if any(y[0].any() for y in moves):
        raise NotDeferrableError("something is added to every row in each step")
    units = [y[1 : 1 + width].T for y in moves]  # (row, column), as A - 1 is
    candidates: list[tuple[Pair | None, int | None]] = [(None, None)]
    candidates += [(None, a) for a in range(1, width)]
    candidates += [(pair, None) for pair in _pairs(width)]
    for quotient, sign in candidates:
        found = [
            _measured(unit, y, quotient, sign) for unit, y in zip(units, moves, strict=True)
        ]
        if all(
            _fits(step, quotient, sign, x[asked], y[asked])
            for step, y in zip(found, moves, strict=True)
        ):
            break
    else:
        raise NotDeferrableError(
            "what it does to a row without a gradient has no closed form, as with L2 decay "
            'inside an adaptive gradient (decoupled decay, `decay_mode="decoupled"` or '
            "optax.adamw, has one), `eps_root`, or conditions on what the row holds"
        )
    changes = {pair for step in found for pair, change in step.changes.items() if change}
    special = {*(quotient or ()), *(() if sign is None else (sign,))}
    for row, column in changes:
        if row and per_row[row] != per_row[column]:
            raise NotDeferrableError("its state mixes the entries of a row")
        if (row != column and special & {row, column}) or (special and 0 == column < row):
            raise NotDeferrableError(
                "the moments that it divides depend on the parameter, or on each other"
            )
    # That of the parameter is always looked at: nan says that the check failed.
    form = Form(width, tuple(sorted({(0, 0), *changes})), quotient, sign, positive=positive)
    if quotient is None:
        return form
    b1, b2 = (float(np.float32(1 + units[0][i, i])) for i in quotient)
    terms = terms_for(b1, b2)
    if terms is None:
        raise NotDeferrableError(
            f"with `b1`={b1:.6g} and `b2`={b2:.6g} no short sum of its steps is exact: b2 has "
            "to be nearer to 1 than b1 is"
        )
    scale = next(step.e for step in reversed(found) if step.c)
    return dataclasses.replace(form, terms=terms, e=float(scale))


def _measured(unit: HostArray, y: HostArray, quotient: Pair | None, sign: int | None) -> Step:
    """Return the scalars of a step, if it has this structure."""
    changes = {(int(i), int(j)): unit[i, j] for i, j in np.argwhere(unit)}
    if sign is not None:
        return Step(changes, sign=changes.pop((0, sign), 0.0))
    if quotient is None:
        return Step(changes)
    width = len(unit)
    at_0 = changes.pop((0, quotient[0]), 0.0)
    at_1 = y[1 + 2 * width + len(_UNDER_ROOT) * list(_pairs(width)).index(quotient), 0]
    if not at_0:  # a rate may be 0 for a time
        return Step(changes, 0.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        e = 1 / (at_0 / at_1 - 1)
    return Step(changes, at_0 * e, e)


def _fits(
    step: Step, quotient: Pair | None, sign: int | None, x: HostArray, y: HostArray
) -> bool:
    if quotient is not None and not 0 < step.e < 1e6:
        return False
    with np.errstate(invalid="ignore"):
        moves, sizes = _moved(step, quotient, sign, list(x.T))
    allowed = _RELATIVE * np.stack(sizes, 1) + _OF_ENTRY * abs(x)
    return bool(np.all(abs(np.stack(moves, 1) - y) <= allowed))


# --- small tables, to ask an optimizer ------------------------------------------------------

Found = Form | NotDeferrableError | NotRowLocalError | None
"""The structure of steps without a gradient, or why there is none; None of a number."""


def one_row_of(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return a shape that is the same for all numbers of rows, with the dimensions it had."""
    row = like.shape[-1:] if like.ndim > 1 else ()
    return jax.ShapeDtypeStruct((1,) * (like.ndim - len(row)) + row, like.dtype)


def forms_of_steps(
    inner: optax.GradientTransformationExtraArgs,
    tree: PyTreeDef,
    likes: Sequence[jax.ShapeDtypeStruct],
) -> list[Found]:
    """Find the structure of steps without a gradient, for each parameter.

    The optimizer takes steps of small tables, with the `questions` as rows.
    """
    is_table = [x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating) for x in likes]
    state = jax.eval_shape(inner.init, tree.unflatten(likes))
    owners, found = _owners(inner, tree, list(likes), is_table, state)
    places = {
        i: [k for k, owner in enumerate(owners) if owner == i]
        for i, chosen in enumerate(is_table)
        if chosen and found[i] is None
    }
    asked = {i: questions(1 + len(slots)) for i, slots in places.items()}
    rows = max(map(len, asked.values()), default=1)
    with jax.ensure_compile_time_eval():
        small = [_with_rows(x, rows if i in places else 1) for i, x in enumerate(likes)]
        state = inner.init(tree.unflatten([jnp.zeros(x.shape, x.dtype) for x in small]))
        slots = jax.tree.leaves(state)
        slot_tree: PyTreeDef = jax.tree.structure(state)
        shapes = [*small, *small, *map(shape_of, slots)]

        def filled(like: jax.ShapeDtypeStruct, i: int, column: int) -> jax.Array:
            numbers = np.zeros(rows)
            numbers[: len(asked[i])] = asked[i][:, column]
            numbers = numbers[:, None] if like.ndim > 1 else numbers
            return jnp.asarray(np.broadcast_to(numbers, like.shape), wide(like.dtype))

        params = [
            filled(x, i, 0) if i in places else jnp.ones(x.shape, x.dtype)
            for i, x in enumerate(small)
        ]
        for i, which in places.items():
            for column, k in enumerate(which, 1):
                slots[k] = filled(slots[k], i, column)
        given, count = [*map(jnp.zeros_like, params), *params], len(likes)

        def step(*leaves: jax.Array) -> list[jax.Array]:
            updates, state = inner.update(
                tree.unflatten(leaves[:count]),
                slot_tree.unflatten(leaves[2 * count :]),
                tree.unflatten(leaves[count : 2 * count]),
            )
            return [*jax.tree.leaves(updates), *jax.tree.leaves(state)]

        run = jax.jit(unrounded(jax.make_jaxpr(step)(*shapes)))
        steps: dict[int, list[HostArray]] = {i: [] for i in places}
        owned = {k for which in places.values() for k in which}
        for later in (0, 0, 0, *_LATER):
            moved = [
                x + later if x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer) else x
                for x in slots
            ]
            new = run(*given, *moved)
            states = new[count:]
            for i, which in places.items():
                columns = [new[i], *(states[k] for k in which)]
                first = [np.asarray(x).reshape(rows, -1)[:, 0] for x in columns]
                steps[i].append(np.stack(first, 1)[: len(asked[i])])
            slots = [x if k in owned else states[k] for k, x in enumerate(slots)]
    for i, which in places.items():
        per_row = [
            np.shape(x)[1:] != small[i].shape[1:]
            for x in (small[i], *(slots[k] for k in which))
        ]
        try:
            found[i] = form_of(steps[i], per_row)
        except NotDeferrableError as error:
            found[i] = error
    return found


def _with_rows(like: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
    axis = max(like.ndim - 2, 0)
    shape = [rows if i == axis else n for i, n in enumerate(like.shape)]
    return jax.ShapeDtypeStruct(tuple(shape), like.dtype)


def _owners(
    inner: optax.GradientTransformationExtraArgs,
    tree: PyTreeDef,
    likes: list[jax.ShapeDtypeStruct],
    is_table: list[bool],
    state: OptState,
) -> tuple[list[int | None], list[Found]]:
    """Return whose rows each array of the state has, and why a parameter can be no table."""
    found: list[Found] = [None] * len(likes)
    try:
        owned = rows_of_state(inner.init, likes, likes, is_table, tree, state)
        return [owner for owner, _ in owned], found
    except NotRowLocalError:
        pass
    # Some of them count rows: those are not deferred.
    owners: list[int | None] = [None] * len(jax.tree.leaves(state))
    for i in np.flatnonzero(is_table).tolist():
        alone = [j == i for j in range(len(likes))]
        try:
            of_one = rows_of_state(inner.init, likes, likes, alone, tree, state)
        except NotRowLocalError as error:
            found[i] = error
            continue
        owners = [
            old if new is None else new for old, (new, _) in zip(owners, of_one, strict=True)
        ]
    return owners, found


# --- the numbers of a step ----------------------------------------------------------------


class Probes:
    """Rows of numbers that are given to an optimizer beside those of the batch.

    Attributes:
        rows: parameter and state, each (R, *row).
        count: R.
    """

    def __init__(self, form: Form, shapes: Sequence[Shape]):
        self.form = form
        self._each = max(-(-_ENTRIES // max(math.prod(shape), 1)) for shape in shapes)
        groups = [*np.eye(form.width)]
        if form.quotient is not None:
            a, b = form.quotient
            groups.append(groups[a] + form.e**2 * groups[b])
        rng = np.random.default_rng(0)
        self.rows: list[HostArray] = []
        for i, shape in enumerate(shapes):
            count = self._each * max(math.prod(shape), 1)
            mantissas = 1 + np.modf(np.arange(count) * 0.6180339887)[0]
            is_divisor = form.quotient is not None and i == form.quotient[1]
            check = rng.uniform(0.5, 1.5, count)
            if is_divisor:
                check = form.e**2 * 10.0 ** rng.uniform(-2, 6, count)
            elif i not in form.positive:
                check *= rng.choice([-1.0, 1.0], count)
            # What is under the root is to be e² itself, where it is.
            each = [
                np.full(count, x[i]) if is_divisor and x[i] != 1 else x[i] * mantissas
                for x in groups
            ]
            numbers = np.concatenate([*each, check]).reshape(-1, *shape)
            self.rows.append(numbers.astype(np.float32))
        self.count = len(self.rows[0])

    def step(self, new: Sequence[jax.Array]) -> Step:
        """Return the scalars of a step, nan if they do not predict what it did to the check.

        Args:
            new: the update of the parameter, and the new state, of `rows`.
        """
        form = self.form
        moves = [y - x if i else y for i, (x, y) in enumerate(zip(self.rows, new, strict=True))]

        def factor(row: int, column: int, group: int) -> jax.Array:
            """Return the mean factor from an entry of a group to its move of another."""
            place = slice(group * self._each, (group + 1) * self._each)
            # The mean of ratios: where all are 0 or -1, so is it.
            return jnp.mean(moves[row][place] / self.rows[column][place])

        step = Step({(i, j): factor(i, j, j) for i, j in form.changes})
        if form.sign is not None:
            place = slice(form.sign * self._each, (form.sign + 1) * self._each)
            step = step._replace(sign=jnp.mean(moves[0][place]))
        if form.quotient is not None:
            a, _ = form.quotient
            at_0, at_e = factor(0, a, a), factor(0, a, form.width)
            is_taken = at_e != 0
            e = jnp.where(is_taken, form.e / (at_0 / jnp.where(is_taken, at_e, 1) - 1), form.e)
            step = step._replace(c=at_0 * e, e=e)
        x = [part[-self._each :] for part in self.rows]
        predicted, sizes = _moved(step, form.quotient, form.sign, x)
        fits = [
            jnp.all(abs(z - move[-self._each :]) <= _RELATIVE * size + _OF_ENTRY * abs(entry))
            for z, move, size, entry in zip(predicted, moves, sizes, x, strict=True)
        ]
        return jax.tree.map(lambda x: jnp.where(jnp.all(jnp.stack(fits)), x, jnp.nan), step)


# --- without rounding to 16 bits --------------------------------------------------------------


def unrounded(program: ClosedJaxpr) -> ArraysFunction:
    """Return the program with all numbers of 16 bits in float32.

    Rounding b x to 16 bits makes of b something else, by 2⁻⁹: from step to step the errors of a
    dense run cancel, and that of a measured b would not.
    """
    program = inlined(program)
    consts = list(map(_widened, program.consts))
    return lambda *args: interpret(
        program.jaxpr, consts, list(map(_widened, args)), _without_rounding, _widened
    )


def _widened(x: Value) -> Value:
    return jnp.asarray(x, jnp.float32) if is_narrow(jnp.result_type(x)) else x


def _without_rounding(eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    dtype = aval_of(eqn.outvars[0]).dtype
    # Rounding to fewer bits than bfloat16 has counts as an operation of its own.
    is_rounded = name_of(eqn) == "convert_element_type" and is_narrow(dtype)
    if is_rounded and jnp.finfo(dtype).nmant >= jnp.finfo(jnp.bfloat16).nmant:
        return [jnp.asarray(inputs[0], jnp.float32)]
    return list(map(_widened, bound(eqn, inputs)))
