"""Operands of products on every storage, and what their product is in NumPy.

They have equal positions and padding. What padding holds, and what it would meet in the other
operand if its position were clamped, is nan or inf.
"""

import dataclasses

import numpy as np
from jax.experimental.sparse import BCOO, BCSR

from jmask import RowSparse

M, K, N = 4, 5, 3
STORED = {"row_sparse": 6, "coo": 9, "csr": 9}  # with padding
POISON = (np.nan, np.inf, -np.inf)
# Indices beyond any array: a kernel of JAX read the rows there, a segmentation fault.
FAR = (2_000_000_000, -2_000_000_000)


@dataclasses.dataclass(frozen=True)
class Form:
    """One side of a product: its storage, and how it is given."""

    kind: str
    left: bool
    transposed: bool = False
    vector: bool = False

    @property
    def shape(self):
        shape = (K,) if self.vector else (M, K) if self.left else (K, N)
        return shape[::-1] if self.transposed else shape

    @property
    def summed(self):
        """The dimension that is summed over."""
        return 0 if self.vector else int(self.left != self.transposed)

    @property
    def is_entries(self):
        return self.kind in ("coo", "csr")

    @property
    def skips_last(self):
        """Nothing is stored at the last index of the dimension summed over."""
        return self.is_entries or (self.kind == "row_sparse" and self.summed == 0)

    def build(self, values, indices):
        if self.kind == "dense":
            return values
        if self.kind == "row_sparse":
            return RowSparse(*indices, values, self.shape)
        kind = BCOO if self.kind == "coo" else BCSR
        return kind((values, *indices), shape=self.shape)

    def __str__(self):
        return self.kind + ("_vector" if self.vector else "_T" if self.transposed else "")


def forms(left):
    matrices = [Form(kind, left, t) for kind in ("dense", *STORED) for t in (False, True)]
    return [*matrices, *(Form(kind, left, vector=True) for kind in ("dense", "row_sparse"))]


class Operand:
    """Random stored values and indices, and what they mean in NumPy.

    Attributes:
        values: as they are stored; those of padding are nan or inf.
        indices: the arrays that `Form.build` needs.
        places: for each value its place in the tensor, all in bounds.
        inside: which values have a place, and are not padding.
    """

    def __init__(self, form, rng):
        self.form, shape = form, form.shape
        if form.kind == "dense":
            self.indices, self.places = (), tuple(np.indices(shape))
            self.inside = np.ones(shape, bool)
        else:
            count = STORED[form.kind]
            limits = [n - (form.skips_last and d == form.summed) for d, n in enumerate(shape)]
            index = np.stack([rng.integers(0, n, count) for n in limits])
            bad = rng.random(count) < 0.3
            if form.kind == "row_sparse":
                stored = np.where(bad, rng.choice([-1, shape[0], *FAR], count), index[0])
                self.indices = (stored,)
                rest = np.indices((count, *shape[1:]))[1:]
                column = (count, *[1] * len(rest))
                self.places = (index[0].reshape(column) + 0 * sum(rest), *rest)
                self.inside = ~bad.reshape(column) | np.zeros((count, *shape[1:]), bool)
            elif form.kind == "coo":
                which = rng.integers(0, 2, count)
                outside = rng.choice([-1, 7, *FAR], count)
                stored = np.where(bad & (which == np.arange(2)[:, None]), outside, index)
                self.indices, self.places, self.inside = (stored.T,), tuple(index), ~bad
            else:  # padding has no column, or comes after the last row
                index[0].sort()
                pointers = np.searchsorted(index[0], np.arange(shape[0] + 1))
                pointers[-1] = rng.integers(pointers[-2], count + 1)
                stored = np.where(bad, rng.choice([-1, shape[1], *FAR], count), index[1])
                self.indices, self.places = (stored, pointers), tuple(index)
                self.inside = ~bad & (np.arange(count) < pointers[-1])
        values = rng.normal(size=self.inside.shape)
        self.values = np.float32(np.where(self.inside, values, rng.choice(POISON)))

    def matrix(self, values):
        """The operand (m, k) or (k, n) with these values, in float64."""
        x = np.zeros(self.form.shape)
        values = np.where(self.inside, np.float64(values), 0)
        np.add.at(x, self.places, values)
        if self.form.vector:
            return x[None] if self.form.left else x[:, None]
        return x.T if self.form.transposed else x

    def at_values(self, matrix):
        """The entries of a matrix at the places of the values, 0 for padding."""
        matrix = matrix.T if self.form.transposed else matrix.reshape(self.form.shape)
        return np.where(self.inside, matrix[self.places], 0)

    @property
    def stored(self):
        return self.matrix(np.ones(self.inside.shape)) > 0

    def poison_last(self, rng):
        """nan or inf at the last index summed over, which the other operand skips."""
        last = np.zeros(self.stored.shape)
        last[(slice(None), -1) if self.form.left else -1] = 1
        poisoned = self.at_values(last) > 0
        self.values = np.where(poisoned, np.float32(rng.choice(POISON)), self.values)


class Case:
    """A product with its derivatives, in NumPy."""

    def __init__(self, lhs, rhs, seed):
        rng = np.random.default_rng(seed)
        self.a, self.b = Operand(lhs, rng), Operand(rhs, rng)
        if rhs.skips_last:
            self.a.poison_last(rng)
        if lhs.skips_last:
            self.b.poison_last(rng)
        self.has_a = self.a.stored
        self.has_b = self.b.stored | (lhs.is_entries and rhs.is_entries)  # made dense
        self.ct = np.float32(rng.normal(size=(self.has_a.shape[0], self.has_b.shape[1])))
        self.dots = tuple(
            np.float32(np.where(x.inside, rng.normal(size=x.inside.shape), np.nan))
            for x in (self.a, self.b)
        )

    def product(self, va, vb):
        return summed(self.a.matrix(va), self.b.matrix(vb), self.has_a, self.has_b)

    def gradients(self):
        a, b = self.a.matrix(self.a.values), self.b.matrix(self.b.values)
        everywhere = np.ones(self.ct.shape, bool)
        of_a = summed(self.ct, b.T, everywhere, self.has_b.T)
        of_b = summed(a.T, self.ct, self.has_a.T, everywhere)
        return self.a.at_values(of_a), self.b.at_values(of_b)

    def tangent(self):
        da, db = self.dots
        return self.product(da, self.b.values) + self.product(self.a.values, db)


def summed(a, b, has_a, has_b):
    """The sum over k of the a[m, k] * b[k, n] that are both stored."""
    with np.errstate(invalid="ignore"):
        products = a[:, :, None] * np.float64(b)[None]
        return np.where(has_a[:, :, None] & has_b[None], products, 0).sum(1)
