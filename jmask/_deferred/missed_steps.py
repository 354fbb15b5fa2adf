r"""Take k optimizer steps with zero gradient together, from coefficients that all rows share.

Without a gradient the entries of a row, its parameter p and its state s_1 s_2 ..., depend on
nothing but themselves. One step takes x = (p, s_1, s_2, ...) to

    x' = A x,    p' += c s_a / (√s_b + e),    p' += d sign(s_a)

where A, c, e and d are scalars that all rows share: linear for momentum and decay, the quotient
for Adam, the sign for Lion. A row that was caught up before step s needs the product of the A
from there on, and two sums:

    momentum    p' = p + b m, m' = b m       from s to s + 2:  p + (b + b²) m,  b² m

So there is one set of coefficients for each start step s, and each step takes all sets one step
further, whatever its rates are: they may follow a schedule, or come with the step. The sets are
kept in a ring of W: a row that waits for longer reads as nan.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmask._base.array_types import trailing
from jmask._base.types import Argument, HostArray

# --- the sum of quotients ----------------------------------------------------------------
#
# In step j after the start, s_a has become f_j s_a and s_b has become g_j v, with v = s_b at
# the start. The parameter moves by
#
#     s_a Σ_j c_j f_j / (√(g_j v) + e_j),
#
# a function of v that has to be written with few coefficients. With X = √v, a_j = √g_j and
#
#     ζ = X / (X + h)  in [0, 1)    and so    X + h = h / (1 - ζ),      h = k e_0
#
# each summand times X + h is c_j f_j h / (e_j + ζ (a_j h - e_j)), whose only pole is at
# ζ = 1 / (1 - q_j), q_j = a_j h / e_j. With q_j near 1 it is large, and T(ζ), the sum of them,
# is a polynomial of low degree but for an error that falls as r⁻ⁿ, r = (1 + √q) / |1 - √q| for
# the worst q that counts: f_j = b1^j makes late ones small. The move is s_a T(ζ) / (X + h).
#
# Which k: q runs from k at the start to some k a. Exchanging ζ and 1 - ζ exchanges q and 1 / q,
# so both ends are equally good with k = a^(-1/2). The last j that counts is taken as
# 1.5 / (1 - b1). Adam corrects the bias of s_b: then e_j = eps √(1 - b2^(s + 1 + j)), which at
# s = 0 moves q by far more than the decay of s_b does, and is taken to be so.
#
# Interpolation at Chebyshev nodes: a step adds the exact summand at each node ζ_i, and the
# coefficients of the Chebyshev polynomial through these values are added to the sums.

TERMS = (4, 6, 8, 12)
"""Numbers of coefficients that are tried, fewest first."""
# The relative error of a summand that is aimed at, and the greatest that is accepted: 2 and 8
# units in the last place of float32.
_EXACT, ACCEPTED = 2e-7, 1e-6

Pair = tuple[int, int]


class Step(NamedTuple):
    """One step without a gradient."""

    changes: dict[Pair, Argument]  # A - 1, by (row, column) where it may not be 0
    c: Argument = None  # the scalars of the quotient, or None
    e: Argument = None
    sign: Argument = None  # d, or None


@dataclasses.dataclass(frozen=True)
class Form:
    """The structure that all steps of an optimizer share."""

    width: int  # how many entries: the parameter and its state
    changes: tuple[Pair, ...]  # the (row, column) where A - 1 may not be 0
    quotient: Pair | None = None  # a and b, or None
    sign: int | None = None  # a of the sign, or None
    terms: int = 0  # how many coefficients the sum of quotients has
    e: float = 1.0  # about what e of the quotient is
    positive: tuple[int, ...] = ()  # entries of which negative ones make no sense

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The (row, column) where a product of the A may not be 0, sorted."""
        pairs = {(i, i) for i in range(self.width)} | set(self.changes)
        while True:
            more = {(i, k) for i, j in pairs for j_too, k in pairs if j == j_too}
            if more <= pairs:
                return tuple(sorted(pairs))
            pairs |= more

    @property
    def sums(self) -> int:
        """How many coefficients are sums: products, terms and signs."""
        return len(self.pairs) + self.terms + (self.sign is not None)

    def line(self, dtype: DTypeLike) -> jax.Array:
        """Return the coefficients (numbers,) of a row that is caught up; see `columns`."""
        identity = [float(i == j) for i, j in self.pairs]
        zeros = [0.0] * (self.sums - len(identity) + self.width)
        return jnp.asarray([*identity, *zeros, *[1.0] * (self.quotient is not None)], dtype)

    def columns(self, lines: jax.Array) -> list[list[jax.Array]]:
        """Return coefficients (n, numbers), which take rows from a start step to now, by kind.

        products    entries of the product of the A, for each of `pairs`
        terms       Chebyshev coefficients of T
        signs       the sum of the d sign(f), if there is a sign
        less_1      the diagonal of the product less 1, exact where the product is near 1
        shift       h, if there are quotients
        """
        columns = (lines[:, i] for i in range(lines.shape[1]))
        counts = len(self.pairs), self.terms, self.sign is not None, self.width
        return [*(list(itertools.islice(columns, n)) for n in counts), list(columns)]


