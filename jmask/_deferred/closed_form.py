r"""Take k optimizer steps with zero gradient together, from coefficients that all rows share.

Without a gradient the entries of a row, its parameter p and its state s_1 s_2 ..., depend on
nothing but themselves. One step takes x = (p, s_1, s_2, ...) to

    x' = A x,    p' += c s_a / (√(y s_b + e0) + e1),    p' += d sign(s_a)

where A, c, y, e0, e1 and d are scalars that all rows share: linear for momentum and decay, the
quotient for Adam, the sign for Lion. A row that was caught up before step s needs the product
of the A from there on, and two sums:

    momentum    p' = p + b m, m' = b m       from s to s + 2:  p + (b + b²) m,  b² m

So there is one set of coefficients for each start step s, and each step takes all sets one step
further, whatever its rates are: they may follow a schedule, or come with the step. The sets are
kept in a ring, so that no row may be inactive for longer than the ring is long; `DeferredTable`
sees to it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmask._base.array_types import trailing
from jmask._base.types import Coefficient, HostArray, Scalar

# --- the sum of quotients ----------------------------------------------------------------
#
# In step j after the start, s_a has become f_j s_a and s_b has become g_j v, with v = s_b at
# the start. The parameter moves by
#
#     s_a Σ_j c_j f_j / (√(y_j g_j v + e0) + e1),
#
# a function of v that has to be written with few coefficients. Let X = √(ŷ v + ê0), where hats
# mark the values of the first step, and at first e0 = 0. Then √(y_j g_j v) = a_j X with
# a_j² = y_j g_j / ŷ. With
#
#     ζ = X / (X + k e1)  in [0, 1)    and so    X + k e1 = k e1 / (1 - ζ)
#
# each summand times X + k e1 is c_j f_j k / (1 + ζ (a_j k - 1)), whose only pole is at
# ζ = 1 / (1 - a_j k). With a_j k near 1 it is large, and T(ζ), the sum of them, is a
# polynomial of low degree but for an error that falls as r⁻ⁿ, r = (1 + √(a k)) / |1 - √(a k)|
# for the worst a. The move is s_a T(ζ) / (X + k e1).
#
# Which k: a_j runs from 1 at the start to some a. Exchanging ζ and 1 - ζ exchanges a k and
# 1 / (a k), so both ends are equally good with k = 1 / (a k), which is k = a^(-1/2): the fourth
# root of ŷ / (y_j g_j). The last j that counts is taken as 2 / (1 - b1): f_j = b1^j, so later
# summands are e⁻² of all.
#
# With e0 > 0, √ê0 is subtracted: ζ = (X - √ê0) / (X + k e1). The summands then have branch
# points as well, which costs two more coefficients.
#
# Interpolation at Chebyshev nodes: a step adds the exact summand at each node ζ_i, and the
# coefficients of the Chebyshev polynomial through these values are added to the sums. For Adam
# with b1 = 0.9, b2 = 0.999 and eps outside of the root three coefficients are exact to 1e-8.

# Numbers of coefficients that are tried, fewest first; and for decays that only the step knows.
_TERMS = (3, 4, 5, 6, 8, 10, 12)
_TERMS_IF_UNKNOWN = 12
# The relative error of a sum that is aimed at, half of float32's unit roundoff; and the
# greatest that is accepted, which is 8 units in the last place.
_EXACT, _ACCEPTED = 3e-8, 1e-6
# With _TERMS_IF_UNKNOWN the error is at most _ACCEPTED where (1 - b2) / (1 - b1) is at most
# this, by b1: from `_errors`, which tests/deferred/test_deferred_numbers.py repeats.
_B1 = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.992)
_MOST_BY_B1 = (0.6, 0.6, 0.5, 0.4, 0.3, 0.3, 0.2, 0.1, 0.05, 0.0)
# How much e0 and e1 may change while a row is inactive. The first step's place the nodes;
# twice as large ones cost an error of 1e-6 already.
_DRIFT = 0.1

Pair = tuple[int, int]


class Quotient(NamedTuple):
    """The scalars of c s_a / (√(y s_b + e0) + e1)."""

    c: Coefficient
    y: Coefficient
    e0: Coefficient
    e1: Coefficient


class StepWithout(NamedTuple):
    """One step without a gradient.

    Attributes:
        changes: A - 1, by (row, column) where it is not 0.
        quotient: the scalars of the quotient, or None.
        sign: d, or None.
    """

    changes: dict[Pair, Coefficient]
    quotient: Quotient | None
    sign: Coefficient

    def decay(self, i: int) -> Coefficient:
        """Return the factor of entry i: A[i, i]."""
        return 1 + self.changes.get((i, i), 0.0)


class Scale(NamedTuple):
    """The scalars of the first step that map s_b to ζ: ŷ, √ê0, k e1; and its e1."""

    y: Coefficient
    root: Coefficient
    shift: Coefficient
    e1: Coefficient


@dataclasses.dataclass(frozen=True)
class Form:
    """The structure that all steps of an optimizer share.

    Attributes:
        width: how many entries: the parameter and its state.
        pairs: the (row, column) of the products of A that may not be 0, sorted.
        quotient: a and b, or None.
        has_root: whether e0 is not 0.
        sign: a of the sign, or None.
        terms: how many coefficients the sum of quotients has.
    """

    width: int
    pairs: tuple[Pair, ...]
    quotient: Pair | None = None
    has_root: bool = False
    sign: int | None = None
    terms: int = 0

    @property
    def sums(self) -> int:
        """How many coefficients are sums: products, terms and signs."""
        return len(self.pairs) + self.terms + (self.sign is not None)

    def fresh(self, dtype: DTypeLike) -> jax.Array:
        """Return the coefficients (numbers,) of a row that is caught up."""
        coefficients = Coefficients(
            {(i, j): float(i == j) for i, j in self.pairs},
            [0.0] * self.terms,
            [] if self.sign is None else [0.0],
            [0.0] * self.width,
            None if self.quotient is None else Scale(1.0, 0.0, 1.0, 1.0),
        )
        return jnp.asarray(jax.tree.leaves(coefficients), dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coefficients:
    """The coefficients that take rows from a start step to now, each (W,) or (n,).

    Its leaves, in order, are the columns of the array that a `DeferredTable` keeps.

    Attributes:
        products: entries of the product of the A, by (row, column).
        terms: Chebyshev coefficients of T.
        signs: the sum of the d sign(f), if there is a sign.
        less_1: the diagonal of the product less 1, exact where the product is near 1.
        scale: of the quotients, if there are some.
    """

    products: dict[Pair, Coefficient]
    terms: list[Coefficient]
    signs: list[Coefficient]
    less_1: list[Coefficient]
    scale: Scale | None

    @classmethod
    def of(cls, form: Form, lines: jax.Array) -> "Coefficients":
        columns = iter([lines[:, i] for i in range(lines.shape[1])])
        return cls(
            {pair: next(columns) for pair in form.pairs},
            [next(columns) for _ in range(form.terms)],
            [] if form.sign is None else [next(columns)],
            [next(columns) for _ in range(form.width)],
            None if form.quotient is None else Scale(*columns),
        )


def products_of(steps: Sequence[Pair], width: int) -> tuple[Pair, ...]:
    """Find where products of matrices may not be 0, which are the identity but for `steps`."""
    pairs = {(i, i) for i in range(width)} | set(steps)
    while True:
        more = {(i, k) for i, j in pairs for j_too, k in pairs if j == j_too}
        if more <= pairs:
            return tuple(sorted(pairs))
        pairs |= more


def advanced(
    form: Form, lines: jax.Array, carry: jax.Array, clock: jax.Array, step: StepWithout
) -> tuple[jax.Array, jax.Array]:
    """Take the coefficients of all start steps one step further, and begin the next.

    Args:
        lines (W, numbers): the `Coefficients` of start step s at s % W.
        carry (W, sums): what rounding took from the sums.
        clock: how many steps there were before this one.
        step: the scalars of this step.
    """
    dtype, ring = lines.dtype, lines.shape[0]
    slot = jnp.arange(ring, dtype=clock.dtype)
    # With 64-bit numbers enabled what a schedule returns may be wider.
    step = jax.tree.map(lambda x: x.astype(dtype) if isinstance(x, jax.Array) else x, step)
    old = Coefficients.of(form, lines)
    moves = step.changes.get((0, 0), 0.0)

    # A' = (1 + changes) A
    products = [
        sum(
            (
                x * old.products[k, j]
                for (row, k), x in step.changes.items()
                if row == i and (k, j) in old.products
            ),
            start=jnp.zeros(ring, dtype),
        )
        for i, j in form.pairs
    ]
    added = [jnp.stack(products, axis=1)]
    scale = old.scale
    if step.quotient is not None:
        assert form.quotient is not None
        assert scale is not None
        b1, b2 = map(step.decay, form.quotient)
        _, y, e0, e1 = step.quotient
        root = jnp.sqrt(e0) if form.has_root else 0.0
        # For rows caught up just before this step it is the first one.
        first = Scale(y, root, _shift(b1, b2, y) * e1, e1)
        is_first = slot == clock % ring
        pairs = zip(first, scale, strict=True)
        scale = Scale(*(jnp.where(is_first, jnp.asarray(x, dtype), now) for x, now in pairs))
        values = _at_nodes(form, step.quotient, old.products, scale)
        # `dot` is less precise on accelerators. All columns are computed at once, since XLA
        # compiles a kernel for each column that is computed by itself.
        to_terms = jnp.asarray(_dct(form.terms).T[:, None], dtype)
        terms = sum(
            (to_terms[i] * values[:, i : i + 1] for i in range(form.terms)),
            start=jnp.zeros((), dtype),
        )
        is_used = (slot <= clock) | (clock >= ring)  # the others are fresh, and stay finite
        is_exact = ~is_used | _is_proved(step.quotient, b1, b2, scale)
        terms = jnp.where(is_exact[:, None], terms, jnp.nan)
        added.append(moves * jnp.stack(old.terms, axis=1) + terms)
    if form.sign is not None:
        product = old.products[form.sign, form.sign]
        signs = moves * old.signs[0] + step.sign * jnp.sign(product)
        added.append(signs[:, None])

    new, carry = _sum(lines[:, : form.sums], carry, jnp.concatenate(added, axis=1))
    diagonal = np.array([form.pairs.index((i, i)) for i in range(form.width)])
    less_1 = (new[:, diagonal] - 1) + carry[:, diagonal]
    last = [] if scale is None else [jnp.stack(scale, axis=1)]
    lines = jnp.concatenate([new, less_1, *last], axis=1)
    is_next = (slot == (clock + 1) % ring)[:, None]
    return jnp.where(is_next, form.fresh(dtype), lines), jnp.where(is_next, 0, carry)


def skipped(form: Form, lines: jax.Array, entries: Sequence[jax.Array]) -> list[jax.Array]:
    """Return entries as they are now: the steps since the start step of each row together.

    Args:
        lines (n, numbers): the coefficients for the start step of each row.
        entries: parameter and state, each (n, *row), in the dtype of the coefficients.
    """
    ndim = entries[0].ndim
    c = jax.tree.map(lambda x: trailing(x, ndim), Coefficients.of(form, lines))
    kept, moves = [], []
    for i, entry in enumerate(entries):
        # Near 1 the digits of product - 1 count, near 0 the digits of the product.
        product = c.products[i, i]
        is_small = product < 0.5
        kept.append(jnp.where(is_small, 0, entry))
        moves.append(entry * jnp.where(is_small, product, c.less_1[i]))
    for (i, j), product in c.products.items():
        if i != j:
            moves[i] = moves[i] + entries[j] * product
    if form.quotient is not None:
        a, b = form.quotient
        y, root, shift, _ = c.scale
        x = jnp.sqrt(y * entries[b] + root * root if form.has_root else y * entries[b])
        inverse = 1 / (x + shift)
        zeta = 1 - 2 * (root + shift) * inverse  # ζ moved to [-1, 1]
        moves[0] = moves[0] + entries[a] * (_clenshaw(c.terms, zeta) * inverse)
    if form.sign is not None:
        moves[0] = moves[0] + jnp.sign(entries[form.sign]) * c.signs[0]
    return [x + move for x, move in zip(kept, moves, strict=True)]


def terms_for(b1: Scalar, b2: Scalar, is_corrected: bool, has_root: bool) -> int | None:
    """Return how many coefficients the sum of quotients takes; None if `_TERMS` are too few.

    Args:
        b1, b2: the factors of s_a and s_b in a step: numbers, or arrays that are not known.
        is_corrected: whether y changes from step to step, as the bias of s_b is corrected.
        has_root: whether e0 is not 0.
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
    """Return the relative error of the sums for each number of terms, in float64."""
    errors = []
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
                coefficients = _dct(terms) @ values[k - 1]
                sums = np.polynomial.chebyshev.chebval(zeta, coefficients) / (x + shift)
                worst = max(worst, float(np.max(np.abs(sums / exact[k - 1] - 1))))
        errors.append((terms, worst))
    return errors


