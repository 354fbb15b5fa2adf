"""Jacobians of a gradient check, and their comparison: every entry, or random directions.

    f(x) = x0 * x1 at (2, 3)      numerical  [[3], [2]]     (f(2 + h, 3) - f(2 - h, 3)) / 2h = 3
                                  reverse    [[3], [2]]     pullback(1) = (3, 2)
                                  forward    [[3], [2]]     jvp along (1, 0) = 3, (0, 1) = 2

A Jacobian is one array: a row for each coordinate of the inputs (see `entries`), a column for
each of the outputs. An entry that is not specified is moved where it is stored: in the tensor
that stores every entry, zeros included.

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

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmask._base.types import HostArray
from jmask._gradcheck.entries import primal, random_reals
from jmask._gradcheck.message import GradcheckError, Mismatch, Setting, unsupported
from jmask._gradcheck.problem import Problem

# Positive and negative, large and small. Powers of two: a right rule is rounded alike.
MULTIPLES = (1.0, -1.0, 2.0**10, -(2.0**10), 2.0**-10, -(2.0**-10))


# --- numerical ---------------------------------------------------------------------------


def difference(problem: Problem, direction: HostArray, h: float, where: str) -> HostArray:
    """Return the derivative along a direction by central differences; `where` says it."""
    what = f"a step of {h:g} in {where}"
    up, down = (problem.near(s * direction, what) for s in (h, -h))
    with np.errstate(invalid="ignore"):  # 0 where both are the same infinity
        return np.where(up == down, 0, up - down) / (2 * h)


def numerical(problem: Problem) -> HostArray:
    """Return the Jacobian by central differences; zero where it must be."""
    jacobian = np.zeros((problem.kinds.size, problem.base.size))
    for row in np.flatnonzero(~problem.vanishes).tolist():
        _, where = problem.input_of(row)
        along = difference(problem, _along(problem, row), problem.setting.eps, where)
        jacobian[row] = along / problem.scales[row]
    return jacobian


def _along(problem: Problem, rows: HostArray | int, steps: ArrayLike = 1.0) -> HostArray:
    """Return the direction with `steps`, in units of the scales, along some coordinates."""
    direction = np.zeros(problem.kinds.size)
    direction[rows] = steps * problem.scales[rows]
    return direction


# --- analytical --------------------------------------------------------------------------


class Rules:
    """The derivative rules of a function, as JAX makes them: once, for many directions.

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
            # Then it has no gradient at entries that are not there, and needs no placeholders.
            problem.with_placeholders = False
            for mode in modes:
                try:
                    self._make(mode)
                except Exception as reason:
                    raise unsupported(mode, problem.setting, reason) from reason

    def _make(self, mode: str) -> None:
        problem, tensors = self.problem, [x.tensor for x in self.problem.inputs]
        primals = [primal(x, problem.with_placeholders) for x in tensors]
        function = lambda parts: problem.smooth(tensors, parts)
        if mode == "rev":
            _, self._transposed = jax.vjp(function, primals)
            self.pullback(np.zeros_like(problem.base))
        else:
            _, self._linear = jax.linearize(function, primals)
            self.pushforward(np.zeros(problem.kinds.size))

    def pullback(self, weights: HostArray) -> HostArray:
        """Reverse mode: the derivatives of the weighted sum of the outputs."""
        (cotangents,) = self._transposed(self.problem.cotangents(weights))
        pairs = zip(self.problem.inputs, cotangents, strict=True)
        return np.concatenate([x.derivatives(cotangent) for x, cotangent in pairs])

    def pushforward(self, direction: HostArray) -> HostArray:
        """Forward mode: the derivatives of the outputs along a direction."""
        pairs = zip(self.problem.inputs, self.problem.split(direction), strict=True)
        tangents = [x.tangent(part, self.problem.with_placeholders) for x, part in pairs]
        return self.problem.reals(self._linear(tangents))

    def jacobian(self, mode: str) -> HostArray:
        """Return the Jacobian of all outputs in all inputs, (rows, columns)."""
        rows, columns = self.problem.kinds.size, self.problem.base.size
        if mode == "fwd":
            along = [self.pushforward(direction) for direction in np.eye(rows)]
            return np.array(along).reshape(rows, columns)
        pulled = [self.pullback(weights) for weights in np.eye(columns)]
        return np.array(pulled).reshape(columns, rows).T


# --- the slow check: every entry ---------------------------------------------------------


def find_mismatch(rules: Rules) -> Mismatch | None:
    """Return the worst mismatch of the first part of a Jacobian that has one, or None."""
    problem, expected = rules.problem, numerical(rules.problem)
    for mode in rules.modes:
        jacobian = rules.jacobian(mode)
        excess = _excess(problem.setting, problem.vanishes[:, None], expected, jacobian)
        for rows in problem.blocks:
            for output, columns in enumerate(problem.columns):
                part = excess[rows, columns]
                if (part > 0).any():
                    return _mismatch(problem, mode, rows, output, part, expected, jacobian)
        mismatch = _not_linear(rules, mode, jacobian)
        if mismatch is not None:
            return mismatch
    return None


def _excess(
    setting: Setting, vanishes: HostArray | bool, expected: HostArray, derivatives: HostArray
) -> HostArray:
    """Return by how much derivatives differ beyond tolerance; infinite for a nan."""
    allowed = np.where(vanishes, 0, setting.atol + setting.rtol * np.abs(expected))
    with np.errstate(invalid="ignore"):
        excess = np.abs(derivatives - expected) - allowed
    return np.where(np.isnan(excess), np.inf, excess)


