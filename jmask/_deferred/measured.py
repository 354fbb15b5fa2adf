"""Measure what an optimizer does to a row without a gradient, by giving it rows to do it to.

Nothing is known of an optimizer but how to run it. It gets rows of numbers with a gradient of
zero, in groups:

    row          p    m    v            what the step makes of it tells
    unit         1    0    0            decay of p:           A[0, 0]
    unit         0    1    0            b1, and c / e:        A[1, 1], the quotient at v = 0
    unit         0    0    1            b2:                   A[2, 2]
    quotient     0    1    e²           the quotient where e counts as much as √v
    check        random                 whether all of this predicts a step

The structure, which of these numbers may differ from 0, is found when a state is made, at
several counts of steps: it is the first one that predicts them (`form_of`). The numbers are
measured in each step (`Probes`), together with the rows of the batch. So is the check: a step
that does not fit the structure makes inactive rows read as nan.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmask._base.array_types import is_narrow, trailing, wide
from jmask._base.forms import aval_of, branches_of, holds_jaxprs, name_of, switch_like
from jmask._base.jaxprs import bound, inlined, interpret
from jmask._base.shardings import automatically
from jmask._base.types import Argument, ArraysFunction, HostArray, PyTreeDef, Shape
from jmask._deferred.missed_steps import Form, Pair, Step, terms_for
from jmask._lazy.checks import NotRowLocalError
from jmask._lazy.step import LazyStep
from jmask._ops.rows import trial
from jmask._tensors.row_sparse import RowSparse

# The greatest difference of a step from its prediction: relative to the terms of its sum, and
# to what it is added to; and of numbers that are too small for float32, which become 0.
_RELATIVE, _OF_ENTRY, _SMALL = 2e-4, 1e-6, 1e-37
# The least ratio of the structure's e to the step's at which e is measured to some 2e-6.
_LEAST = 0.05


class NotDeferrableError(ValueError):
    """Say why rows cannot wait for a transformation."""

    def __init__(self, why: str):
        super().__init__(
            f"jmask.deferred cannot take this `inner`: {why}. Use jmask.densify() before it "
            "for the dense trajectory, or jmask.lazy, with which rows without a gradient rest."
        )


def measured(
    form: Form,
    groups: Sequence[HostArray],
    moves: Sequence[jax.Array | HostArray],
    at_e: int,
    checks: Argument,
) -> tuple[Step, Argument]:
    """Return the scalars of a step, and whether they predict what it did to some groups.

    Args:
        groups, moves: parameter and state, and their moves, (groups, n): a unit of each first.
        at_e: the group whose quotient is c / 2e if the step has the e of `form`.
        checks: the groups that are predicted.
    """
    xp: Argument = np if isinstance(moves[0], np.ndarray) else jnp

    def factor(row: int, column: int, group: int) -> jax.Array:
        # The mean of ratios: where all are 0 or -1, so is it.
        return xp.mean(moves[row][group] / groups[column][group])

    step = Step({(i, j): factor(i, j, j) for i, j in form.changes})
    x = [entry[checks] for entry in groups]
    terms: list[list[Argument]] = [[0.0 * entry] for entry in x]
    for (i, j), change in step.changes.items():
        terms[i].append(change * x[j])
    if form.sign is not None:
        step = step._replace(sign=xp.mean(moves[0][form.sign]))
        terms[0].append(step.sign * np.sign(x[form.sign]))
    fits: list[Argument] = []
    if form.quotient is not None:
        a, b = form.quotient
        at_0, half = factor(0, a, a), factor(0, a, at_e)
        is_taken = half != 0  # a rate may be 0 for a time
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = at_0 / xp.where(is_taken, half, 1) - 1  # e of `form`, in this e
            e = xp.where(is_taken, form.e / ratio, form.e)
            step = step._replace(c=at_0 * e, e=e)
            terms[0].append(step.c * x[a] / (x[b] ** 0.5 + e))
        # If e is much larger, the difference of two quotients is rounding alone, and the
        # checks, whose roots are near the e of `form`, would not see it.
        fits.append(~is_taken | (ratio > _LEAST))
    fits += [
        xp.all(
            abs(sum(of) - move[checks])
            <= _RELATIVE * sum(map(abs, of)) + _OF_ENTRY * abs(entry) + _SMALL
        )
        for of, move, entry in zip(terms, moves, x, strict=True)
    ]
    return step, xp.all(xp.stack(fits))


# --- the structure ------------------------------------------------------------------------
#
# Rows of one entry: a unit for each entry, units with a second entry v, and random ones.

# Counts of steps at which the structure of a step is looked at: a rate may begin at 0.
_LATER = (1_000, 100_000)
# Numbers under the root that tell c / (√v + e) from c / √(v + e).
_UNDER_ROOT = (1.0, 1e-4, 1e-8, 1e-12, 1e-16)


def questions(width: int) -> tuple[HostArray, dict[Pair, int]]:
    """Return the rows (R, width) of which `form_of` wants to know what a step makes.

    With them come, for each quotient s_a / √s_b, the number of the row in which both are 1.
    """
    unit = np.eye(width)
    rows, both_1 = [*unit, *-unit, np.zeros(width)], dict[Pair, int]()
    for a, b in itertools.permutations(range(1, width), 2):
        both_1[a, b] = len(rows)
        rows += [unit[a] + v * unit[b] for v in _UNDER_ROOT]
    rng = np.random.default_rng(1)
    sizes = 10.0 ** np.concatenate(
        [rng.uniform(-3, 3, (64, width)), rng.uniform(-8, 0, (64, width))]
    )
    signed = sizes[::8] * rng.choice([-1, 1], (16, width))
    return np.stack([*rows, *sizes, *signed]), both_1


def form_of(steps: Sequence[HostArray], per_row: Sequence[bool]) -> Form:
    """Return the structure of steps without a gradient, or raise why it is none of them.

    Args:
        steps: for each of several counts, what it makes of the `questions`: the update of the
            parameter and the new state, (R, width).
        per_row: of which entries a row has one.
    """
    width = len(per_row)
    x, both_1 = questions(width)
    moves = [new - x * (np.arange(width) > 0) for new in steps]
    positive = tuple(
        i for i in range(width) if not all(np.isfinite(y[width + i]).all() for y in moves)
    )
    asked = np.array([not (row[[*positive]] < 0).any() for row in x])
    if not all(np.isfinite(y[asked]).all() for y in moves):
        raise NotDeferrableError(
            "a row without a gradient becomes nan or infinite in some states, as where it is "
            "divided by the gradient itself, with `eps` 0, or moments are not independent"
        )
    if any(y[2 * width].any() for y in moves):
        raise NotDeferrableError("something is added to every row in each step")
    groups = list(x.T[:, :, None])
    every: set[Pair] = {(i, j) for i in range(width) for j in range(width)}
    without = lambda a: tuple(every - {(0, a)})
    candidates = [(Form(width, tuple(every)), 0)]
    candidates += [(Form(width, without(a), sign=a), 0) for a in range(1, width)]
    candidates += [(Form(width, without(q[0]), quotient=q), at) for q, at in both_1.items()]
    for form, at_e in candidates:
        made = [measured(form, groups, list(y.T[:, :, None]), at_e, asked) for y in moves]
        scales = [step.e for step, _ in made if step.c]
        if all(fits for _, fits in made) and all(0 < e < 1e6 for e in scales):
            break
    else:
        raise NotDeferrableError(
            "what it does to a row without a gradient has no closed form, as with L2 decay "
            'inside an adaptive gradient (decoupled decay, `decay_mode="decoupled"` or '
            "optax.adamw, has one), `eps_root`, or conditions on what the row holds"
        )
    changes = {pair for step, _ in made for pair, change in step.changes.items() if change}
    special = {*(form.quotient or ()), *(() if form.sign is None else (form.sign,))}
    for row, column in changes:
        if row and per_row[row] != per_row[column]:
            raise NotDeferrableError("its state mixes the entries of a row")
        if (row != column and special & {row, column}) or (special and 0 == column < row):
            raise NotDeferrableError(
                "the moments that it divides depend on the parameter, or on each other"
            )
    # That of the parameter is always looked at: nan says that the check failed.
    form = dataclasses.replace(
        form, changes=tuple(sorted({(0, 0), *changes})), positive=positive
    )
    if form.quotient is None:
        return form
    if scales[-1] < 2e-18:  # rows of `Probes` hold its square, and a hundredth of that
        raise NotDeferrableError(
            f"`eps`={scales[-1]:.3g} is too small for its square to be a number of float32: "
            "take 1e-17 or more"
        )
    b1, b2 = (float(np.float32(1 + moves[0][i, i])) for i in form.quotient)
    terms = terms_for(b1, b2)
    if terms is None:
        raise NotDeferrableError(
            f"with `b1`={b1:.6g} and `b2`={b2:.6g} no short sum of its steps is exact: b2 has "
            "to be nearer to 1 than b1 is, and below it (0.999 is 1 in moments of bfloat16)"
        )
    return dataclasses.replace(form, terms=terms, e=float(scales[-1]))


# --- rows, to ask an optimizer --------------------------------------------------------------

FormOrReason = Form | NotDeferrableError | NotRowLocalError | None
"""The structure of steps without a gradient, or why there is none; None of a number."""


def places_of_tables(step: LazyStep) -> dict[int, list[int]]:
    """Return the positions of each table's leaves, and results: gradient, or update; state."""
    places: dict[int, list[int]] = {}
    for k, leaf in enumerate(step.leaves):
        if leaf.table is not None and leaf.kind != "param":
            places.setdefault(leaf.table, []).append(k)
    return places


