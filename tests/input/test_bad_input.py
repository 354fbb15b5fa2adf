"""Every mistake gets an error, while tracing, that names the argument and the way out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.sparse_arrays import coo

VALUES = jnp.ones((2, 3))
TABLE = jnp.ones((5, 3))
TRANSFORMATIONS = {
    "lazy": lambda: jmask.lazy(optax.adam(0.1)),
    "adam": lambda: jmask.adam(0.1),
    "sgd, dense": lambda: jmask.sgd(0.1, lazy_update=False),
}


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: jmask.RowSparse([0.0, 1.0], VALUES, (5, 3)),
            TypeError,
            "`indices` must be integers.* got float",
        ),
        (
            lambda: jmask.RowSparse([True, False], VALUES, (5, 3)),
            TypeError,
            "`indices` must be integers.* got bool",
        ),
        (
            lambda: jmask.RowSparse([[0, 1]], VALUES, (5, 3)),
            ValueError,
            r"`indices` must have one dimension, got shape \(1, 2\)",
        ),
        (
            lambda: jmask.RowSparse([0, 1, 2], VALUES, (5, 3)),
            ValueError,
            r"one row for each of the 3 `indices`, got values of shape \(2, 3\)",
        ),
        (
            lambda: jmask.RowSparse([0, 1], VALUES, (5, 4)),
            ValueError,
            r"expected rows of shape \(4,\), got \(3,\)",
        ),
        (
            lambda: jmask.RowSparse([0, 1], VALUES, (5,)),
            ValueError,
            r"expected rows of shape \(\), got \(3,\)",
        ),
        (
            lambda: jmask.RowSparse([0, 1], 1.0, (5,)),
            ValueError,
            r"got values of shape \(\)",
        ),
        (
            lambda: jmask.RowSparse([0, 1], VALUES, ()),
            ValueError,
            "`shape` must have at least one dimension",
        ),
        (
            lambda: jmask.RowSparse([0, 1], VALUES, (-5, 3)),
            ValueError,
            "no negative one",
        ),
        (
            lambda: jmask.RowSparse([0, 1], VALUES, 5),
            TypeError,
            "`shape` must be a tuple of integers, got 5",
        ),
        (
            lambda: jmask.RowSparse([0, 1], VALUES, (5.0, 3)),
            TypeError,
            "`shape` must be a tuple of integers",
        ),
        (
            lambda: jmask.RowSparse([0, 2**40], VALUES, (5, 3)),
            ValueError,
            "`indices` holds 1099511627776, which is beyond 32-bit",
        ),
        (
            lambda: jmask.RowSparse([0, 1], VALUES, (2**31, 3)),
            ValueError,
            "needs int64 row ids.*jax_enable_x64",
        ),
        (
            lambda: jmask.RowSparse([0, 1], VALUES, (5, 3)).coalesce(nse=-1),
            ValueError,
            "`nse`.* must be >= 0, got -1",
        ),
        (
            lambda: jmask.RowSparse.fromdense(TABLE, nse=-2),
            ValueError,
            "`nse`.* must be >= 0, got -2",
        ),
        (
            lambda: jmask.RowSparse([0, 1], VALUES, (5, 3)).retain([0.5]),
            TypeError,
            "`rows` must be integers",
        ),
    ],
)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_row_sparse(build, error, message, traced):
    with pytest.raises(error, match=message):
        jax.eval_shape(build) if traced else build()


def bad_params(kind):
    return {
        "row sparse": jmask.RowSparse([1], jnp.ones((1, 3)), (5, 3)),
        "BCOO": coo(TABLE),
        "complex": TABLE.astype(jnp.complex64),
    }[kind]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
class TestTransformations:
    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("row sparse", r"`params\['t'\]` is a RowSparse: parameters must be dense"),
            ("BCOO", r"`params\['t'\]` is a BCOO: parameters must be dense"),
            ("complex", r"`params\['t'\]` is complex64: complex parameters are not"),
        ],
    )
    def test_parameters(self, name, kind, message):
        tx = TRANSFORMATIONS[name]()
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(tx.init, {"t": bad_params(kind)})

    def test_gradient_of_another_shape(self, name):
        tx = TRANSFORMATIONS[name]()
        state = tx.init({"t": TABLE})
        gradient = {"t": jmask.RowSparse([1], jnp.ones((1, 3)), (6, 3))}
        message = r"`updates\['t'\]` of shape \(6, 3\) does not fit .* \(5, 3\)"
        with pytest.raises(ValueError, match=message):
            jax.jit(tx.update)(gradient, state, {"t": TABLE})

    def test_gradient_of_another_place(self, name):
        tx = TRANSFORMATIONS[name]()
        gradient = {"u": jmask.RowSparse([1], jnp.ones((1, 3)), (5, 3))}
        with pytest.raises(ValueError, match="must have the same structure"):
            tx.update(gradient, tx.init({"t": TABLE}), {"t": TABLE})


class TestState:
    gradient = jmask.RowSparse([1], jnp.ones((1, 3)), (5, 3))

    def test_of_another_transformation(self):
        tx = jmask.lazy(optax.adam(0.1))
        with pytest.raises(ValueError, match="`state` was not made by `init`"):
            tx.update(self.gradient, optax.sgd(0.1).init(TABLE), TABLE)

    def test_of_another_model(self):
        tx = jmask.lazy(optax.adam(0.1))
        with pytest.raises(ValueError, match=r"`state.* has shape \(7, 3\), expected \(5, 3"):
            tx.update(self.gradient, tx.init(jnp.ones((7, 3))), TABLE)


def test_missing_params():
    tx = jmask.sgd(0.1, weight_decay=0.1)
    gradient = jmask.RowSparse([1], jnp.ones((1, 3)), (5, 3))
    with pytest.raises(ValueError, match="`params` must be given"):
        tx.update(gradient, tx.init(TABLE))


def test_apply_updates_of_another_shape():
    update = jmask.RowSparse([1], jnp.ones((1, 3)), (6, 3))
    with pytest.raises(ValueError, match="does not fit its parameter"):
        jmask.apply_updates(TABLE, update)
    with pytest.raises(ValueError, match="do not broadcast"):
        optax.apply_updates(TABLE, update)


def test_sparse_gradient_without_lazy():
    tx = optax.adam(0.1)
    gradient = jmask.RowSparse([1], jnp.ones((1, 3)), (5, 3))
    with pytest.raises(ValueError, match="RowSparse"):
        tx.update({"t": gradient}, tx.init({"t": TABLE}), {"t": TABLE})


def test_collectives_on_a_gradient():
    """psum of the leaves would add ids: it must not go through."""
    gradient = jmask.RowSparse([1], jnp.ones((1, 3)), (5, 3))
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), gradient)
    with pytest.raises(TypeError, match=r"jmask\.lazy"):
        jax.vmap(lambda g: jax.lax.psum(g, "i"), axis_name="i")(batch)


def test_adding_gradients_leaf_by_leaf():
    gradient = jmask.RowSparse([1], jnp.ones((1, 3)), (5, 3))
    with pytest.raises(TypeError, match=r"jmask\.lazy"):
        jax.tree.map(lambda a, b: a + b, gradient, gradient)
    with pytest.raises((TypeError, NotImplementedError)):
        optax.tree.norm({"t": gradient})


def test_numpy_refuses_ids():
    gradient = jmask.RowSparse([1], jnp.ones((1, 3)), (5, 3))
    with pytest.raises(TypeError):
        jax.tree.map(np.asarray, gradient)


def test_mask_that_may_mean_two_things():
    """Three stored rows of a tensor of three rows: entries, or stored values?"""
    rows = jmask.RowSparse([2, 0, 3], jnp.ones((3, 2)), (3, 2))
    mask = np.array([[True, False], [True, True], [False, False]])
    with pytest.raises(ValueError, match=r"may be meant for the entries .* or for"):
        jmask.masked_tensor(rows, mask)
    stored = jmask.masked_tensor(rows, rows.with_values(jnp.asarray(mask)))
    np.testing.assert_array_equal(stored.to_tensor(0), [[1, 1], [0, 0], [1, 0]])
