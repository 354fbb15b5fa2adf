"""Masked gradients in optimizers: valid entries move as in the dense update, others do not.

And weights that are row-sparse, gradients that store entries, as the sources have them: MXNet
has a `row_sparse` weight with all of its rows, torch's Adagrad takes a COO gradient as it is.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import jmask
import jmask.numpy as jnm
from jmask._tensors.storage import stored_values
from tests.compiled_step import with_optax
from tests.expressions import functions
from tests.optax_cases import CHAINS, ROW_LOCAL, extra_args
from tests.optimizers import NOT_LAZY, OPTIMIZERS
from tests.oracle import densified
from tests.sparse_arrays import coo, csr
from tests.stored_tables import STEPS

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]


V, D = 6, 3
RNG = np.random.default_rng(0)
PARAM = jnp.asarray(RNG.normal(size=(V, D)), jnp.float32).at[5, 2].set(-0.0)
DATA = np.float32(RNG.normal(size=(V, D)))
MASK = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=bool)
POISON = np.where(MASK, DATA, np.array([np.nan, np.inf, 1e30], np.float32))


def row_sparse():
    """Rows out of order, one row twice, padding, and a stored row that is all masked."""
    ids = [4, 0, 2, 0, 3, -1]
    values = POISON[[4, 0, 2, 0, 3, 0]]
    values[1], values[3] = POISON[0] / 2, POISON[0] / 2
    data = jmask.RowSparse(ids, values, (V, D))
    return jmask.masked_tensor(data, data.with_values(jnp.asarray(MASK[[4, 0, 2, 0, 3, 0]])))


GRADIENTS = {
    "default": lambda: jmask.masked_tensor(POISON, MASK),
    "row_sparse": row_sparse,
    "coo": lambda: jmask.masked_tensor(coo(np.where(MASK, DATA, 0), MASK.sum() + 2)),
    "csr": lambda: jmask.masked_tensor(csr(np.where(MASK, DATA, 0))),
}


def compare(new, dense, old, mask=MASK):
    np.testing.assert_allclose(np.asarray(new)[mask], np.asarray(dense)[mask], rtol=5e-6)
    same = np.asarray(new).view(np.uint32)[~mask] == np.asarray(old).view(np.uint32)[~mask]
    assert same.all(), "a masked entry changed"


def check(tx, reference, storage, **extra):
    """A warm-up step with a dense gradient, then one masked step against a dense one."""
    gradient = GRADIENTS[storage]()
    reference = optax.with_extra_args_support(reference)
    masked_step, dense_step = (
        jax.jit(functools.partial(with_optax, tx, **extra)) for tx in (tx, reference)
    )
    param, state = dense_step(jnp.full_like(PARAM, 0.3), reference.init(PARAM), PARAM)
    param = param.at[5, 2].set(-0.0)
    new, new_state = masked_step(gradient, state, param)
    dense, dense_state = dense_step(jnp.asarray(np.where(MASK, DATA, 0)), state, param)
    compare(new, dense, param)
    for x, y, old in zip(*map(jax.tree.leaves, (new_state, dense_state, state)), strict=True):
        if x.shape == (V, D):
            compare(x, y, old)
        else:
            np.testing.assert_allclose(x, y, rtol=1e-5)


NAMED = {
    "sgd": lambda **k: jmask.sgd(0.1, momentum=0.9, weight_decay=0.1, **k),
    "adam": lambda **k: jmask.adam(0.1, weight_decay=0.1, **k),
    "adagrad": lambda **k: jmask.adagrad(0.1, initial_accumulator_value=0.5, **k),
}


@pytest.mark.parametrize("storage", GRADIENTS)
@pytest.mark.parametrize("name", NAMED)
def test_named_optimizers(name, storage):
    check(NAMED[name](), NAMED[name](lazy_update=False), storage)


@pytest.mark.of_cpus
@pytest.mark.parametrize(("name", "scatters"), [("sgd", 1), ("adam", 1), ("adagrad", 1)])
def test_masked_rows_take_one_pass(name, scatters):
    """The mask is one operand of the scatter whose combiner is the optimizer."""
    tx, table = NAMED[name](), jnp.ones((50, D))
    rows = jmask.RowSparse([4, 7], jnp.ones((2, D)), (50, D), coalesced=True)
    gradient = jmask.masked_tensor(
        rows, rows.with_values(jnp.array([[1, 0, 1], [0, 0, 1]]) > 0)
    )
    step = jax.jit(lambda g, s, p: jmask.apply_gradients(tx, g, s, p))
    text = step.lower(gradient, tx.init(table), table).as_text()
    assert text.count('"stablehlo.scatter"') == scatters
    assert "stablehlo.gather" not in text


CLIPPED = "chain(clip_by_global_norm(0.1), adam(0.1))"
LIFTED = {name: (ROW_LOCAL | CHAINS)[name] for name in ("adamw", "lion", "rmsprop", CLIPPED)}


@pytest.mark.parametrize("storage", GRADIENTS)
@pytest.mark.parametrize("name", LIFTED)
def test_lifted_optax(name, storage):
    inner = LIFTED[name]()
    check(jmask.lazy(inner), inner, storage, **extra_args(name, None))


def test_any_optimizer_on_dense_storage():
    """On whole arrays nothing must be row-local."""
    check(jmask.lazy(optax.lamb(0.1)), optax.lamb(0.1), "default")


@pytest.mark.parametrize("storage", GRADIENTS)
def test_microbatches(storage):
    """The mean has what is valid in any of them; nothing under a mask is ever added."""
    whole = GRADIENTS[storage]()
    place = jnp.arange(whole.valid.size).reshape(whole.valid.shape)
    values = stored_values(whole.storage)
    parts = [
        whole.with_values(jnp.where(keep, values, jnp.nan), whole.valid & keep)
        for keep in (place % 3 > 0, place % 4 > 0)
    ]
    arrays = list(map(jmask.to_numpy_ma, parts))
    mask = ~np.ma.getmaskarray(arrays[0]) | ~np.ma.getmaskarray(arrays[1])
    mean = jmask.masked_tensor(sum(x.filled(0) for x in arrays) / 2, mask)
    inner = jmask.lazy(optax.sgd(0.1, momentum=0.9))
    expected = jmask.apply_gradients(inner, mean, inner.init(PARAM), PARAM)
    tx = jmask.multi_steps(inner, 2, like=jax.eval_shape(lambda: parts[0]))
    new, state = PARAM, tx.init(PARAM)
    for part in parts:
        new, state = jmask.apply_gradients(tx, part, state, new)
    assert 0 < mask.sum() < MASK.sum()
    old = jax.tree.leaves((PARAM, inner.init(PARAM)))
    leaves = map(jax.tree.leaves, ((new, state.inner_state), expected))
    for x, y, before in zip(*leaves, old, strict=True):
        compare(x, y, before, mask)


@pytest.mark.parametrize("storage", ["default", "coo"])
def test_row_norms_keep_the_mask(storage):
    """Bounded before the optimizer, or after it in the same `lazy`."""
    before, dense = (
        optax.chain(jmask.clip_by_row_norm(0.5), jmask.adam(0.1, lazy_update=is_lazy))
        for is_lazy in (True, False)
    )
    check(before, dense, storage)
    after = optax.chain(optax.sgd(0.1), jmask.max_row_norm(0.5))
    check(jmask.lazy(after), after, storage)


@pytest.mark.parametrize("storage", GRADIENTS)
def test_zero_semantics(storage):
    """`densify` takes masked entries for zeros: momentum moves them."""
    gradient = GRADIENTS[storage]()
    tx = optax.chain(jmask.densify(), optax.adamw(0.1))
    updates, _ = tx.update(gradient, tx.init(PARAM), PARAM)
    expected, _ = optax.adamw(0.1).update(
        jnp.asarray(np.where(MASK, DATA, 0)), optax.adamw(0.1).init(PARAM), PARAM
    )
    np.testing.assert_allclose(updates, expected, rtol=1e-6)


@pytest.mark.parametrize("storage", GRADIENTS)
def test_apply_updates(storage):
    new = jmask.apply_updates({"t": PARAM}, {"t": GRADIENTS[storage]()})["t"]
    compare(new, np.asarray(PARAM) + DATA, PARAM)


def test_beside_other_gradients():
    params = {"masked": PARAM, "rows": PARAM, "dense": PARAM}
    gradient = {
        "masked": GRADIENTS["default"](),
        "rows": jmask.RowSparse([1], jnp.ones((1, D)), (V, D)),
        "dense": jnp.ones((V, D)),
    }
    tx = jmask.lazy(optax.adam(0.1))
    new, _ = jmask.apply_gradients(tx, gradient, tx.init(params), params)
    moved = {name: np.asarray(new[name] != PARAM) for name in params}
    np.testing.assert_array_equal(moved["masked"], MASK)
    assert moved["rows"].any(1).tolist() == [False, True] + 4 * [False]
    assert moved["dense"].all()


@pytest.mark.parametrize("storage", GRADIENTS)
def test_gradient_in_a_masked_tensor(storage):
    """jmask.grad takes a MaskedTensor as an argument and returns one with its mask."""
    x = GRADIENTS[storage]()
    loss = lambda params, w: jnm.sum(jnm.sin(params["x"]) * w).to_tensor(0.0)
    gradient, of_w = jmask.grad(loss, (0, 1))({"x": x}, PARAM)
    assert gradient["x"].stype == x.stype
    expected = np.where(MASK, np.cos(DATA) * np.asarray(PARAM), 0)
    np.testing.assert_allclose(gradient["x"].to_tensor(0), expected, rtol=1e-5, atol=1e-6)
    # Sampled at stored rows, w is a table that was looked up.
    of_w = densified(of_w)
    np.testing.assert_allclose(of_w, np.where(MASK, np.sin(DATA), 0), rtol=1e-5, atol=1e-6)
    value, alone = jax.jit(jmask.value_and_grad(lambda x: jnm.sum(x).to_tensor(0.0)))(x)
    np.testing.assert_allclose(alone.to_tensor(0), MASK * 1.0)
    np.testing.assert_allclose(value, DATA[MASK].sum(), rtol=1e-5)


# --- weights that are row-sparse, gradients that store entries --------------------------


GRADIENT = jmask.RowSparse([1, 2], [[1.0, 2], [4, 5]], (4, 2))


@functools.cache
def all_rows():
    """The weight of the tutorial."""
    return jmask.cast_storage(jnp.ones((4, 2)), "row_sparse")


OTHERS = {
    "not lazy": NOT_LAZY["not lazy"],
    "densify": optax.chain(jmask.densify(), jmask.sgd(0.1)),
    "every other step": jmask.multi_steps(jmask.adam(0.1), 2, like=GRADIENT),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHERS])
def test_a_weight_that_stores_all_its_rows(name, wrap, step):
    """Steps are those of its array; it comes back as the storage that it was, of one size."""
    tx = (OPTIMIZERS | OTHERS)[name]
    run = wrap(lambda g, s, w: step(tx, g, s, w))
    weight, dense = all_rows(), all_rows().todense()
    state, expected = tx.init(weight), tx.init(dense)
    for scale in (1.0, -0.5):
        grads = jmask.tree.scale(scale, GRADIENT)
        weight, state = run(grads, state, weight)
        dense, expected = run(grads, expected, dense)
    assert repr(weight) == "RowSparse(float32[4, 2], nse=4)"
    weight.validate()
    np.testing.assert_allclose(weight.todense(), dense, rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state, expected)


def test_the_tutorial_of_mxnet():
    tx = jmask.sgd(0.01, momentum=0.01)
    weight, state = jmask.apply_gradients(tx, GRADIENT, tx.init(all_rows()), all_rows())
    np.testing.assert_allclose(
        weight.todense(), [[1, 1], [0.99, 0.98], [0.96, 0.95], [1, 1]], rtol=1e-6
    )
    momentum = [[0, 0], [-0.01, -0.02], [-0.04, -0.05], [0, 0]]
    np.testing.assert_allclose(state.momentum, momentum, rtol=1e-6)


def test_a_weight_with_zero_rows_is_full_where_it_has_room():
    dense = jnp.array([[0.0, 0], [1, 1], [0, 0], [2, 2]])
    weight = jmask.cast_storage(dense, "row_sparse", nse=4)
    new, _ = jmask.apply_gradients(
        jmask.sgd(0.1), GRADIENT, jmask.sgd(0.1).init(weight), weight
    )
    np.testing.assert_allclose(new.todense(), dense - 0.1 * GRADIENT.todense(), rtol=1e-6)
    short = jmask.cast_storage(dense, "row_sparse")
    with pytest.raises(TypeError, match=r"`params` is a RowSparse.*all rows stored"):
        jmask.sgd(0.1).init(short)


MATRIX = jnp.arange(8.0).reshape(2, 4)
INDICES = jnp.array([[0, 2], [1, 0], [1, 2]])
ENTRIES = BCOO((jnp.array([3.0, 4, 5]), INDICES), shape=(2, 4))


def test_adagrad_of_a_coo_gradient():
    """The numbers that torch's tutorial on masked tensors prints, after one step and two."""
    tx, param = jmask.adagrad(0.1, initial_accumulator_value=0.5), MATRIX
    state = tx.init(param)
    for expected in (
        [[0, 1, 1.9027, 3], [3.9015, 5, 5.9010, 7]],
        [[0, 1, 1.8329, 3], [3.8314, 5, 5.8306, 7]],
    ):
        param, state = jmask.apply_gradients(tx, ENTRIES, state, param)
        np.testing.assert_allclose(param, expected, atol=1e-4)
    sums = [[0.5, 0.5, 18.5, 0.5], [32.5, 0.5, 50.5, 0.5]]
    np.testing.assert_allclose(state.sum_of_squares, sums)