def with_rows(step: LazyStep, rows: Mapping[int, Sequence[HostArray]]) -> list[jax.Array]:
    """Return the arrays of a step with other `rows` (n, *row), and a gradient of zero."""
    arrays = [leaf.value for leaf in step.leaves]
    params = {leaf.table: k for k, leaf in enumerate(step.leaves) if leaf.kind == "param"}
    for i, (gradient, *slots) in places_of_tables(step).items():
        numbers = 0 * rows[i][0], *rows[i]
        for k, x in zip((gradient, params[i], *slots), numbers, strict=True):
            arrays[k] = jnp.asarray(x, wide(arrays[k].dtype))
    return arrays


def forms_of_steps(
    inner: optax.GradientTransformationExtraArgs,
    tree: PyTreeDef,
    likes: Sequence[jax.ShapeDtypeStruct],
) -> list[FormOrReason]:
    """Find the structure of each parameter's steps without a gradient.

    The optimizer takes steps of small tables, with the `questions` as rows; `likes` are the
    parameters, each with one row.
    """
    forms: list[FormOrReason] = [None] * len(likes)
    with jax.ensure_compile_time_eval():
        params = tree.unflatten([jnp.ones(x.shape, x.dtype) for x in likes])
        state, zeros = inner.init(params), jax.tree.map(jnp.zeros_like, params)

    def step_of_tables(tables: Sequence[int]) -> LazyStep:
        grads = jax.tree.leaves(zeros)
        for i in tables:
            grads[i] = RowSparse.zeros(likes[i].shape, likes[i].dtype)
        return LazyStep.of(inner, tree.unflatten(grads), state, params, {})

    is_table = lambda x: x.ndim and 0 not in x.shape and jnp.issubdtype(x.dtype, jnp.floating)
    tables = [i for i, x in enumerate(likes) if is_table(x)]
    try:
        step = step_of_tables(tables)
    except NotRowLocalError:  # some of them count rows: those are not deferred
        for i in tables:
            try:
                step_of_tables([i])
            except NotRowLocalError as error:
                forms[i] = error
        step = step_of_tables([i for i in tables if forms[i] is None])
    rows: dict[int, list[HostArray]] = {}
    steps: dict[int, list[HostArray]] = {}
    places = places_of_tables(step)
    for i, at in places.items():
        shapes = [step.leaves[k].inner_shape.shape[1:] for k in at]
        columns = zip(questions(len(at))[0].T, shapes, strict=True)
        rows[i] = [np.broadcast_to(trailing(x, 1 + len(y)), (len(x), *y)) for x, y in columns]
        steps[i] = []
    shared = [k for k, x in enumerate(step.leaves) if x.kind == "state" and x.table is None]
    with trial():  # with numbers that a run has not
        arrays = with_rows(step, rows)
        pairs = zip(step.leaves, arrays, strict=True)
        opened = [leaf.inner_shape.update(shape=x.shape) for leaf, x in pairs]
        run = jax.jit(unrounded(jax.make_jaxpr(step.flat_update)(*opened)))
        for later in (0, 0, 0, *_LATER):
            for k in shared:
                if arrays[k].ndim == 0 and jnp.issubdtype(arrays[k].dtype, jnp.integer):
                    arrays[k] = arrays[k] + later
            new = run(*arrays)
            if any(isinstance(x, Tracer) for x in new):
                raise NotDeferrableError(
                    "it holds a number that is traced, and the structure of its steps is found "
                    "beforehand. A rate that a program sets goes into the state, "
                    "jmask.deferred(optax.inject_hyperparams(optax.adam)(0.1))"
                )
            for i, at in places.items():
                first = [np.asarray(new[k]).reshape(len(new[k]), -1)[:, 0] for k in at]
                steps[i].append(np.stack(first, 1))
            for k in shared:
                arrays[k] = new[k]
    for i in places:
        per_row = [x.shape[1:] != rows[i][0].shape[1:] for x in rows[i]]
        try:
            forms[i] = form_of(steps[i], per_row)
        except NotDeferrableError as error:
            forms[i] = error
    return forms


