"""What docs/errors.md and docs/sharp_bits.md say: errors of JAX and optax, and no errors."""

import functools
import re
from pathlib import Path

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import jmask
import jmask.numpy as jnm
from tests.autodiff.test_nnx import models
from tests.expressions import functions
from tests.later import later
from tests.mistakes import GRADS, IDS, LAZY, PARAMS, ROWS, TABLE, looked_up, mesh, step
from tests.optimizers import OPTIMIZERS

chex = later("chex")
eqx = later("equinox")
nnx = later("flax.nnx")
train_state = later("flax.training.train_state")

pytestmark = pytest.mark.dtype_promotion

# --- errors of JAX and optax -----------------------------------------------------------------

EXAMPLES = jax.tree.map(lambda x: x[None], GRADS)  # as under vmap
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), LAZY)


def over_devices(collective):
    of_gradient = lambda t: collective(jmask.grad(looked_up)(t), "x")
    spread = jax.shard_map(
        of_gradient, mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False
    )
    return jax.jit(spread).lower(TABLE)


def checked(errors, tx):
    """The table after a step that looks for these errors."""

    def run(table):
        bags = lambda t: jmask.embedding_bag(t, IDS[None], padding_id=3)
        grads = jmask.grad(lambda t: jnp.sum(bags(t) ** 2))(table)
        return jmask.apply_gradients(tx, grads, tx.init(table), table)[0]

    error, table = jax.jit(checkify.checkify(run, errors=errors))(TABLE)
    error.throw()
    return table


labels = lambda params: jax.tree.map(lambda x: "rows", params)
# By the beginning of the row of the table in docs/errors.md that has the error's words.
MISTAKES = {
    "multiply": """
        step(optax.sgd(0.1)); step(optax.chain(LAZY, optax.scale(-1.0)));
        mapped(lambda x: 2 * x)
    """,
    "maximum": "step(optax.clip(1.0))",
    "add": "over_devices(jax.lax.psum); jax.tree.map(jnp.add, GRADS, GRADS)",
    "true_divide": "over_devices(jax.lax.pmean)",
    "pytree structure error": """
        step(optax.adam(0.1)); step(optax.chain(LAZY, optax.ema(0.9)));
        step(optax.add_decayed_weights(0.1)); step(optax.partition({"rows": LAZY}, labels));
        step(optax.masked(LAZY, labels)); step(optax.MultiSteps(LAZY, 2));
        eqx.apply_updates(PARAMS, GRADS); by_flax(optax.adam(0.1)); by_nnx(optax.adam(0.1))
    """,
    "this RowSparse has no row ids": """
        eqx.filter(ROWS, eqx.is_inexact_array).todense();
        jmask.adam(0.1).update(DROPPED, jmask.adam(0.1).init(PARAMS), PARAMS)
    """,
    "Cannot determine": "jax.flatten_util.ravel_pytree(GRADS)",
    "cond branch": "step(optax.apply_if_finite(LAZY, 3))",
    "Cannot interpret 'key<row ids: … jmask.tree.norm": """
        step(CHAIN); mapped(lambda x: jnp.sum(x**2))
    """,
    "Cannot interpret 'key<row ids: … .scale": """
        optax.per_example_global_norm_clip(EXAMPLES, 1.0); PRIVATE.update(EXAMPLES, None)
    """,
    "Cannot call": """
        optax.tree.norm(GRADS); mapped(in_float16);
        CHAIN.update(GRADS, CHAIN.init(PARAMS), PARAMS);
        jax.tree.map(lambda x: x.sum(0), EXAMPLES)
    """,
    "Cannot convert": """
        jax.eval_shape(lambda g: jax.tree.map(in_float16, g), GRADS);
        step(optax.sgd(optax.linear_schedule(1, 0, 9)))
    """,
    "came back as plain bool": "step(optax.zero_nans()); mapped(jnp.isfinite)",
    "came back as plain uint32": "mapped(lambda x: jnp.ones(x.shape, jnp.uint32))",
    "JAX array": """
        mapped(np.asarray); chex.assert_trees_all_close(GRADS, GRADS);
        chex.assert_tree_all_finite(GRADS)
    """,
    "sum requires ndarray or scalar arguments, got … RowSparse": "jnp.sum(ROWS)",
    "sum requires ndarray or scalar arguments, got … MaskedTensor": "jnp.sum(MASKED)",
    "where": "step(optax.chain(LAZY, optax.keep_params_nonnegative()))",
    "Attempted": "jmask.grad(lambda t: t.sum() if t.sum() > 0 else t.min())(TABLE)",
    "Abstract": "jmask.grad(lambda t: t.sum() * int(jnp.sum(jnp.ones(2))))(TABLE)",
    "The numpy.ndarray": "jmask.grad(lambda t: t.sum() * np.ones(9)[jnp.argmin(t)])(TABLE)",
    "out-of-bounds": "checked(checkify.index_checks, jmask.adam(0.1))",
    "scan": "jax.lax.scan(lambda g, _: (jmask.tree.add(g, GRADS), None), GRADS, length=2)",
}
DROPPED = eqx.partition(GRADS, eqx.is_inexact_array)[0]
MASKED = jmask.masked_tensor(jnp.ones(2), jnp.array([True, False]))
PRIVATE = optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0)
OUTSIDE = {
    name: (mistake, row)
    for row, text in MISTAKES.items()
    for name, mistake in functions("", globals())(text).items()
}
mapped = lambda function: jax.tree.map(function, GRADS)
in_float16 = lambda x: x.astype("float16")


