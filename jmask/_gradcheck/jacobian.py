"""Jacobians of a gradient check, and their comparison: every entry, or random directions.

    f(x) = x0 * x1 at (2, 3)      numerical  [[3], [2]]     (f(2 + h, 3) - f(2 - h, 3)) / 2h = 3
                                  reverse    [[3], [2]]     pullback(1) = (3, 2)
                                  forward    [[3], [2]]     jvp along (1, 0) = 3, (0, 1) = 2

A Jacobian has a row for each real coordinate of an input and a column for each of an output
(see `entries`). An entry that is not specified is moved where it is stored: in the
tensor that stores every entry, zeros included.

**The slow check** compares every entry of every Jacobian:

    numerical   [[4,  3],    analytical  [[2,  0],    wrong where they differ by more than
                 [6, 13]]                 [6, 13]]    atol + rtol * |numerical|: in row 0

Where a derivative must be zero (see `entries`) it must be so exactly.

A rule may be right along single coordinates and wrong along their combinations (one that
squares the cotangent), so each mode also runs along a random direction and must give the
combination of its rows or columns. It runs along multiples of it too, and must give the
multiple: one that takes the absolute value of the cotangent, or clips it, does not.

**The fast check** compares derivatives along random directions:

    numerical   d = the slope of f along a random v, for each input
    forward     jvp along v                              against d, at every output entry
    reverse     sum of v * pullback(u), for random u     against the sum of u * d, each output
                                                         alone, and all together

Both also run along multiples of v and u, as rules must be linear, and are divided by them.

Wrong entries of a Jacobian show in such projections unless they cancel, which random sizes
make as good as impossible, or drown in what the comparison allows. An entry that the slow
check refuses is wrong by more than `atol`; so a tenth of `atol` is allowed here, and the
slopes are those of differences of fourth order, which are exact enough for that:

    d = (8 f(x + h v) - 8 f(x - h v) - f(x + 2 h v) + f(x - 2 h v)) / 12 h,   h = 0.001

The fast check gives no verdict: where a projection differs, the slow check decides, with its
steps and tolerances, and names the entry. So a right gradient is never refused by the fast
check, which costs a few evaluations whatever its size. Derivatives that must be zero (at
unspecified entries in masked semantics, under masks and at padding) are compared exactly.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._gradcheck.entries import KINDS, Input, random_reals
from jmask._gradcheck.message import GradcheckError, Mismatch, unsupported
from jmask._gradcheck.problem import Problem

# For each output its real coordinates (m, parts).
Outputs = list[np.ndarray]
# For each input and kind of coordinate the derivatives (n, parts) of one number.
Derivatives = dict[tuple[int, str], np.ndarray]
# For each input and kind of coordinate, for each output: (rows, columns).
Jacobian = dict[tuple[int, str], list[np.ndarray]]


# --- numerical ---------------------------------------------------------------------------


def moved(problem: Problem, number: int, kind: str, steps: np.ndarray, what: str) -> Outputs:
    """The outputs with one input moved by `steps` (n, parts) along coordinates of a kind."""
    x = problem.inputs[number]
    tensor = x.moved(steps) if kind == "specified" else x.full(steps)
    return problem.values({number: tensor}, what)


def difference(
    problem: Problem,
    number: int,
    kind: str,
    direction: np.ndarray,
    at: str = "",
    step: float | None = None,
) -> Outputs:
    """The derivative of the outputs along a direction, by central differences.

    Args:
        number: of the input that moves.
        kind: "specified" or "unspecified".
        direction: in the real coordinates (n, parts) of this kind.
        at: the coordinate in words, if it is one.
        step: `eps` by default.
    """
    h = problem.setting.eps if step is None else step
    path = problem.inputs[number].path
    what = f"a step of {h:g} in {path}{at and ', '}{at}"
    up, down = (moved(problem, number, kind, s * direction, what) for s in (h, -h))
    return [quotient(a, b, 2 * h) for a, b in zip(up, down, strict=True)]


def quotient(up: np.ndarray, down: np.ndarray, step: float) -> np.ndarray:
    """(up - down) / step; 0 where both are the same infinity."""
    with np.errstate(invalid="ignore"):
        return np.where(up == down, 0, up - down) / step


def scales(x: Input, kind: str) -> np.ndarray:
    """Steps are relative to the size of an entry if that is over 1: (n, parts)."""
    if kind != "specified":
        return np.ones((len(getattr(x, kind)), x.parts))
    return np.repeat(np.maximum(1, np.abs(x.values[x.specified]))[:, None], x.parts, axis=1)


def units(x: Input, kind: str) -> Iterator[np.ndarray]:
    """A direction (n, parts) for each real coordinate of a kind."""
    shape = (len(getattr(x, kind)), x.parts)
    for number in range(shape[0] * shape[1]):
        direction = np.zeros(shape)
        direction.flat[number] = 1
        yield direction


def numerical(problem: Problem, number: int, kind: str) -> list[np.ndarray]:
    """The Jacobian of each output in one input, by central differences."""
    x = problem.inputs[number]
    scale = scales(x, kind)
    rows = []
    for i, unit in enumerate(units(x, kind)):
        size = scale.flat[i]
        along = difference(problem, number, kind, unit * size, x.described(kind, i))
        rows.append([y.ravel() / size for y in along])
    return _stacked(rows, problem)


# --- analytical --------------------------------------------------------------------------


class Rules:
    """The derivative rules of a function, as JAX makes them: once, for many directions.

    Args:
        problem: the function.
        modes: "rev", "fwd" or both.

    Raises:
        GradcheckError: if JAX cannot differentiate the function in a mode.
    """

    def __init__(self, problem: Problem, modes: Sequence[str]):
        self.problem, self.modes = problem, modes
        try:
            for mode in modes:
                self._make(mode)
        except Exception:
            # A rule of the function (custom_vjp) may insist on the structure of its arguments.
            # Then it has no gradient at entries that are not there, and needs no phantoms.
            problem.with_phantoms = False
            for mode in modes:
                try:
                    self._make(mode)
                except Exception as reason:
                    raise unsupported(mode, problem.setting, reason) from reason

    def _make(self, mode: str) -> None:
        problem = self.problem
        if mode == "rev":
            _, self._transposed = jax.vjp(problem.of_parts, problem.primals())
            self.pullback([np.zeros_like(y) for y in problem.base])
        else:
            _, self._linear = jax.linearize(problem.of_parts, problem.primals())
            nothing = np.zeros((len(problem.inputs[0].specified), problem.inputs[0].parts))
            self.pushforward(0, "specified", nothing)

    def pullback(self, weights: Sequence[np.ndarray]) -> Derivatives:
        """Reverse mode: the derivatives of the outputs, weighted by (m, parts) numbers."""
        inputs, outputs = self.problem.inputs, self.problem.outputs
        vectors = [y.cotangent(w) for y, w in zip(outputs, weights, strict=True)]
        (cotangents,) = self._transposed(vectors)
        return {
            (number, kind): x.derivatives(kind, cotangent)
            for number, (x, cotangent) in enumerate(zip(inputs, cotangents, strict=True))
            for kind in KINDS
        }

    def pushforward(self, number: int, kind: str, direction: np.ndarray) -> Outputs:
        """Forward mode: the derivatives of the outputs along a direction (n, parts)."""
        tangents = []
        for i, x in enumerate(self.problem.inputs):
            steps = direction if i == number else np.zeros((len(getattr(x, kind)), x.parts))
            tangents.append(x.tangent(kind, steps, self.problem.with_phantoms))
        along = self._linear(tangents)
        return [y.reals(t) for y, t in zip(self.problem.outputs, along, strict=True)]

    def jacobian(self, mode: str) -> Jacobian:
        """The Jacobian of every output in every input."""
        return self._by_columns() if mode == "rev" else self._by_rows()

    def _by_columns(self) -> Jacobian:
        problem = self.problem
        result: Jacobian = {
            (a, kind): [
                np.zeros((len(getattr(x, kind)) * x.parts, y.size)) for y in problem.base
            ]
            for a, x in enumerate(problem.inputs)
            for kind in KINDS
        }
        for number, y in enumerate(problem.base):
            for i in range(y.size):
                weights = [np.zeros_like(y) for y in problem.base]
                weights[number].flat[i] = 1
                for place, derivatives in self.pullback(weights).items():
                    result[place][number][:, i] = derivatives.ravel()
        return result

    def _by_rows(self) -> Jacobian:
        result: Jacobian = {}
        for number, x in enumerate(self.problem.inputs):
            for kind in KINDS:
                rows = [
                    [y.ravel() for y in self.pushforward(number, kind, unit)]
                    for unit in units(x, kind)
                ]
                result[number, kind] = _stacked(rows, self.problem)
        return result


def _stacked(rows: list[list[np.ndarray]], problem: Problem) -> list[np.ndarray]:
    if not rows:
        return [np.zeros((0, y.size)) for y in problem.base]
    return [np.stack(row) for row in zip(*rows, strict=True)]


# --- every entry -------------------------------------------------------------------------


# Positive and negative, large and small. Powers of two: a right rule is rounded alike.
MULTIPLES = (1.0, -1.0, 2.0**10, -(2.0**10), 2.0**-10, -(2.0**-10))


def find_mismatch(rules: Rules) -> Mismatch | None:
    """The worst mismatch of the first Jacobian that has one, or None."""
    problem = rules.problem
    numerical = {
        (number, kind): _expected(problem, number, kind)
        for number in range(len(problem.inputs))
        for kind in KINDS
    }
    for mode in rules.modes:
        found = rules.jacobian(mode)
        for place, expected in numerical.items():
            for output in range(len(problem.outputs)):
                pair = expected[output], found[place][output]
                mismatch = _compare(problem, mode, *place, output, *pair)
                if mismatch is not None:
                    return mismatch
        combined = {"rev": _combined_pullback, "fwd": _combined_pushforward}[mode]
        mismatch = combined(rules, found)
        if mismatch is not None:
            return mismatch
    return None


def must_vanish(problem: Problem, kind: str) -> bool:
    """Whether derivatives along coordinates of a kind must be zero."""
    return kind == "hidden" or (kind == "unspecified" and problem.setting.masked)


def _expected(problem: Problem, number: int, kind: str) -> list[np.ndarray]:
    if must_vanish(problem, kind):
        x = problem.inputs[number]
        rows = len(getattr(x, kind)) * x.parts
        return [np.zeros((rows, y.size)) for y in problem.base]
    return numerical(problem, number, kind)


def _compare(
    problem: Problem,
    mode: str,
    number: int,
    kind: str,
    output: int,
    expected: np.ndarray,
    found: np.ndarray,
) -> Mismatch | None:
    error = _excess(problem, kind, expected, found)
    wrong = error > 0
    if not wrong.any():
        return None
    x, y = problem.inputs[number], problem.outputs[output]
    # The first of the worst: which of several equal ones is decided by rounding otherwise.
    row, column = np.unravel_index(np.argmax(error >= 0.99 * np.max(error)), error.shape)
    return Mismatch(
        input=f"{x.path}, {x.described(kind, int(row))}",
        output=y.described(int(column)),
        kind=kind,
        numerical=float(expected[row, column]),
        analytical=float(found[row, column]),
        numerical_row=expected[row],
        analytical_row=found[row],
        mode=mode,
        failing=int(wrong.sum()),
        total=wrong.size,
        sides=_sides(problem, number, kind, int(row), output, int(column)),
        narrow=_narrow(y.dtype),
    )


def _excess(problem: Problem, kind: str, expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """By how much derivatives differ beyond what is allowed; infinite for a nan."""
    setting = problem.setting
    allowed = setting.atol + setting.rtol * np.abs(expected)
    if must_vanish(problem, kind):
        allowed = np.zeros_like(expected)
    with np.errstate(invalid="ignore"):
        excess = np.abs(found - expected) - allowed
    return np.where(np.isnan(excess), np.inf, excess)


def _sides(
    problem: Problem, number: int, kind: str, row: int, output: int, column: int
) -> tuple[float, float] | None:
    """The slopes on both sides of the input where they differ: a kink."""
    if kind != "specified":
        return None
    x, h = problem.inputs[number], problem.setting.eps
    step = np.zeros((len(x.specified), x.parts))
    step.flat[row] = h * scales(x, kind).flat[row]
    size = step.flat[row]
    here = problem.base[output].flat[column]
    what = f"a step in {x.path}"
    up, down = (
        moved(problem, number, kind, s * step, what)[output].flat[column] for s in (1, -1)
    )
    left, right = (here - down) / size, (up - here) / size
    setting = problem.setting
    smooth = np.sqrt(h) + 10 * (setting.atol + setting.rtol * max(abs(left), abs(right)))
    return (float(left), float(right)) if abs(left - right) > smooth else None


def _narrow(dtype: Any) -> str:
    return dtype.name if jnp.finfo(dtype).bits < 64 else ""


def _combined_pullback(rules: Rules, found: Jacobian) -> Mismatch | None:
    """Whether random cotangents are pulled back to the combination of the columns."""
    problem = rules.problem
    rng = np.random.default_rng(0)
    weights = [random_reals(rng, y.shape) for y in problem.base]
    for multiple in MULTIPLES:
        pulled = rules.pullback([multiple * w for w in weights])
        for (number, kind), columns in found.items():
            x = problem.inputs[number]
            parts = [a @ w.ravel() for a, w in zip(columns, weights, strict=True)]
            expected, given = np.sum(parts, axis=0), pulled[number, kind].ravel() / multiple
            wrong = _excess(problem, kind, expected, given)
            if (wrong > 0).any():
                at = int(np.argmax(wrong))
                name = f"{x.path}, {x.described(kind, at)}"
                what = f"all outputs, at random{_times(multiple)}"
                return _not_linear("rev", kind, name, what, expected, given, at)
    return None


def _combined_pushforward(rules: Rules, found: Jacobian) -> Mismatch | None:
    """Whether random tangents are pushed forward to the combination of the rows."""
    problem = rules.problem
    rng = np.random.default_rng(0)
    for (number, kind), rows in found.items():
        x = problem.inputs[number]
        direction = random_reals(rng, (len(getattr(x, kind)), x.parts))
        for multiple in MULTIPLES:
            along = rules.pushforward(number, kind, multiple * direction)
            for y, a, tangent in zip(problem.outputs, rows, along, strict=True):
                expected, given = direction.ravel() @ a, tangent.ravel() / multiple
                wrong = _excess(problem, kind, expected, given)
                if (wrong > 0).any():
                    at = int(np.argmax(wrong))
                    name = f"{x.path}, a random direction{_times(multiple)}"
                    what = y.described(at)
                    return _not_linear("fwd", kind, name, what, expected, given, at)
    return None


def _times(multiple: float) -> str:
    return "" if multiple == 1 else f" (times {multiple:g}, and divided by it)"


def _not_linear(
    mode: str, kind: str, x: str, y: str, expected: np.ndarray, given: np.ndarray, at: int
) -> Mismatch:
    one = np.zeros(1)
    return Mismatch(
        input=x,
        output=y,
        kind=kind,
        numerical=float(expected[at]),
        analytical=float(given[at]),
        numerical_row=one,
        analytical_row=one,
        mode=mode,
        failing=1,
        total=expected.size,
        linear=False,
    )


# --- random directions -------------------------------------------------------------------


_STEP = 1e-3
_FRACTION = 0.1

# Weights of the outputs, the multiple of them that was pulled back, and what came.
_Pull = tuple[list[np.ndarray], float, Derivatives]


def is_suspicious(rules: Rules) -> bool:
    """Whether a derivative along a random direction may be wrong."""
    problem, rng = rules.problem, np.random.default_rng(0)
    for multiples in (MULTIPLES[::2], MULTIPLES[1::2]):
        weights = [random_reals(rng, y.shape) for y in problem.base]
        pulls: list[_Pull] = []
        if "rev" in rules.modes:
            alone = [_alone(weights, i) for i in range(len(weights))]
            pulls = [(w, 1.0, rules.pullback(w)) for w in alone]
            for multiple in multiples:
                pulled = rules.pullback([multiple * w for w in weights])
                pulls.append((weights, multiple, pulled))
        for number, x in enumerate(problem.inputs):
            for kind in KINDS:
                shape = (len(getattr(x, kind)), x.parts)
                direction = random_reals(rng, shape) * scales(x, kind)
                if shape[0] and _shows(rules, number, kind, direction, multiples, pulls):
                    return True
    return False


def _shows(
    rules: Rules,
    number: int,
    kind: str,
    direction: np.ndarray,
    multiples: Sequence[float],
    pulls: Sequence[_Pull],
) -> bool:
    """Whether a fault shows along a direction, in coordinates of one kind of one input.

    Args:
        multiples: of the direction, to go along in forward mode.
        pulls: what reverse mode gives; nothing without it.
    """
    problem, pushed = rules.problem, []
    if "fwd" in rules.modes:
        for multiple in multiples:
            along = rules.pushforward(number, kind, multiple * direction)
            pushed.append([y / multiple for y in along])
    pulled = [pull[number, kind] / multiple for _, multiple, pull in pulls]
    if must_vanish(problem, kind):
        return any(np.any(derivatives != 0) for derivatives in itertools.chain(*pushed, pulled))
    slopes = _slopes(problem, number, kind, direction)
    if slopes is None:
        return True
    pairs = [pair for along in pushed for pair in zip(along, slopes, strict=True)]
    for (weights, _, _), pull in zip(pulls, pulled, strict=True):
        weighted = sum(np.sum(w * slope) for w, slope in zip(weights, slopes, strict=True))
        pairs.append((np.sum(pull * direction), weighted))
    allowed = _FRACTION * problem.setting.atol
    # Not `any(... > allowed)`: a nan is a fault.
    return not all(np.all(np.abs(given - slope) <= allowed) for given, slope in pairs)


def _alone(weights: Sequence[np.ndarray], number: int) -> list[np.ndarray]:
    """The weights of one output, zero for the others."""
    return [w if i == number else np.zeros_like(w) for i, w in enumerate(weights)]


def _slopes(problem: Problem, number: int, kind: str, direction: np.ndarray) -> Outputs | None:
    """The derivative along a direction; None if a mask changes on the way."""
    h = max(_STEP, problem.setting.eps)
    try:
        near, far = (
            difference(problem, number, kind, direction, step=step) for step in (h, 2 * h)
        )
    except GradcheckError:
        return None
    return [(4 * a - b) / 3 for a, b in zip(near, far, strict=True)]
