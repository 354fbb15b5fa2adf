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

from jmask._gradcheck.entries import KINDS, primal, random_reals
from jmask._gradcheck.message import GradcheckError, Mismatch, Setting, unsupported
from jmask._gradcheck.problem import Block, Problem

# Positive and negative, large and small. Powers of two: a right rule is rounded alike.
MULTIPLES = (1.0, -1.0, 2.0**10, -(2.0**10), 2.0**-10, -(2.0**-10))


# --- numerical ---------------------------------------------------------------------------


def moved(problem: Problem, block: Block, steps: np.ndarray, what: str) -> np.ndarray:
    """Return the outputs with one input moved by `steps` along the coordinates of a block."""
    x = problem.inputs[block.number]
    steps = steps.reshape(-1, x.parts)
    tensor = x.moved(steps) if block.kind == "specified" else x.full(steps)
    return problem.values({block.number: tensor}, what)


def difference(
    problem: Problem, block: Block, direction: np.ndarray, h: float, at: str = ""
) -> np.ndarray:
    """Return the derivative of the outputs along a direction, by central differences.

    Args:
        direction: in the coordinates of the block.
        h: the step.
        at: the coordinate in words, if it is one.
    """
    path = problem.inputs[block.number].path
    what = f"a step of {h:g} in {path}{at and ', '}{at}"
    up, down = (moved(problem, block, s * direction, what) for s in (h, -h))
    with np.errstate(invalid="ignore"):  # 0 where both are the same infinity
        return np.where(up == down, 0, up - down) / (2 * h)


def scales(problem: Problem, block: Block) -> np.ndarray:
    """Steps along the coordinates of a block: the size of each entry, but at least 1."""
    x = problem.inputs[block.number]
    if block.kind != "specified":
        return np.ones(x.count(block.kind))
    return np.repeat(np.maximum(1, np.abs(x.values[x.specified])), x.parts)


def numerical(problem: Problem) -> np.ndarray:
    """Return the Jacobian by central differences; zero where it must be."""
    jacobian = np.zeros((problem.size, problem.base.size))
    for block in problem.blocks:
        if block.vanishes:
            continue
        x = problem.inputs[block.number]
        for i, unit in enumerate(np.diag(scales(problem, block))):
            at, h = x.described(block.kind, i), problem.setting.eps
            along = difference(problem, block, unit, h, at)
            jacobian[block.rows.start + i] = along / unit[i]
    return jacobian


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
            self.pushforward(np.zeros(problem.size))

    def pullback(self, weights: np.ndarray) -> np.ndarray:
        """Reverse mode: the derivatives of the weighted sum of the outputs."""
        (cotangents,) = self._transposed(self.problem.cotangents(weights))
        pairs = zip(self.problem.inputs, cotangents, strict=True)
        return np.concatenate([x.derivatives(cotangent) for x, cotangent in pairs])

    def pushforward(self, direction: np.ndarray) -> np.ndarray:
        """Forward mode: the derivatives of the outputs along a direction."""
        tangents, start = [], 0
        for x in self.problem.inputs:
            stop = start + sum(map(x.count, KINDS))
            tangents.append(x.tangent(direction[start:stop], self.problem.with_placeholders))
            start = stop
        return self.problem.reals(self._linear(tangents))

    def jacobian(self, mode: str) -> np.ndarray:
        """Return the Jacobian of all outputs in all inputs, (rows, columns)."""
        rows, columns = self.problem.size, self.problem.base.size
        if mode == "fwd":
            along = map(self.pushforward, np.eye(rows))
            return np.stack([*along]) if rows else np.zeros((0, columns))
        pulled = map(self.pullback, np.eye(columns))
        return np.stack([*pulled], axis=1) if columns else np.zeros((rows, 0))


# --- the slow check: every entry ---------------------------------------------------------


def find_mismatch(rules: Rules) -> Mismatch | None:
    """Return the worst mismatch of the first part of a Jacobian that has one, or None."""
    problem, expected = rules.problem, numerical(rules.problem)
    for mode in rules.modes:
        jacobian = rules.jacobian(mode)
        excess = _excess(problem.setting, problem.vanishes[:, None], expected, jacobian)
        for block in problem.blocks:
            for output in range(len(problem.outputs)):
                part = excess[block.rows, problem.columns[output]]
                if (part > 0).any():
                    pair = expected, jacobian
                    return _mismatch(problem, mode, block, output, part, *pair)
        mismatch = _not_linear(rules, mode, jacobian)
        if mismatch is not None:
            return mismatch
    return None