def advanced(
    form: Form, lines: jax.Array, carry: jax.Array, clock: jax.Array, step: Step
) -> tuple[jax.Array, jax.Array]:
    """Take the coefficients of all start steps one step further, and begin the next.

    Args:
        lines (W, numbers): the coefficients of start step s at s % W.
        carry (W, sums): what rounding took from the sums.
        clock: how many steps there were before this one.
    """
    dtype, ring = lines.dtype, lines.shape[0]
    slot = jnp.arange(ring, dtype=clock.dtype)
    of_pairs, old_terms, signs, _, shift = form.columns(lines)
    old = dict(zip(form.pairs, of_pairs, strict=True))
    moves = step.changes.get((0, 0), 0.0)

    # A' = (1 + changes) A
    zero = jnp.zeros(ring, dtype)
    rows = {i: [(k, x) for (row, k), x in step.changes.items() if row == i] for i, _ in old}
    products = [sum((x * old[k, j] for k, x in rows[i] if (k, j) in old), zero) for i, j in old]
    added = [jnp.stack(products, axis=1)]
    if form.quotient is not None:
        a, b = form.quotient
        b1, b2 = (1 + step.changes.get((i, i), 0.0) for i in (a, b))
        factors = old[a, a], old[b, b]
        root = jnp.sqrt(factors[1])[:, None]
        # A sum without terms takes its h from this step: so do rows caught up just before it,
        # and those whose steps all had a rate of 0, as at the start of a warm-up.
        is_empty = functools.reduce(jnp.logical_and, [x == 0 for x in old_terms])
        first = _spread(b1, b2, clock.astype(dtype)) * step.e / jnp.maximum(root[:, 0], 1e-6)
        shift = [jnp.where(is_empty, first, shift[0])]
        # What the step adds to T at each node, (W, terms).
        nodes = (1 + _nodes(form.terms))[None] / 2
        h, x = shift[0][:, None], jnp.asarray(nodes / (1 - nodes), dtype) * shift[0][:, None]
        values = step.c * (factors[0][:, None] * ((x + h) / (root * x + step.e)))
        # `dot` is less precise on accelerators. All columns are computed together, since XLA
        # compiles a kernel for each column that is computed by itself.
        to_terms = jnp.asarray(_dct(form.terms).T[:, None], dtype)
        columns = (to_terms[i] * values[:, i : i + 1] for i in range(form.terms))
        terms = sum(columns, start=jnp.zeros((), dtype))
        is_used = (slot <= clock) | (clock >= ring)  # the others are fresh, and stay finite
        error = _error(form.terms, *factors, shift[0] / step.e)
        is_wrong = is_used & (error > ACCEPTED) & (step.c != 0)
        terms = jnp.where(is_wrong[:, None], jnp.nan, terms)
        added.append(moves * jnp.stack(old_terms, axis=1) + terms)
    if form.sign is not None:
        more = step.sign * jnp.sign(old[form.sign, form.sign])
        added.append((moves * signs[0] + more)[:, None])

    new, carry = _sum(lines[:, : form.sums], carry, jnp.concatenate(added, axis=1))
    diagonal = np.array([form.pairs.index((i, i)) for i in range(form.width)])
    less_1 = (new[:, diagonal] - 1) + carry[:, diagonal]
    lines = jnp.concatenate([new, less_1, *(x[:, None] for x in shift)], axis=1)
    is_next = (slot == (clock + 1) % ring)[:, None]
    return jnp.where(is_next, form.line(dtype), lines), jnp.where(is_next, 0, carry)


