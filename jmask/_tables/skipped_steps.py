r"""What a row becomes in steps that have no gradient for it, from sums that all rows share.

Without a gradient the entries of a row, its parameter p and what the optimizer keeps of it,
s_1 s_2 ..., go by themselves. One step takes x = (p, s_1, s_2, ...) to

    x' = A x,    p' += c s_a / (√(y s_b + e0) + e1),    p' += d sign(s_a)

where A, c, y, e0, e1 and d are numbers that all rows share: linear for momentum and decay, the
quotient for Adam, the sign for Lion. A row that was brought up to date before step s needs the
product of the A from there on, and two sums:

    momentum    p' = p + b m, m' = b m       from s to s + 2:  p + (b + b²) m,  b² m

So there is one line of numbers for each s, and each step takes all lines one step further,
whatever the rates of the steps are: they may follow a schedule, or come with the step.

The sum of quotients depends on the entry v = s_b. With X = √(ŷ v + ê0), ŷ and ê0 those of the
first of its steps, it is s_a T(ζ) / (X + k e1), where ζ = (X - √ê0) / (X + k e1) is in [0, 1]
and T hardly bends: all of its poles are far from [0, 1]. A line holds the coefficients of the
Chebyshev polynomial that has the exact sums at a few ζ. For Adam with b1 = 0.9, b2 = 0.999 and
eps added before the bias is corrected, the relative error of three of them is 1e-8.

The lines are kept in a ring, so that no row may be away for longer than the ring is long:
`DeferredTable` sees to it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.array_types import trailing

# The quotients that are summed with these many coefficients, fewest first.
_TERMS = (3, 4, 5, 6, 8, 10, 12)
_TERMS_IF_UNKNOWN = 12
# The relative error of a sum that is taken, and the greatest that is accepted.
_EXACT, _ACCEPTED = 3e-8, 1e-6
# With so many coefficients the error is at most 1e-6 where (1 - b2) / (1 - b1) is at most this,
# by b1: from `_errors`, which tests/tables/test_skipped_steps.py repeats.
_B1 = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.992)
_MOST_BY_B1 = (0.6, 0.6, 0.5, 0.4, 0.3, 0.3, 0.2, 0.1, 0.05, 0.0)
# How much e0 and e1 may change while a row is away: twice costs an error of 1e-6 already.
_DRIFT = 0.1


class Quotient(NamedTuple):
    """c s_a / (√(y s_b + e0) + e1): its numbers."""

    c: Any
    y: Any
    e0: Any
    e1: Any


class StepWithout(NamedTuple):
    """One step without a gradient.

    Attributes:
        changes: A - 1, by (row, column) where it is not 0.
        quotient: the numbers of the quotient, or None.
        sign: d, or None.
    """

    changes: dict[tuple[int, int], Any]
    quotient: Quotient | None
    sign: Any


@dataclasses.dataclass(frozen=True)
class Form:
    """What the steps of an optimizer have in common.

    Attributes:
        width: how many entries: the parameter and what is kept of it.
        pairs: the (row, column) of the products of A that may not be 0.
        quotient: a and b, or None.
        has_root: whether e0 is not 0.
        sign: a of the sign, or None.
        terms: how many coefficients there are for the quotients.

    A line is the products of A, the coefficients of the quotients, the sum of the signs; then
    the diagonal of the products less 1, which is exact where they are near 1; and ŷ, √ê0, k e1
    and e1.
    """

    width: int
    pairs: tuple[tuple[int, int], ...]
    quotient: tuple[int, int] | None = None
    has_root: bool = False
    sign: int | None = None
    terms: int = 0

    @property
    def sums(self) -> int:
        """How many numbers of a line are sums."""
        return len(self.pairs) + self.terms + (self.sign is not None)

    @property
    def scale(self) -> int:
        """Where ŷ, √ê0, k e1 and e1 are in a line."""
        return self.sums + self.width

    def fresh(self, dtype: Any) -> jax.Array:
        """The line (numbers,) of a row that is up to date."""
        products = [float(i == j) for i, j in self.pairs]
        rest = [0.0] * (self.scale - len(products))
        scale = [] if self.quotient is None else [1.0, 0.0, 1.0, 1.0]
        return jnp.asarray([*products, *rest, *scale], dtype)


def products_of(steps: Sequence[tuple[int, int]], width: int) -> tuple[tuple[int, int], ...]:
    """Where products of matrices that are the identity but for `steps` may not be 0."""
    found = {(i, i) for i in range(width)} | set(steps)
    while True:
        more = {(i, k) for i, j in found for j_too, k in found if j == j_too}
        if more <= found:
            return tuple(sorted(found))
        found |= more


def advanced(
    form: Form, lines: jax.Array, carry: jax.Array, clock: jax.Array, step: StepWithout
) -> tuple[jax.Array, jax.Array]:
    """All lines one step further, and the line of the rows that are up to date after it.

    Args:
        lines (W, numbers): that of step s at s % W.
        carry (W, sums): what rounding took from the sums.
        clock: how many steps there were before this one.
        step: the numbers of this step.
    """
    dtype, ring = lines.dtype, lines.shape[0]
    age = jnp.arange(ring, dtype=clock.dtype)[:, None]
    # With 64-bit numbers enabled what a schedule returns may be wider.
    step = jax.tree.map(lambda x: x.astype(dtype) if isinstance(x, jax.Array) else x, step)
    if step.quotient is not None:
        first = jnp.stack([jnp.asarray(x, dtype) for x in _scale(form, step)])
        is_first = age == clock % ring
        scale = jnp.where(is_first, first, lines[:, form.scale :])
    else:
        scale = lines[:, form.scale :]
    place = {pair: i for i, pair in enumerate(form.pairs)}
    old = {pair: lines[:, i] for pair, i in place.items()}
    added = [
        sum(
            (
                x * old[k, j]
                for (row, k), x in step.changes.items()
                if row == i and (k, j) in old
            ),
            start=jnp.zeros(ring, dtype),
        )
        for i, j in form.pairs
    ]
    moves = step.changes.get((0, 0), 0.0)
    sums = lines[:, len(place) : form.sums]
    if step.quotient is not None:
        a, b = _numbers(form.quotient)
        values = _at_nodes(form, step.quotient, old[a, a], old[b, b], scale)
        of_terms = _coefficients(values, form.terms)
        is_used = (age <= clock) | (clock >= ring)  # the others are fresh, and stay finite
        is_exact = ~is_used | _is_proved(form, step, scale)[:, None]
        of_terms = jnp.where(is_exact, of_terms, jnp.nan)
        added += [moves * sums[:, i] + of_terms[:, i] for i in range(form.terms)]
    if form.sign is not None:
        added.append(moves * sums[:, -1] + step.sign * jnp.sign(old[form.sign, form.sign]))
    new, carry = _sum(lines[:, : form.sums], carry, jnp.stack(added, axis=1))
    diagonal = np.array([place[i, i] for i in range(form.width)])
    less_1 = (new[:, diagonal] - 1) + carry[:, diagonal]
    lines = jnp.concatenate([new, less_1, scale], axis=1)
    is_next = age == (clock + 1) % ring
    return jnp.where(is_next, form.fresh(dtype), lines), jnp.where(is_next, 0, carry)


def skipped(form: Form, lines: jax.Array, entries: Sequence[jax.Array]) -> list[jax.Array]:
    """Entries as they are now: the steps of their lines taken at once.

    Args:
        lines (n, numbers): of the step before which each row was up to date.
        entries: parameter and what is kept of it, each (n, *row), in the dtype of the lines.
    """

    def number(i: int) -> jax.Array:
        return trailing(lines[:, i], entries[0].ndim)

    kept, moves = [], []
    for i, entry in enumerate(entries):
        product = number(form.pairs.index((i, i)))
        # What is near 1 keeps its digits less 1, and what is near 0 as it is.
        is_small = product < 0.5
        kept.append(jnp.where(is_small, 0, entry))
        moves.append(entry * jnp.where(is_small, product, number(form.sums + i)))
    for place, (i, j) in enumerate(form.pairs):
        if i != j:
            moves[i] = moves[i] + entries[j] * number(place)
    if form.quotient is not None:
        a, b = form.quotient
        first = len(form.pairs)
        y, root, shift = map(number, range(form.scale, form.scale + 3))
        x = jnp.sqrt(y * entries[b] + root * root if form.has_root else y * entries[b])
        inverse = 1 / (x + shift)
        zeta = 1 - 2 * (root + shift) * inverse  # in [-1, 1]
        total = _clenshaw([number(first + i) for i in range(form.terms)], zeta)
        moves[0] = moves[0] + entries[a] * (total * inverse)
    if form.sign is not None:
        moves[0] = moves[0] + jnp.sign(entries[form.sign]) * number(form.sums - 1)
    return [x + move for x, move in zip(kept, moves, strict=True)]


def terms_for(b1: Any, b2: Any, is_corrected: bool, has_root: bool) -> int | None:
    """How many coefficients the sum of quotients takes; None if no number of them will do.

    Args:
        b1, b2: what s_a and s_b are multiplied with in a step: numbers, or arrays that are
            not known.
        is_corrected: whether y changes from step to step, as the bias of s_b is corrected.
        has_root: whether e0 is not 0, and T bends more.
    """
    if not all(isinstance(x, int | float) for x in (b1, b2)):
        return _TERMS_IF_UNKNOWN
    if not 0 <= b1 < 1 or not 0 < b2 < 1:
        return None
    errors = _errors(float(b1), float(b2), is_corrected)
    for terms, error in errors:
        if error < _EXACT:
            return terms + 2 if has_root else terms
    terms, error = errors[-1]
    return terms if error < _ACCEPTED else None


@functools.lru_cache
def _errors(b1: float, b2: float, is_corrected: bool) -> list[tuple[int, float]]:
    """For each number of terms the relative error of the sums, in float64."""
    found = []
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    j = np.arange(1, counts[-1] + 1)
    x = np.concatenate([[0], np.logspace(-4, 4, 200)])
    for terms in _TERMS:
        worst = 0.0
        for s in (1, 3, 30, 300):
            corrections = 1 - b1 ** (s + j), 1 - b2 ** (s + j)
            c, a = b1**j / corrections[0], b2 ** (j / 2)
            if is_corrected:
                a = a / np.sqrt(corrections[1])
            else:
                c = c * np.sqrt(corrections[1])
            y = b2 if not is_corrected else b2 / (1 - b2 ** (s + 1))
            shift = _shift(b1, b2, y)
            nodes = (1 + _nodes(terms)) / 2
            at = nodes * shift / (1 - nodes)
            a = a / a[0]
            values = np.cumsum(c[:, None] / (a[:, None] * at + 1), axis=0) * (at + shift)
            exact = np.cumsum(c[:, None] / (a[:, None] * x + 1), axis=0)
            zeta = 1 - 2 * shift / (x + shift)
            for k in counts:
                of_terms = _dct(terms) @ values[k - 1]
                sums = np.polynomial.chebyshev.chebval(zeta, of_terms) / (x + shift)
                worst = max(worst, float(np.max(np.abs(sums / exact[k - 1] - 1))))
        found.append((terms, worst))
    return found


def _is_proved(form: Form, step: StepWithout, scale: jax.Array) -> Any:
    """For each line (W,) whether the sums are exact with the numbers of this step.

    Numbers that are known were looked at when the table was made. Those that are not, as they
    come with the step or follow a schedule, may be anything.
    """
    a, b = _numbers(form.quotient)
    _, _, e0, e1 = _numbers(step.quotient)
    b1, b2 = (1 + step.changes.get((i, i), 0.0) for i in (a, b))
    fits = jnp.ones(scale.shape[0], bool)
    if isinstance(b1, jax.Array) or isinstance(b2, jax.Array):
        most = jnp.interp(jnp.asarray(b1, scale.dtype), jnp.array(_B1), jnp.array(_MOST_BY_B1))
        fits &= (b1 >= 0) & (b1 < 1) & (b2 < 1) & (1 - b2 <= most * (1 - b1) * (1 + 1e-4))
    for x, first in ((jnp.sqrt(e0), scale[:, 1]), (e1, scale[:, 3])):
        if isinstance(e0, jax.Array) or isinstance(e1, jax.Array):
            fits &= jnp.abs(x - first) <= _DRIFT * first
    return fits


def _scale(form: Form, step: StepWithout) -> tuple[Any, Any, Any, Any]:
    """ŷ, √ê0, k e1 and e1 of the rows for which a step is the first."""
    a, b = _numbers(form.quotient)
    _, y, e0, e1 = _numbers(step.quotient)
    b1, b2 = (1 + step.changes.get((i, i), 0.0) for i in (a, b))
    shift = _shift(b1, b2, y) * e1
    return y, (jnp.sqrt(e0) if form.has_root else 0.0), shift, e1


def _shift(b1: Any, b2: Any, y: Any) -> Any:
    """k: the middle of √(y of the first step / y of a later one, when most is summed)."""
    where = np if all(isinstance(x, float | int) for x in (b1, b2, y)) else jnp
    # 1 - b2**(s + 1), if y is b2 over this; 1 if it is b2.
    corrected = where.clip(b2 / y, 1e-9, 1.0)
    later = b2 ** (2 / where.clip(1 - b1, 1e-3, 1.0))
    return ((1 - (1 - corrected) * later) / (corrected * later)) ** 0.25


def _at_nodes(
    form: Form, quotient: Quotient, of_a: jax.Array, of_b: jax.Array, scale: jax.Array
) -> list[jax.Array]:
    """What a step adds to T at each node, (W,)."""
    y, root, shift, _ = scale.T
    values = []
    for node in (1 + _nodes(form.terms)) / 2:
        x = (root + float(node) * shift) / (1 - float(node))
        ratio = quotient.y * of_b / y
        if form.has_root:
            base = jnp.sqrt(ratio * (x - root) * (x + root) + quotient.e0)
        else:
            base = jnp.sqrt(ratio) * x
        values.append(quotient.c * of_a * ((x + shift) / (base + quotient.e1)))
    return values


def _nodes(terms: int) -> np.ndarray:
    return -np.cos((2 * np.arange(terms) + 1) * math.pi / (2 * terms))


def _dct(terms: int) -> np.ndarray:
    """Chebyshev coefficients from the values at the nodes."""
    angles = np.arccos(_nodes(terms))
    matrix = 2 / terms * np.cos(np.arange(terms)[:, None] * angles)
    matrix[0] /= 2
    return matrix


def _coefficients(values: Sequence[jax.Array], terms: int) -> jax.Array:
    """Chebyshev coefficients (W, terms). No `dot`, which is less precise on accelerators."""
    matrix = _dct(terms)
    columns = [
        sum(float(x) * value for x, value in zip(row, values, strict=True)) for row in matrix
    ]
    return jnp.stack(columns, axis=1)


def _clenshaw(coefficients: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    later = last = jnp.zeros_like(x)
    for c in coefficients[:0:-1]:
        later, last = c + 2 * x * later - last, later
    return coefficients[0] + x * later - last


def _sum(total: jax.Array, carry: jax.Array, more: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sum and what rounding took from it (Knuth's TwoSum)."""
    more = more + carry
    new = total + more
    part = new - total
    return new, (total - (new - part)) + (more - part)


def _numbers(x: Any) -> Any:
    assert x is not None
    return x
