"""The slow check: every entry of every Jacobian, and that derivative rules are linear.

    numerical   [[4,  3],    analytical  [[2,  0],    wrong where they differ by more than
                 [6, 13]]                 [6, 13]]    atol + rtol * |numerical|: in row 0

Where a derivative must be zero (see `entries`) it must be so exactly.

A rule may be right along single coordinates and wrong along their combinations (one that
squares the cotangent), so each mode also runs along a random direction and must give the
combination of its rows or columns. It runs along multiples of it too, and must give the
multiple: one that takes the absolute value of the cotangent, or clips it, does not.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jmask._gradcheck import jacobian as jacobians
from jmask._gradcheck.entries import KINDS, random_reals
from jmask._gradcheck.jacobian import Jacobian, Rules
from jmask._gradcheck.message import Mismatch
from jmask._gradcheck.problem import Problem

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
    return jacobians.numerical(problem, number, kind)


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
    step.flat[row] = h * jacobians.scales(x, kind).flat[row]
    size = step.flat[row]
    here = problem.base[output].flat[column]
    what = f"a step in {x.path}"
    up, down = (
        jacobians.moved(problem, number, kind, s * step, what)[output].flat[column]
        for s in (1, -1)
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