def test_adagrad_written_with_masked_tensors():
    """The four lines of the tutorial, on a state that stores more than the mask."""
    mask = BCOO.fromdense(ENTRIES.todense() != 0)
    masked_grad = jmask.masked_tensor(ENTRIES, mask)
    state_sum = 0.5 + (masked_grad**2).to_tensor(0)
    std = jmask.masked_tensor(coo(state_sum), mask)
    std = jmask.numpy.sqrt(std) + 1e-10
    param = MATRIX - 0.1 * (masked_grad / std).to_tensor(0)
    assert std.storage.nse == 3
    np.testing.assert_allclose(param, [[0, 1, 1.9027, 3], [3.9015, 5, 5.9010, 7]], atol=1e-4)


@pytest.mark.parametrize("step", [jmask.apply_gradients, with_optax], ids=["one", "two"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *NOT_LAZY])
def test_a_coo_gradient_is_a_masked_one(name, step):
    """Equal positions summed, padding left out; the state keeps the bits of other entries."""
    tx = (OPTIMIZERS | NOT_LAZY)[name]
    twice = jnp.concatenate([INDICES, INDICES[:1], jnp.array([[2, 4]])])
    entries = BCOO((jnp.array([1.0, 4, 5, 2, jnp.nan]), twice), shape=(2, 4))
    masked = jmask.masked_tensor(ENTRIES.todense(), ENTRIES.todense() != 0)
    results = [step(tx, g, tx.init(MATRIX), MATRIX) for g in (entries, masked)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), *results)