# --- the numbers of a step ----------------------------------------------------------------

# An optimizer rounds b x, and so does a measurement, at one x always in the same direction. The
# mean over so many x is b but for 2e-9, and thousands of steps add up to no more than rounding.
_ENTRIES = 64


class Probes:
    """Rows of numbers that an optimizer gets in addition to the rows of the batch.

    `rows` are of the parameter and of each array of its state.
    """

    def __init__(self, form: Form, shapes: Sequence[Shape]):
        self.form = form
        each = max(-(-_ENTRIES // max(math.prod(shape), 1)) for shape in shapes)
        units = [*np.eye(form.width)]
        divisor = None
        if form.quotient is not None:
            a, divisor = form.quotient
            units.append(units[a] + form.e**2 * units[divisor])
        rng = np.random.default_rng(0)
        self.rows: list[HostArray] = []
        for i, shape in enumerate(shapes):
            count = each * max(math.prod(shape), 1)
            mantissas = 1 + np.modf(np.arange(count) * 0.6180339887)[0]
            check = rng.uniform(0.5, 1.5, count)
            if i == divisor:
                check = form.e**2 * 10.0 ** rng.uniform(-2, 6, count)
            elif i not in form.positive:
                check *= rng.choice([-1.0, 1.0], count)
            # What is under the root is to be e² itself, where it is.
            exact = [x[i] if i == divisor and x[i] != 1 else x[i] * mantissas for x in units]
            numbers = np.stack([np.broadcast_to(x, count) for x in (*exact, check)])
            self.rows.append(numbers.reshape(-1, *shape).astype(np.float32))

    def step(self, new: Sequence[jax.Array]) -> Step:
        """Return the scalars of a step, nan if they do not predict what it did to the check.

        Args:
            new: the update of the parameter, and the new state, of `rows`.
        """
        width, update, *state = self.form.width, *new
        count = width + 1 + (self.form.quotient is not None)
        moves = [update, *(y - x for x, y in zip(self.rows[1:], state, strict=True))]
        in_groups = lambda x: x.reshape(count, -1, *x.shape[1:])
        groups, moves = list(map(in_groups, self.rows)), list(map(in_groups, moves))
        step, fits = measured(self.form, groups, moves, width, slice(-1, None))
        return jax.tree.map(lambda x: jnp.where(fits, x, jnp.nan), step)


def steps_of_inactive_rows(step: LazyStep, forms: Sequence[FormOrReason]) -> list[Step | None]:
    """Return the step of rows without a gradient, of each table, by what it makes of probes.

    The probes are in a step with the rows of the batch where it sums over rows: for a norm.
    """
    proof = step.proof
    if proof is None:
        return [None] * len(forms)
    probes: dict[int, Probes] = {}
    places = places_of_tables(step)
    for i, at in places.items():
        form = forms[i]
        if not isinstance(form, Form):
            raise form or NotDeferrableError("a number has no rows")
        probes[i] = Probes(form, [step.leaves[k].inner_shape.shape[1:] for k in at])
    rows = with_rows(step, {i: x.rows for i, x in probes.items()})
    alone, results = not proof.sums_over_rows, [k for at in places.values() for k in at]

    def probed(*given: jax.Array) -> list[jax.Array]:
        """Run the step on the probes, with the rows of the batch if it sums over rows."""
        arrays, sizes = list(given), {}
        for k, (leaf, x) in enumerate(zip(step.leaves, rows, strict=True)):
            if leaf.table is not None:
                if not alone:
                    arrays[k] = jnp.concatenate([arrays[k].astype(x.dtype), x])
                sizes[leaf.table] = len(arrays[k])
        new = unrounded(proof.at(sizes))(*arrays)
        return [new[k][-len(rows[k]) :] for k in results]

    given = rows if alone else step.rows()
    # Of probes an optimizer may make nan and drop it, which is no mistake of the run.
    with jax.debug_nans(False), jax.debug_infs(False):
        new = iter(automatically(probed, *given, spec=[() for _ in results]))
    made = {i: x.step([next(new) for _ in places[i]]) for i, x in probes.items()}
    return [made.get(i) for i in range(len(forms))]


# --- without rounding to 16 bits --------------------------------------------------------------


def unrounded(program: ClosedJaxpr) -> ArraysFunction:
    """Return the program with all numbers of 16 bits in float32.

    Rounding b x to 16 bits makes of b something else, by 2⁻⁹: from step to step the errors of a
    dense run cancel, and the error of a measured b would not.
    """
    program = inlined(program)
    widened = lambda x: jnp.asarray(x, jnp.float32) if is_narrow(jnp.result_type(x)) else x

    def rule(eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
        if name_of(eqn) == "cond":
            which, *given = inputs
            runs = [unrounded(ClosedJaxpr(*branch)) for branch in branches_of(eqn)]
            return switch_like(eqn, which, [functools.partial(run, *given) for run in runs])
        if holds_jaxprs(eqn):  # loops carry what they were traced for
            pairs = zip(inputs, eqn.invars, strict=True)
            inputs = [jnp.asarray(x, aval_of(v).dtype) for x, v in pairs]
        dtype = aval_of(eqn.outvars[0]).dtype
        # Rounding to fewer bits than bfloat16 has counts as an operation of its own.
        is_rounded = name_of(eqn) == "convert_element_type" and is_narrow(dtype)
        if is_rounded and jnp.finfo(dtype).nmant >= jnp.finfo(jnp.bfloat16).nmant:
            return [jnp.asarray(inputs[0], jnp.float32)]
        return list(map(widened, bound(eqn, inputs)))

    consts = list(map(widened, program.consts))
    run = lambda args: interpret(program.jaxpr, consts, args, rule, widened)
    return lambda *args: run(list(map(widened, args)))