def _mismatch(
    problem: Problem,
    mode: str,
    rows: HostArray,
    output: int,
    excess: HostArray,
    expected: HostArray,
    derivatives: HostArray,
) -> Mismatch:
    # The first of the worst: which of several equal ones is decided by rounding otherwise.
    row, column = np.unravel_index(np.argmax(excess >= 0.99 * np.max(excess)), excess.shape)
    columns = problem.columns[output]
    at = rows[row], columns.start + column
    dtype = problem.outputs[output].dtype
    return Mismatch(
        input=problem.input_of(at[0])[1],
        output=problem.described(int(at[1])),
        kind=problem.kinds[at[0]],
        numerical=float(expected[at]),
        analytical=float(derivatives[at]),
        numerical_row=expected[at[0], columns],
        analytical_row=derivatives[at[0], columns],
        mode=mode,
        failing=int((excess > 0).sum()),
        total=excess.size,
        sides=_sides(problem, *at),
        narrow=dtype.name if jnp.finfo(dtype).bits < 64 else "",
    )


def _sides(problem: Problem, row: int, column: int) -> tuple[float, float] | None:
    """Return the slopes on both sides of the input where they differ: a kink."""
    if problem.kinds[row] != "specified":
        return None
    setting, here = problem.setting, problem.base[column]
    step = _along(problem, row, setting.eps)
    size = step[row]
    what = f"a step in {problem.input_of(row)[0]}"
    up, down = (problem.near(s * step, what)[column] for s in (1, -1))
    left, right = (here - down) / size, (up - here) / size
    smooth = np.sqrt(setting.eps) + 10 * (
        setting.atol + setting.rtol * max(abs(left), abs(right))
    )
    return (float(left), float(right)) if abs(left - right) > smooth else None


def _not_linear(rules: Rules, mode: str, jacobian: HostArray) -> Mismatch | None:
    """Return the first random direction along which a rule does not combine the Jacobian."""
    problem, rng = rules.problem, np.random.default_rng(0)
    weights = random_reals(rng, problem.base.shape)
    direction = random_reals(rng, problem.kinds.shape)
    for multiple in MULTIPLES:
        times = "" if multiple == 1 else f" (times {multiple:g}, and divided by it)"
        if mode == "rev":
            pulled = rules.pullback(multiple * weights) / multiple
        for rows in problem.blocks:
            if mode == "rev":
                expected, derivatives = jacobian[rows] @ weights, pulled[rows]
            else:
                along = np.zeros_like(direction)
                along[rows] = direction[rows]
                expected = along @ jacobian
                derivatives = rules.pushforward(multiple * along) / multiple
            vanishes = problem.vanishes[rows[0]]
            excess = _excess(problem.setting, vanishes, expected, derivatives)
            if not (excess > 0).any():
                continue
            at, row = int(np.argmax(excess)), np.zeros(1)
            path, where = problem.input_of(rows[at if mode == "rev" else 0])
            if mode == "rev":
                names = where, f"all outputs, at random{times}"
            else:
                names = f"{path}, a random direction{times}", problem.described(at)
            return Mismatch(
                input=names[0],
                output=names[1],
                kind=problem.kinds[rows[0]],
                numerical=float(expected[at]),
                analytical=float(derivatives[at]),
                numerical_row=row,
                analytical_row=row,
                mode=mode,
                failing=1,
                total=excess.size,
                linear=False,
            )
    return None


# --- the fast check: random directions ---------------------------------------------------


def is_suspicious(rules: Rules) -> bool:
    """Decide whether a derivative along a random direction may be wrong."""
    problem, rng = rules.problem, np.random.default_rng(0)
    h = max(1e-3, problem.setting.eps)
    for multiples in (MULTIPLES[::2], MULTIPLES[1::2]):
        weights = random_reals(rng, problem.base.shape)
        pulls = []
        if "rev" in rules.modes:
            for columns in problem.columns:
                alone = np.zeros_like(weights)
                alone[columns] = weights[columns]
                pulls.append((alone, rules.pullback(alone)))
            for multiple in multiples:
                pulls.append((weights, rules.pullback(multiple * weights) / multiple))
        for rows in problem.blocks:
            direction = _along(problem, rows, random_reals(rng, rows.shape))
            pushed = []
            if "fwd" in rules.modes:
                pushed = [rules.pushforward(m * direction) / m for m in multiples]
            if problem.vanishes[rows[0]]:
                if any(np.any(x != 0) for x in (*pushed, *(pull[rows] for _, pull in pulls))):
                    return True
                continue
            try:
                where, _ = problem.input_of(rows[0])
                near, far = (difference(problem, direction, s, where) for s in (h, 2 * h))
            except GradcheckError:  # a mask changes on the way
                return True
            slopes = (4 * near - far) / 3
            pairs = [(along, slopes) for along in pushed]
            pairs += [(pull @ direction, w @ slopes) for w, pull in pulls]
            # An entry that the slow check refuses is wrong by more than `atol`: a tenth of it.
            allowed = 0.1 * problem.setting.atol
            # Not `any(... > allowed)`: a nan is a fault.
            if not all(np.all(np.abs(along - slope) <= allowed) for along, slope in pairs):
                return True
    return False