def by_flax(tx):
    state = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    return state.apply_gradients(grads=GRADS).params["t"]


def by_nnx(tx):
    model = nnx.Dict(t=nnx.Param(TABLE))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.State({"t": nnx.Param(ROWS)}))
    return model.t[...]


def documented():
    """The first column of the table of errors: for each row its words, in their order."""
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    (section,) = re.findall(r"^## By their first lines$(.*?)^## ", page, re.S | re.M)
    first = re.findall(r"^\| (`.+?`) \|", section, re.M)
    texts = [re.sub("`(.*?)`", r"\1", x) for x in first]
    return {text: [part.strip() for part in text.split("…")] for text in texts}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_that_look_for_nan(name):
    found, expected = (
        checked(errors, OPTIMIZERS[name])
        for errors in (checkify.float_checks, checkify.user_checks)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_of_lazy(name):
    """The words are in the first line of the error, or below it where trees differ."""
    mistake, row = OUTSIDE[name]
    (words,) = (words for text, words in documented().items() if text.startswith(row))
    if row == "pytree structure error" and jax.__version_info__ < (0, 11):
        words = ["Custom node type mismatch", "RowSparse"]
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        mistake()
    said = str(error.value)
    said = said if row == "pytree structure error" else said.partition("\n")[0]
    assert re.search(".*".join(map(re.escape, words)), said, re.S), said


def test_every_documented_error_happens():
    assert len(documented()) == len(MISTAKES)


by_apply = lambda tx: jmask.apply_gradients(tx, GRADS, tx.init(PARAMS), PARAMS)
by_guard = lambda tx: step(jmask.skip_nonfinite(tx))


@pytest.mark.parametrize("run", [by_apply, by_guard])
def test_a_note_where_jmask_calls(run):
    """It follows JAX's error, which has other words in each version."""
    with pytest.raises(ValueError, match=r"RowSparse[^~]*put.*jmask\.lazy\(optax\.adam"):
        run(optax.adam(0.1))


def test_the_ways_out():
    """What the table says to use instead."""
    step(jmask.lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))))
    step(jmask.lazy(optax.partition({"rows": optax.adam(0.1)}, labels)))
    step(optax.partition({"rows": LAZY}, {"t": "rows"}))
    step(optax.masked(LAZY, {"t": True}))
    step(jmask.skip_nonfinite(LAZY))
    step(jmask.multi_steps(LAZY, 2, like=GRADS))
    assert jnm.sum(ROWS) == 4
    total = {"t": jmask.RowSparse.zeros((6, 2), nse=2)}
    add = lambda total, _: (jmask.tree.add(total, GRADS, like=total), None)
    np.testing.assert_array_equal(
        jax.lax.scan(add, total, length=3)[0]["t"].todense(), 3 * ROWS.todense()
    )
    expected = jmask.apply_gradients(LAZY, GRADS, LAZY.init(PARAMS), PARAMS)[0]["t"]
    for by in (by_flax, by_nnx):
        np.testing.assert_allclose(by(LAZY), expected)
    assert jmask.from_arrays(jmask.to_arrays(GRADS), like=GRADS)["t"].nse == 2
    over_devices(jmask.tree.psum)
    over_devices(jmask.tree.pmean)
    assert jmask.tree.norm(GRADS) == 2
    new = jmask.apply_updates(PARAMS, GRADS)["t"]
    np.testing.assert_array_equal(new[:, 0], [1, 2, 1, 2, 1, 1])