def _excess(
    setting: Setting, vanishes: np.ndarray | bool, expected: np.ndarray, derivatives: np.ndarray
) -> np.ndarray:
    """Return by how much derivatives differ beyond tolerance; infinite for a nan."""
    allowed = np.where(vanishes, 0, setting.atol + setting.rtol * np.abs(expected))
    with np.errstate(invalid="ignore"):
        excess = np.abs(derivatives - expected) - allowed
    return np.where(np.isnan(excess), np.inf, excess)


def _mismatch(
    problem: Problem,
    mode: str,
    block: Block,
    output: int,
    excess: np.ndarray,
    expected: np.ndarray,
    derivatives: np.ndarray,
) -> Mismatch:
    # The first of the worst: which of several equal ones is decided by rounding otherwise.
    row, column = np.unravel_index(np.argmax(excess >= 0.99 * np.max(excess)), excess.shape)
    x, columns = problem.inputs[block.number], problem.columns[output]
    at = block.rows.start + row, columns.start + column
    dtype = problem.outputs[output].dtype
    return Mismatch(
        input=f"{x.path}, {x.described(block.kind, int(row))}",
        output=problem.described(int(at[1])),
        kind=block.kind,
        numerical=float(expected[at]),
        analytical=float(derivatives[at]),
        numerical_row=expected[at[0], columns],
        analytical_row=derivatives[at[0], columns],
        mode=mode,
        failing=int((excess > 0).sum()),
        total=excess.size,
        sides=_sides(problem, block, int(row), int(at[1])),
        narrow=dtype.name if jnp.finfo(dtype).bits < 64 else "",
    )


def _sides(problem: Problem, block: Block, row: int, column: int) -> tuple[float, float] | None:
    """Return the slopes on both sides of the input where they differ: a kink."""
    if block.kind != "specified":
        return None
    setting, scale = problem.setting, scales(problem, block)
    step = np.zeros_like(scale)
    step[row] = size = setting.eps * scale[row]
    what = f"a step in {problem.inputs[block.number].path}"
    here = problem.base[column]
    up, down = (moved(problem, block, s * step, what)[column] for s in (1, -1))
    left, right = (here - down) / size, (up - here) / size
    smooth = np.sqrt(setting.eps) + 10 * (
        setting.atol + setting.rtol * max(abs(left), abs(right))
    )
    return (float(left), float(right)) if abs(left - right) > smooth else None


def _not_linear(rules: Rules, mode: str, jacobian: np.ndarray) -> Mismatch | None:
    """Return the first random direction along which a rule does not combine the Jacobian."""
    problem, rng = rules.problem, np.random.default_rng(0)
    weights = random_reals(rng, problem.base.shape)
    direction = random_reals(rng, (problem.size,))
    for multiple in MULTIPLES:
        times = "" if multiple == 1 else f" (times {multiple:g}, and divided by it)"
        if mode == "rev":
            pulled = rules.pullback(multiple * weights) / multiple
        for block in problem.blocks:
            if mode == "rev":
                expected, derivatives = jacobian[block.rows] @ weights, pulled[block.rows]
            else:
                along = np.zeros(problem.size)
                along[block.rows] = direction[block.rows]
                expected = along @ jacobian
                derivatives = rules.pushforward(multiple * along) / multiple
            excess = _excess(problem.setting, block.vanishes, expected, derivatives)
            if not (excess > 0).any():
                continue
            at, row, x = int(np.argmax(excess)), np.zeros(1), problem.inputs[block.number]
            if mode == "rev":
                names = x.described(block.kind, at), f"all outputs, at random{times}"
            else:
                names = f"a random direction{times}", problem.described(at)
            return Mismatch(
                input=f"{x.path}, {names[0]}",
                output=names[1],
                kind=block.kind,
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
        for block in problem.blocks:
            scale = scales(problem, block)
            steps = random_reals(rng, scale.shape) * scale
            direction = np.zeros(problem.size)
            direction[block.rows] = steps
            pushed = []
            if "fwd" in rules.modes:
                pushed = [rules.pushforward(m * direction) / m for m in multiples]
            if block.vanishes:
                if any(np.any(x != 0) for x in (*pushed, *(w[block.rows] for _, w in pulls))):
                    return True
                continue
            try:
                near, far = (difference(problem, block, steps, s) for s in (h, 2 * h))
            except GradcheckError:  # a mask changes on the way
                return True
            slopes = (4 * near - far) / 3
            pairs = [(along, slopes) for along in pushed]
            pairs += [(pull[block.rows] @ steps, w @ slopes) for w, pull in pulls]
            # An entry that the slow check refuses is wrong by more than `atol`: a tenth of it.
            allowed = 0.1 * problem.setting.atol
            # Not `any(... > allowed)`: a nan is a fault.
            if not all(np.all(np.abs(along - slope) <= allowed) for along, slope in pairs):
                return True
    return False
