"""The fast check: derivatives along random directions, which decide whether to look closer.

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

No verdict is given: where a projection differs, the slow check decides, with its steps and
tolerances, and names the entry. So a gradient that is right is never refused by the fast
check, and costs a few evaluations whatever its size. Derivatives that must be zero (at
unspecified entries in masked semantics, under masks and at padding) are looked at one by one.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from jmask._gradcheck import jacobian as jacobians
from jmask._gradcheck.entries import KINDS, random_reals
from jmask._gradcheck.jacobian import Derivatives, Outputs, Rules
from jmask._gradcheck.message import GradcheckError
from jmask._gradcheck.problem import Problem
from jmask._gradcheck.slow import MULTIPLES, must_vanish

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
                direction = random_reals(rng, shape) * jacobians.scales(x, kind)
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
            jacobians.difference(problem, number, kind, direction, step=step)
            for step in (h, 2 * h)
        )
    except GradcheckError:
        return None
    return [(4 * a - b) / 3 for a, b in zip(near, far, strict=True)]
