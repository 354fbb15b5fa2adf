"""Jacobians of a gradient check: by central differences, by reverse and by forward mode.

    f(x) = x0 * x1 at (2, 3)      numerical  [[3], [2]]     (f(2 + h, 3) - f(2 - h, 3)) / 2h = 3
                                  reverse    [[3], [2]]     pullback(1) = (3, 2)
                                  forward    [[3], [2]]     jvp along (1, 0) = 3, (0, 1) = 2

A Jacobian has a row for each real coordinate of an input and a column for each of an output
(see `entries`). An entry that is not specified is moved where it is stored: in the
tensor that stores every entry, zeros included.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jmask._gradcheck.entries import KINDS, Input
from jmask._gradcheck.message import unsupported
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
