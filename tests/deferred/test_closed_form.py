"""The coefficients of skipped steps, against the steps one by one in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmask._deferred.closed_form import (
    Coefficients,
    Form,
    Quotient,
    StepWithout,
    advanced,
    products_of,
    skipped,
)

RING, STEPS = 16, 40
B1, B2, EPS = 0.9, 0.999, 1e-4

# For each kind of step: its form, and its scalars at a rate and the number of the step.
CASES = {
    "momentum": (
        Form(2, products_of([(1, 1), (0, 1)], 2)),
        lambda rate, t: StepWithout({(1, 1): B1 - 1, (0, 1): -rate * B1}, None, None),
    ),
    "decay": (
        Form(1, products_of([(0, 0)], 1)),
        lambda rate, t: StepWithout({(0, 0): -rate}, None, None),
    ),
    "sign": (
        Form(2, products_of([(0, 0), (1, 1)], 2), sign=1),
        lambda rate, t: StepWithout({(0, 0): -rate / 2, (1, 1): B1 - 1}, None, -rate),
    ),
    "quotient": (
        Form(3, products_of([(1, 1), (2, 2)], 3), quotient=(1, 2), terms=3),
        lambda rate, t: StepWithout(
            {(1, 1): B1 - 1, (2, 2): B2 - 1},
            Quotient(-rate * B1 / (1 - B1 ** (t + 1)), B2 / (1 - B2 ** (t + 1)), 0.0, EPS),
            None,
        ),
    ),
    "quotient with a root": (
        Form(
            3, products_of([(0, 0), (1, 1), (2, 2)], 3), quotient=(1, 2), has_root=True, terms=5
        ),
        lambda rate, t: StepWithout(
            {(0, 0): -rate, (1, 1): B1 - 1, (2, 2): B2 - 1},
            Quotient(-rate * B1, B2, EPS**2, EPS),
            None,
        ),
    ),
}
rate_of = lambda t: 0.1 / (1 + t / 10)


def one_step(form, step, entries):
    """A step without a gradient, in NumPy."""
    new = [x.copy() for x in entries]
    for (row, column), change in step.changes.items():
        new[row] += change * entries[column]
    if step.quotient is not None:
        (a, b), (c, y, e0, e1) = form.quotient, step.quotient
        new[0] += c * entries[a] / (np.sqrt(y * entries[b] + e0) + e1)
    if form.sign is not None:
        new[0] += step.sign * np.sign(entries[form.sign])
    return new


@pytest.mark.parametrize("name", CASES)
def test_steps_taken_together(name):
    """From each start step that the ring has, for entries of many sizes."""
    form, step_at = CASES[name]
    lines = jnp.tile(form.fresh(jnp.float32), (RING, 1))
    carry = jnp.zeros((RING, form.sums), jnp.float32)

    @jax.jit
    def advance(lines, carry, t):
        rate = rate_of(t.astype(jnp.float32))
        return advanced(form, lines, carry, t, step_at(rate, t.astype(jnp.float32)))

    for t in range(STEPS):
        lines, carry = advance(lines, carry, jnp.int32(t))
    start = [
        np.logspace(-6, 1, 24).reshape(8, 3) * (2.0 if i == 2 else (-1.0) ** i)
        for i in range(form.width)
    ]
    for since in range(STEPS - RING + 1, STEPS + 1):
        expected = start
        for t in range(since, STEPS):
            expected = one_step(form, step_at(rate_of(t), t), expected)
        of_rows = jnp.tile(lines[since % RING], (8, 1))
        found = skipped(form, of_rows, [jnp.asarray(x, jnp.float32) for x in start])
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_columns(name):
    """Checkpoints hold the array: products, terms, signs, diagonal less 1, and the scale."""
    form, _ = CASES[name]
    fresh = form.fresh(jnp.float32)
    expected = [float(i == j) for i, j in form.pairs]
    expected += [0.0] * (form.terms + (form.sign is not None) + form.width)
    expected += [1.0, 0.0, 1.0, 1.0] if form.quotient else []
    np.testing.assert_array_equal(fresh, expected)
    lines = jnp.arange(2.0 * fresh.size).reshape(2, fresh.size)
    coefficients = Coefficients.of(form, lines)
    np.testing.assert_array_equal(jnp.stack(jax.tree.leaves(coefficients), axis=1), lines)
    assert list(coefficients.products) == list(form.pairs)


def test_products():
    assert products_of([(0, 1), (1, 2)], 3) == ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