def caught_up(form: Form, lines: jax.Array, entries: Sequence[jax.Array]) -> list[jax.Array]:
    """Return entries as they are now: the steps since the start step of each row together.

    Args:
        lines (n, numbers): the coefficients for the start step of each row.
        entries: parameter and state, each (n, *row), in the dtype of the coefficients.
    """
    columns = jax.tree.map(lambda x: trailing(x, entries[0].ndim), form.columns(lines))
    of_pairs, terms, signs, less_1, shift = columns
    products = dict(zip(form.pairs, of_pairs, strict=True))
    kept, moves = [], []
    for i, entry in enumerate(entries):
        # Near 1 the digits of product - 1 count, near 0 the digits of the product.
        product = products[i, i]
        is_small = product < 0.5
        kept.append(jnp.where(is_small, 0, entry))
        moves.append(entry * jnp.where(is_small, product, less_1[i]))
    for (i, j), product in products.items():
        if i != j:
            moves[i] = moves[i] + entries[j] * product
    if form.quotient is not None:
        a, b = form.quotient
        inverse = 1 / (jnp.sqrt(entries[b]) + shift[0])
        zeta = 1 - 2 * shift[0] * inverse  # ζ moved to [-1, 1]
        later = last = jnp.zeros_like(zeta)
        for c in terms[:0:-1]:  # Clenshaw's algorithm
            later, last = c + 2 * zeta * later - last, later
        moves[0] = moves[0] + entries[a] * ((terms[0] + zeta * later - last) * inverse)
    if form.sign is not None:
        moves[0] = moves[0] + jnp.sign(entries[form.sign]) * signs[0]
    return [x + move for x, move in zip(kept, moves, strict=True)]


def terms_for(b1: float, b2: float) -> int | None:
    """Return how many coefficients the sum of quotients takes; None if `TERMS` are too few.

    Args:
        b1, b2: the factors of s_a and s_b in a step. The bias of s_b may be corrected or not.
    """
    if not 0 <= b1 < 1 or not 0 < b2 < 1:
        return None
    j = np.arange(2048)
    for terms in TERMS:
        worst = 0.0
        for s in (0, 1, 3, 30, 300):
            k = float(_spread(b1, b2, np.float64(s)))
            corrected = np.sqrt((1 - b2 ** (s + 1 + j)) / (1 - b2 ** (s + 1)))
            with np.errstate(under="ignore"):
                errors = [_error(terms, b1**j, b2**j, k / e) for e in (corrected, 1 + 0 * j)]
            worst = max(worst, float(np.max(errors)))
        if worst <= (ACCEPTED if terms == TERMS[-1] else _EXACT):
            return terms
    return None


def _error(terms: int, f: Argument, g: Argument, h: Argument) -> Argument:
    """Bound the error that a summand adds, relative to the first: f r⁻ⁿ, h = k e_0 / e_j."""
    root = (g**0.5 * h) ** 0.5
    return abs(f) * (abs(1 - root) / (1 + root)) ** terms


def _spread(b1: Argument, b2: Argument, clock: Argument) -> Argument:
    """Return k = a^(-1/2), a = √g_j e_0 / e_j of the last j that counts, as derived above."""
    clip = np.clip if isinstance(clock, np.floating) else jnp.clip
    corrected = clip(1 - b2 ** (clock + 1), 1e-9, 1.0)
    later = b2 ** (1.5 / clip(1 - b1, 1e-3, 1.0))  # g_j
    # Where both are near 1, as of steps that were not taken, it is 1, and never 0.
    return ((1 - later) / (corrected * later) + 1) ** 0.25


def _nodes(terms: int) -> HostArray:
    return -np.cos((2 * np.arange(terms) + 1) * math.pi / (2 * terms))


def _dct(terms: int) -> HostArray:
    """Return the matrix from values at the nodes to Chebyshev coefficients."""
    angles = np.arccos(_nodes(terms))
    matrix = 2 / terms * np.cos(np.arange(terms)[:, None] * angles)
    matrix[0] /= 2
    return matrix


def _sum(total: jax.Array, carry: jax.Array, more: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Add, and return what rounding took from the sum (Knuth's TwoSum)."""
    more = more + carry
    new = total + more
    part = new - total
    return new, (total - (new - part)) + (more - part)