def _is_proved(quotient: Quotient, b1: Coefficient, b2: Coefficient, scale: Scale) -> jax.Array:
    """Decide for each start step (W,) whether the sums are exact with the scalars of this step.

    Those that are known were looked at when the table was made. Those that are not, as they
    come with the step or follow a schedule, may be anything.
    """
    _, _, e0, e1 = quotient
    fits = jnp.ones(scale.e1.shape, bool)
    if isinstance(b1, jax.Array) or isinstance(b2, jax.Array):
        b = jnp.asarray(b1, scale.e1.dtype)
        most = jnp.interp(b, jnp.array(_B1), jnp.array(_MOST_BY_B1))
        fits &= (b1 >= 0) & (b1 < 1) & (b2 < 1) & (1 - b2 <= most * (1 - b1) * (1 + 1e-4))
    for x, first in ((jnp.sqrt(e0), scale.root), (e1, scale.e1)):
        if isinstance(e0, jax.Array) or isinstance(e1, jax.Array):
            fits &= jnp.abs(x - first) <= _DRIFT * first
    return fits


def _shift(b1: Scalar, b2: Scalar, y: Scalar) -> Coefficient:
    """Return k, the fourth root of ŷ / (y_j g_j) at j = 2 / (1 - b1), as derived above.

    The second moment of a step s has g_j = b2^j and, if its bias is corrected,
    y_j = b2 / (1 - b2^(s + 1 + j)); else y_j = b2.
    """
    where = np if all(isinstance(x, float | int) for x in (b1, b2, y)) else jnp
    corrected = where.clip(b2 / y, 1e-9, 1.0)  # 1 - b2^(s + 1), or 1
    later = b2 ** (2 / where.clip(1 - b1, 1e-3, 1.0))  # g_j
    return ((1 - (1 - corrected) * later) / (corrected * later)) ** 0.25