# --- what is no error ------------------------------------------------------------------------


def test_a_table_that_is_not_used():
    """As in JAX a dense gradient of zeros; `RowSparse.zeros` for it leaves it alone."""
    params = {"used": TABLE, "other": TABLE}
    grads = jmask.grad(lambda p: looked_up(p["used"]))(params)
    assert isinstance(grads["other"], jax.Array)
    assert not grads["other"].any()
    tx = jmask.lazy(optax.adamw(0.1))
    moved, _ = jmask.apply_gradients(tx, grads, tx.init(params), params)
    assert (moved["other"] != TABLE).all()
    grads["other"] = jmask.RowSparse.zeros(TABLE.shape)
    kept, _ = jmask.apply_gradients(tx, grads, tx.init(params), params)
    np.testing.assert_array_equal(kept["other"], TABLE)


@pytest.mark.parametrize(
    ("shape", "ids"), [((6, 2), jnp.zeros((0,), int)), ((0, 3), jnp.array([0, -1]))]
)
def test_an_empty_batch_or_a_table_of_no_rows(shape, ids):
    """No row is touched by `embedding_lookup`; `table[ids]` is, to JAX, not used at all."""
    table, tx = jnp.ones(shape), jmask.lazy(optax.adamw(0.1))
    lookup = lambda t: jnp.sum(jmask.embedding_lookup(t, ids, mode="zero"))
    gradient = jmask.grad(lookup)(table)
    assert gradient.shape == shape
    assert ids.size or gradient.nse == 0
    after, _ = jmask.apply_gradients(tx, gradient, tx.init(table), table)
    np.testing.assert_array_equal(after, table)


def test_memory_that_is_the_devices_is_taken():
    """That of the host is refused: see wrong_calls/host.txt."""
    on = functools.partial(jax.sharding.SingleDeviceSharding, jax.devices()[0])
    jmask.embedding_lookup(jax.device_put(TABLE, on(memory_kind="device")), IDS)
    moved = lambda table: jax.device_put(table, jax.memory.Space.Device)
    lookup = jax.jit(lambda table: jmask.embedding_lookup(moved(table), IDS))
    assert lookup(jax.device_put(TABLE, on(memory_kind="pinned_host"))).shape == (3, 2)


@pytest.mark.parametrize("donated", [(0,), ()])
def test_donation_with_nnx(donated):
    """Without `donate_argnums`, `nnx.jit` keeps the old table beside the new one."""

    @functools.partial(nnx.jit, donate_argnums=donated)
    def train_step(model):
        graph, params, others = nnx.split(model, nnx.Param, ...)
        grads = jmask.grad(lambda p: nnx.merge(graph, p, others, copy=True)(IDS).sum())(params)
        tx = jmask.sgd(0.1)
        nnx.update(model, jmask.apply_gradients(tx, grads, tx.init(params), params)[0])

    model = models()["Model"](nnx.Rngs(0))
    old = model.embed.embedding.get_value()
    train_step(model)
    assert old.is_deleted() == bool(donated)
