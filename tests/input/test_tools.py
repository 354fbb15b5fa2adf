"""Tools that meet sparse and masked tensors: they work, or the first line says what to do."""

import pickle

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax import export
from jax.experimental.sparse import BCOO, BCSR

import jmask
from tests.mistakes import IDS, ROWS, TABLE

MASKED = jmask.masked_tensor(jnp.array([1.0, jnp.nan]), jnp.array([True, False]))
MASKED_ROWS = jmask.masked_tensor(ROWS, ROWS.values > 0)
SCALAR = jmask.masked_tensor(jnp.array(1.25), jnp.array(True))
MASKED_SCALAR = jmask.masked_tensor(jnp.array(1.25), jnp.array(False))

TENSORS = {
    "RowSparse": ROWS,
    "duplicates": jmask.RowSparse(IDS, jnp.ones((3, 2)), (6, 2)),
    "masked array": jmask.masked_tensor(TABLE, TABLE > 0),
    "masked RowSparse": MASKED_ROWS,
    "masked BCOO": jmask.masked_tensor(BCOO.fromdense(jnp.eye(3))),
    "masked BCSR": jmask.masked_tensor(BCSR.fromdense(jnp.eye(3))),
}
_same = lambda x: x
_dense = lambda x: np.asarray(jmask.todense(x))


@pytest.fixture(params=TENSORS)
def x(request):
    return TENSORS[request.param]


class TestToolsThatWork:
    def test_debug_print(self, x, capsys):
        @jax.jit
        def printed(x):
            jax.debug.print("the tensor {}", {"x": x})
            return x

        printed(x)
        jax.effects_barrier()
        assert f"the tensor { ({'x': x}) }" in capsys.readouterr().out

    def test_callback(self, x):
        seen = []
        jax.jit(lambda x: jax.debug.callback(seen.append, x))(x)
        jax.effects_barrier()
        np.testing.assert_array_equal(_dense(seen[0]), _dense(x))

    def test_chex(self, x):
        """Row ids are, as random keys are, no arrays of NumPy: see docs/errors.md."""
        chex.assert_trees_all_equal({"x": x}, {"x": x})
        x, other = jmask.to_arrays({"x": x}), jmask.to_arrays({"x": _doubled(x)})
        chex.assert_trees_all_close(x, x)
        chex.assert_tree_all_finite(x)
        for check in (chex.assert_trees_all_close, chex.assert_trees_all_equal):
            with pytest.raises(AssertionError, match=r"differ in leaves|not equal"):
                check(x, other)

    def test_msgpack(self, x):
        saved = flax.serialization.to_bytes({"x": x})
        like = _doubled(x)
        restored = flax.serialization.from_bytes({"x": like}, saved)["x"]
        assert jax.tree.structure(restored) == jax.tree.structure(x)
        np.testing.assert_array_equal(_dense(restored), _dense(x))

    def test_orbax(self, x, tmp_path):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "c", {"x": x})
            checkpointer.wait_until_finished()
            described = jax.tree.map(ocp.utils.to_shape_dtype_struct, x)
            for like in (x, jax.eval_shape(lambda: x), described):
                restored = checkpointer.restore(tmp_path / "c", {"x": like})["x"]
                assert jax.tree.structure(restored) == jax.tree.structure(x)
                np.testing.assert_array_equal(_dense(restored), _dense(x))
            arrays = jmask.from_arrays(checkpointer.restore(tmp_path / "c"), like={"x": x})
            np.testing.assert_array_equal(_dense(arrays["x"]), _dense(x))

    def test_pickle_and_export(self, x):
        for again in (pickle.loads(pickle.dumps(x)), export.export(jax.jit(_same))(x).call(x)):
            assert jax.tree.structure(again) == jax.tree.structure(x)
            np.testing.assert_array_equal(_dense(again), _dense(x))

    def test_block_until_ready(self, x):
        assert x.block_until_ready() is not None
        assert jax.block_until_ready(x) is not None

    def test_not_equal_to_what_has_no_entries(self, x):
        assert (x == None) is False  # noqa: E711
        assert (x != None) is True  # noqa: E711
        assert (x == "a") is False
        assert (x != "a") is True
        assert x not in [None, "a", b"a"]

    @pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
    def test_functions_of_numpy(self, x):
        roots = np.sqrt(x)
        assert type(roots) is type(x)
        np.testing.assert_allclose(_dense(roots), np.sqrt(_dense(x)), rtol=1e-6)
        array = np.full(x.shape, 2, np.float32)
        np.testing.assert_array_equal(_dense(array * x), 2 * _dense(x))
        np.testing.assert_array_equal(_dense(np.float32(2) * x), 2 * _dense(x))
        np.testing.assert_array_equal(_dense(array - x), _dense(np.subtract(array, x)))


def _doubled(x):
    leaves, structure = jax.tree.flatten(x)
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    return structure.unflatten(
        [x * 2 if f else x for x, f in zip(leaves, floating, strict=True)]
    )


def test_formats():
    assert f"{SCALAR:.3f}" == "1.250"
    assert f"{MASKED_SCALAR:.3f}" == "--"
    assert f"{SCALAR}" == str(SCALAR)
    assert f"{MASKED}" == str(MASKED)


def test_a_state_that_is_not_what_the_target_promises():
    saved = flax.serialization.to_bytes(jmask.RowSparse(IDS, jnp.ones((3, 2)), (6, 2)))
    like = jmask.RowSparse([1, 2, 3], jnp.ones((3, 2)), (6, 2), coalesced=True)
    with pytest.raises(ValueError, match="`coalesced` was promised"):
        flax.serialization.from_bytes(like, saved)


@pytest.mark.dtype_promotion
class TestArgumentsOfGrad:
    def test_holomorphic(self):
        table = (TABLE + 1j * TABLE).astype(jnp.complex64)
        loss = lambda t: jnp.sum(t[IDS] ** 2)
        gradient = jmask.grad(loss, holomorphic=True)(table)
        assert isinstance(gradient, jmask.RowSparse)
        expected = jax.grad(loss, holomorphic=True)(table)
        np.testing.assert_allclose(gradient.todense(), expected, rtol=1e-6)
        value, _ = jmask.value_and_grad(loss, holomorphic=True)(table)
        np.testing.assert_allclose(value, loss(table), rtol=1e-6)

    def test_allow_int(self):
        params = {"t": TABLE, "n": jnp.array([1, 2]), "flag": jnp.array(True)}

        def loss(params, scale, ids):
            scale *= params["n"].sum() * jnp.where(params["flag"], 1.0, 2.0)
            return jnp.sum(params["t"][ids]) * scale

        how = {"argnums": (0, 1, 2), "allow_int": True}
        value, gradient = jmask.value_and_grad(loss, **how)(params, 2.0, IDS)
        expected_value, expected = jax.value_and_grad(loss, **how)(params, 2.0, IDS)
        assert value == expected_value
        table = gradient[0].pop("t")
        assert isinstance(table, jmask.RowSparse)
        np.testing.assert_allclose(table.todense(), expected[0].pop("t"))
        assert gradient[1] == expected[1]
        for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