def _at_nodes(
    form: Form, quotient: Quotient, products: dict[Pair, jax.Array], scale: Scale
) -> jax.Array:
    """Return what a step adds to T at each node, (W, terms)."""
    assert form.quotient is not None
    a, b = form.quotient
    y, root, shift, _ = (x[:, None] for x in scale)
    ratio = quotient.y * products[b, b][:, None] / y
    nodes = (1 + _nodes(form.terms))[None] / 2
    x = (root + jnp.asarray(nodes, y.dtype) * shift) / jnp.asarray(1 - nodes, y.dtype)
    if form.has_root:
        base = jnp.sqrt(ratio * (x - root) * (x + root) + quotient.e0)
    else:
        base = jnp.sqrt(ratio) * x
    return quotient.c * products[a, a][:, None] * ((x + shift) / (base + quotient.e1))


def _nodes(terms: int) -> HostArray:
    return -np.cos((2 * np.arange(terms) + 1) * math.pi / (2 * terms))


def _dct(terms: int) -> HostArray:
    """Return the matrix from values at the nodes to Chebyshev coefficients."""
    angles = np.arccos(_nodes(terms))
    matrix = 2 / terms * np.cos(np.arange(terms)[:, None] * angles)
    matrix[0] /= 2
    return matrix


def _clenshaw(coefficients: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Evaluate a Chebyshev polynomial."""
    later = last = jnp.zeros_like(x)
    for c in coefficients[:0:-1]:
        later, last = c + 2 * x * later - last, later
    return coefficients[0] + x * later - last


def _sum(total: jax.Array, carry: jax.Array, more: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Add, and return what rounding took from the sum (Knuth's TwoSum)."""
    more = more + carry
    new = total + more
    part = new - total
    return new, (total - (new - part)) + (more - part)
