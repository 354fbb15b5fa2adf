"""16-bit tables: float32 arithmetic in the rows, and stochastic rounding on the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask

DTYPES = [jnp.bfloat16, jnp.float16]


def neighbours(x, dtype):
    """The largest number of `dtype` not above each x and the smallest not below, by NumPy."""
    near = np.asarray(jnp.asarray(x).astype(dtype))
    wide = near.astype(np.float64)
    step = [np.asarray(jnp.nextafter(near, jnp.asarray(s, dtype))) for s in (-np.inf, np.inf)]
    below = np.where(wide > x, step[0].astype(np.float64), wide)
    above = np.where(wide < x, step[1].astype(np.float64), wide)
    return below, above


@pytest.mark.parametrize("dtype", DTYPES)
class TestStochasticRounding:
    def test_a_neighbour_and_right_on_average(self, dtype):
        rng = np.random.default_rng(0)
        x = np.float32(rng.normal(size=40) * 10.0 ** rng.integers(-3, 3, 40))
        below, above = neighbours(x, dtype)
        draws = 20_000
        many = jnp.broadcast_to(x, (draws, 40))
        y = jax.jit(lambda k: jmask.stochastic_round(many, dtype, k))(jax.random.key(1))
        assert y.dtype == dtype
        y = np.asarray(y, np.float64)
        assert ((y == below) | (y == above)).all()
        assert ((y == below).any(0) & (y == above).any(0)).mean() > 0.9
        # Within five standard errors of the mean, for each of the 40 numbers.
        error = np.abs(y.mean(0) - x)
        assert (error <= 5 * y.std(0) / np.sqrt(draws) + 1e-12).all()
        # Rounding to nearest is off by much more.
        nearest = np.abs(np.asarray(jnp.asarray(x).astype(dtype), np.float64) - x)
        assert nearest.sum() > 10 * error.sum()

    def test_what_needs_no_rounding(self, dtype):
        largest = float(jnp.finfo(dtype).max)
        x = jnp.array([0.0, -0.0, 1, -2.5, jnp.nan, jnp.inf, -jnp.inf, largest, 3.4e38, 1e-30])
        for seed in range(3):
            y = jmask.stochastic_round(x, dtype, jax.random.key(seed))
            np.testing.assert_array_equal(np.float32(y[:8]), np.float32(x[:8].astype(dtype)))
            assert y[8] >= largest
            assert np.signbit(np.float32(y[1]))
            assert 0 <= float(y[9]) <= 1e-7

    def test_the_same_key_gives_the_same(self, dtype):
        x = jnp.linspace(0, 1, 99)
        one, two, other = (
            jmask.stochastic_round(x, dtype, jax.random.key(k)) for k in (0, 0, 1)
        )
        np.testing.assert_array_equal(one, two)
        assert (one != other).any()


@pytest.mark.parametrize("dtype", DTYPES)
class TestTables:
    ids = jnp.array([3, 1, 3, -1])

    def gradient(self, rows=6):
        values = jnp.array([[1e-3] * 4, [2e-3] * 4, [3e-3] * 4, [9.0] * 4])
        return {"t": jmask.RowSparse(self.ids, values, (rows, 4)), "w": jnp.full(4, 1e-3)}

    def params(self, dtype):
        return {"t": jnp.ones((6, 4), dtype), "w": jnp.ones(4, dtype)}

    def test_small_updates_add_up(self, dtype):
        """1 - 1e-4 is 1 in these dtypes: to nearest nothing ever moves."""
        tx, grads = jmask.sgd(0.02), self.gradient()

        def train(use_keys):
            def body(carry, key):
                params, state = carry
                key = key if use_keys else None
                return jmask.apply_gradients(tx, grads, state, params, key=key), None

            start = (self.params(dtype), tx.init(self.params(dtype)))
            keys = jax.random.split(jax.random.key(0), 3000)
            return jax.jit(lambda: jax.lax.scan(body, start, keys)[0][0])()

        to_nearest, at_random = train(False), train(True)
        assert (to_nearest["t"] == 1).all()
        for name, row, moved in (("t", 1, 2e-3), ("t", 3, 4e-3), ("w", slice(None), 1e-3)):
            expected = 1 - 3000 * 0.02 * moved
            mean = np.asarray(at_random[name][row], np.float64).mean()
            assert abs(mean - expected) < 0.05, (name, row)
        others = np.array([0, 2, 4, 5])
        np.testing.assert_array_equal(at_random["t"][others], jnp.ones((4, 4), dtype))

    def test_keys_leave_wide_parameters_alone(self, dtype):
        params = {"t": jnp.ones((6, 4)), "w": jnp.ones(4, dtype)}
        tx = jmask.sgd(0.02)
        one, two = (
            jmask.apply_gradients(tx, self.gradient(), tx.init(params), params, key=key)[0]
            for key in (None, jax.random.key(0))
        )
        np.testing.assert_allclose(one["t"], two["t"], rtol=1e-7)