def test_microbatches_of_entries():
    tx = jmask.multi_steps(jmask.sgd(0.1), 2, like=ENTRIES)
    param, state = MATRIX, tx.init(MATRIX)
    for scale in (1.0, 2.0):
        entries = jmask.tree.scale(scale, ENTRIES)
        param, state = jmask.apply_gradients(tx, entries, state, param)
    np.testing.assert_allclose(param, MATRIX - 0.15 * ENTRIES.todense(), rtol=1e-6)


# With the last one indices stay integers, and ascend.
UNLIFTED = functions("", vars(optax) | globals())("""
    scale(-0.5); clip(1.0); trace(0.9); scale_by_schedule(lambda count: 0.5);
    scale_by_schedule(lambda count: 2.0)
""")


@pytest.mark.parametrize("entries", [ENTRIES, coo(ENTRIES.todense())])
@pytest.mark.parametrize("name", UNLIFTED)
def test_arithmetic_over_the_leaves_of_a_coo_gradient(name, entries):
    """A transformation of optax that is not lifted maps over the indices: never silently."""
    chain = optax.chain(UNLIFTED[name](), jmask.sgd(0.1))
    with pytest.raises((TypeError, ValueError), match=r"put it inside jmask\.lazy"):
        jmask.apply_gradients(chain, entries, chain.init(MATRIX), MATRIX)


@pytest.mark.parametrize("name", ["scale(-0.5)", "clip(1.0)"])
def test_indices_of_a_coo_gradient_that_are_no_integers(name):
    chain = optax.chain(UNLIFTED[name](), jmask.sgd(0.1))
    with pytest.raises(TypeError, match=r"optax transformation inside jmask\.lazy"):
        chain.update(ENTRIES, chain.init(MATRIX), MATRIX)


def test_indices_of_a_coo_gradient_out_of_order():
    """Where jmask is not asked before optax, what breaks a promise is nan."""
    chain = optax.chain(optax.scale_by_schedule(lambda count: 0.5), jmask.sgd(0.1))
    entries = coo(ENTRIES.todense())
    updates, _ = chain.update(entries, chain.init(MATRIX), MATRIX)
    assert np.isnan(jmask.todense(updates)).any()
