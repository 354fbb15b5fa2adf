"""Tools around a step that meet tables and states: each works, or says what to do."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.later import later
from tests.optimizers import NAMED
from tests.stored_tables import stored, update_and_apply
from tests.tables.test_checkpoints import restored

pytestmark = [pytest.mark.sampled(15), pytest.mark.dtype_promotion]

export = later("jax.export")
train_state = later("flax.training.train_state")
nnx = later("flax.nnx")


V, D = 13, 3
TX = jmask.adam(0.1)
START = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
IDS = jnp.array([1, 1, 7])
TABLES = ("array", "packed", "div 4", "mod 4", "deferred array", "deferred mod 4")


def loss(params: Any, ids: Any = IDS) -> Any:
    return jnp.sum(jnp.sin(params["t"][ids])) + jnp.sum(params["w"])


def parameters(table: str) -> Any:
    x = stored(table.removeprefix("deferred "), START)
    x = jmask.deferred(x, TX) if table.startswith("deferred") else x
    return {"t": x, "w": jnp.ones(2)}


def stepped(tx: Any, params: Any) -> Any:
    grads = jmask.grad(loss)(params)
    return jmask.apply_gradients(tx, grads, tx.init(params), params)


def table_of(params: Any) -> np.ndarray:
    return np.asarray(params["t"])


# --- Python's own protocols, which by default read an object row after row, for ever ---------


@pytest.mark.parametrize("name", TABLES[2:])
def test_a_table_is_no_sequence_of_rows(name: str) -> None:
    table = parameters(name)["t"]
    assert "a name" not in table
    assert float(START[2, 1]) in table
    assert 12.0 not in table
    for read in (list, sorted, enumerate):
        with pytest.raises(TypeError, match=r"table.todense\(\)"):
            read(table)


# --- optax and what is built on it ------------------------------------------------------------


def by_optax(params: Any, grads: Any) -> Any:
    updates, _ = TX.update(grads, TX.init(params), params)
    return optax.apply_updates(params, updates)


def by_flax(params: Any, grads: Any) -> Any:
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=TX)
    return state.apply_gradients(grads=grads).params


def by_nnx(params: Any, grads: Any) -> Any:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.t, self.w = nnx.Param(params["t"]), nnx.Param(params["w"])

    model = Model()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    optimizer.update(model, nnx.State({name: nnx.Param(x) for name, x in grads.items()}))
    return {"t": model.t[...], "w": model.w[...]}


@pytest.mark.parametrize("tool", [by_optax, by_flax, by_nnx])
@pytest.mark.parametrize("table", TABLES)
def test_updates_by_optax(table: str, tool: Callable[..., Any]) -> None:
    params = parameters(table)
    grads = jmask.grad(loss)(params)
    if table == "array":
        np.testing.assert_array_equal(
            table_of(tool(params, grads)), table_of(stepped(TX, params)[0])
        )
        return
    with pytest.raises(TypeError) as error:
        tool(params, grads)
    first = str(error.value).splitlines()[0]
    assert "jmask.apply_gradients(tx, grads, opt_state, params)" in first
    assert type(params["t"]).__name__ in first


LABELS = {"t": "rows", "w": "dense"}


def labels(params: Any) -> Any:
    """As one writes it: of each leaf, by its path."""
    return jax.tree.map_with_path(lambda path, _: LABELS[path[0].key], params)


def mask(params: Any) -> Any:
    return jax.tree.map(lambda label: label == "rows", labels(params))


def partition(rows: Any, by: Any) -> Any:
    return optax.partition({"rows": rows, "dense": optax.sgd(0.1)}, by)


LABELLED: dict[str, Callable[[Any], Any]] = {
    "partition": lambda by: partition(TX, by),
    "masked": lambda by: optax.masked(TX, by),
}


@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize("table", TABLES[:5])
def test_trees_and_functions_of_labels(table: str, name: str) -> None:
    params, function = parameters(table), mask if name == "masked" else labels
    wanted = table_of(stepped(TX, parameters("array"))[0])
    new, _ = stepped(LABELLED[name](function({"t": 0, "w": 0})), params)
    np.testing.assert_allclose(table_of(new), wanted, rtol=1e-6)
    with pytest.raises(
        TypeError, match=r"`tx` holds .* function of labels.*make the tree once"
    ):
        stepped(LABELLED[name](function), params)
    if table == "array":
        tx = LABELLED[name](function)
        with pytest.raises(ValueError, match=r"function of labels.*make the tree once"):
            tx.update(jmask.grad(loss)(params), tx.init(params), params)


@pytest.mark.parametrize("by", [LABELS, labels], ids=["tree", "function"])
@pytest.mark.parametrize("table", TABLES[:3])
def test_labels_inside_lazy(table: str, by: Any) -> None:
    wanted = table_of(stepped(jmask.lazy(optax.adam(0.1)), parameters("array"))[0])
    new, _ = stepped(jmask.lazy(partition(optax.adam(0.1), by)), parameters(table))
    np.testing.assert_allclose(table_of(new), wanted, rtol=1e-6)


@pytest.mark.parametrize("by", [LABELS, labels], ids=["tree", "function"])
def test_deferred_tables_want_lazy_inside(by: Any) -> None:
    tx = jmask.lazy(partition(optax.adam(0.1), by))
    params = {"t": jmask.deferred(START, jmask.lazy(optax.adam(0.1))), "w": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"put jmask\.lazy inside them"):
        stepped(tx, params)


# --- files ---------------------------------------------------------------------------------

EVERY = NAMED | {
    "every other step": jmask.multi_steps(
        jmask.adam(0.1), 2, like={"t": jmask.RowSparse.zeros((V, D), nse=3), "w": jnp.ones(2)}
    )
}


def exported_and_back(function: Any, *args: Any) -> Any:
    pytest.importorskip("flatbuffers")
    exported = export.export(jax.jit(function))(*args)
    return export.deserialize(exported.serialize()).call(*args)


def assert_exported(tx: Any, params: Any) -> None:
    def step(params: Any, state: Any, ids: Any) -> Any:
        grads = jmask.grad(loss)(params, ids)
        return jmask.apply_gradients(tx, grads, state, params)

    args = (params, tx.init(params), IDS)
    ours, wanted = exported_and_back(step, *args), jax.jit(step)(*args)
    assert jax.tree.structure(ours) == jax.tree.structure(wanted)
    np.testing.assert_allclose(table_of(ours[0]), table_of(wanted[0]), rtol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name in EVERY if name not in ("adamw", "adam within norms")]
)
def test_exported_steps(name: str) -> None:
    """Not of states of optax's types, which those register who export them."""
    assert_exported(EVERY[name], parameters("array"))


@pytest.mark.parametrize("table", TABLES)
def test_exported_steps_of_tables(table: str) -> None:
    if table == "deferred mod 4" and jax.__version_info__ < (0, 12):
        pytest.xfail("JAX 0.10 gives words of a sharded array of keys the sharding of the keys")
    assert_exported(TX, parameters(table))


def test_exported_tensors() -> None:
    x = jmask.masked_tensor(jnp.ones(2), jnp.array([True, False]))
    again = exported_and_back(lambda x: x, x)
    np.testing.assert_array_equal(again.to_tensor(0), x.to_tensor(0))
    rows = jmask.RowSparse([1], jnp.ones((1, 2)), (3, 2))
    with pytest.raises(TypeError, match=r"row-sparse tensor.*jmask\.to_arrays"):
        exported_and_back(lambda x: x.todense(), rows)
    masked = jmask.masked_tensor(rows.coalesce())
    with pytest.raises(TypeError, match=r"row-sparse tensor.*jmask\.to_arrays"):
        exported_and_back(lambda x: x.to_tensor(0), masked)
    found = exported_and_back(
        lambda arrays: jmask.from_arrays(arrays, like=rows).todense(), jmask.to_arrays(rows)
    )
    np.testing.assert_array_equal(found, rows.todense())


@pytest.mark.parametrize("name", EVERY)
def test_orbax_of_states(name: str, tmp_path: Any) -> None:
    tx, params = EVERY[name], parameters("array")
    tree = stepped(tx, params)
    again = restored(tree, tmp_path, (params, tx.init(params)))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, again, tree)


# --- profiles ------------------------------------------------------------------------------


def test_profiles_name_the_update() -> None:
    tx, params = jmask.lazy(optax.adam(0.1)), parameters("array")
    for step, names in (
        (jmask.apply_gradients, {"jmask.apply_gradients"}),
        (update_and_apply, {"jmask.lazy.update", "jmask.apply_updates"}),
    ):
        run = jax.jit(functools.partial(step, tx))
        args = jmask.grad(loss)(params), tx.init(params), params
        text = run.lower(*args).compile().as_text()
        assert all(name in text for name in names)


# --- arithmetic over the leaves of a table, by JAX and by optax: right, or refused ----


def behind(table: Any) -> Any:
    """A deferred table after two steps, in which rows are behind."""
    table = jmask.deferred(table, TX)
    state = TX.init(table)
    for ids in ([1, 2], [2, 12]):
        grads = jmask.grad(lambda t, ids=ids: jnp.sum(jnp.sin(t[jnp.array(ids)])))(table)
        table, state = jmask.apply_gradients(TX, grads, state, table)
    return table


KEPT = ("packed", "div 4", "mod 4", "mod 4 packed", "mod 4 explicit")
KEPT += ("deferred array", "deferred div 4")


def table_behind(name: str) -> Any:
    table = stored(name.removeprefix("deferred "), START)
    return behind(table) if name.startswith("deferred") else table


def of_floating(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What maps over floating leaves alone, as `eqx.filter` does."""
    return lambda t: jax.tree.map(
        lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, t
    )


# The table that comes of it, and what it is of the array.
MAPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "twice": (lambda t: jax.tree.map(lambda x: x * 2, t), lambda x: x * 2),
    "zeros_like": (lambda t: jax.tree.map(jnp.zeros_like, t), jnp.zeros_like),
    "add": (lambda t: jax.tree.map(jnp.add, t, t), lambda x: x + x),
    "negative": (lambda t: jax.tree.map(jnp.negative, t), jnp.negative),
    "half of floating": (of_floating(lambda x: x / 2), lambda x: x / 2),
    "zeros of floating": (of_floating(jnp.zeros_like), jnp.zeros_like),
    "incremental_update": (lambda t: optax.incremental_update(t, t, 0.1), lambda x: x),
    "optax.tree.add": (lambda t: optax.tree.add(t, t), lambda x: x + x),
    "optax.tree.scale": (lambda t: optax.tree.scale(2.0, t), lambda x: x * 2),
    "optax.tree.zeros_like": (optax.tree.zeros_like, jnp.zeros_like),
    "jmask.tree.add": (lambda t: jmask.tree.add(t, t), lambda x: x + x),
    "jmask.tree.scale": (lambda t: jmask.tree.scale(2.0, t), lambda x: x * 2),
    "jmask.tree.mean": (lambda t: jmask.tree.mean([t, t]), lambda x: x),
    "copy": (lambda t: jax.tree.map(jnp.copy, t), lambda x: x),
    "copy.copy": (copy.copy, lambda x: x),
    "copy.deepcopy": (copy.deepcopy, lambda x: x),
}
NUMBERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "jmask.tree.norm": (jmask.tree.norm, jnp.linalg.norm),
    "optax.global_norm": (optax.global_norm, jnp.linalg.norm),
    "optax.tree.norm": (optax.tree.norm, jnp.linalg.norm),
    "squares": (
        lambda t: sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(t)),
        lambda x: jnp.sum(x * x),
    ),
    "optax.tree.sum": (optax.tree.sum, jnp.sum),
    "jmask.tree.size": (jmask.tree.size, jnp.size),
    "size": (lambda t: t.size, jnp.size),
}
UNCHANGED = {"copy", "copy.copy", "copy.deepcopy", "jmask.tree.norm", "jmask.tree.size", "size"}


# It is what people have in their programs, whatever newer versions of optax say of the name.
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
@pytest.mark.sampled
@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("case", [*MAPS, *NUMBERS])
@pytest.mark.parametrize("table", KEPT)
def test_right_or_refused(table: str, case: str, is_jitted: bool) -> None:
    function, wanted = (MAPS | NUMBERS)[case]
    x = table_behind(table)
    is_map = case in MAPS

    def result(t: Any) -> Any:
        return function(t).todense() if is_map else function(t)

    try:
        found = np.asarray((jax.jit(result) if is_jitted else result)(x))
    except (TypeError, ValueError) as error:
        # An extended dtype is refused by JAX and NumPy, which do not know the way out.
        if not table.startswith("deferred") or case in UNCHANGED:
            raise
        if "DeferredTable" not in str(error) and "key<fry>" not in str(error):
            raise
        return
    expected = np.asarray(wanted(x.todense()))
    if is_jitted and table.startswith("deferred") and np.isnan(found).all():
        assert "floating" in case or "zeros" in case
        return  # nothing else can be said inside jit
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# --- in the loss ---------------------------------------------------------------------------

PENALTIES: dict[str, Callable[[Any], Any]] = {
    "jmask.tree.norm": lambda p: jmask.tree.norm(p, squared=True),
    "todense": lambda p: jnp.sum(jnp.square(p["t"].todense())) + jnp.sum(p["w"] ** 2),
}
OF_LEAVES: dict[str, Callable[[Any], Any]] = {
    "optax.tree.norm": lambda p: optax.tree.norm(p, squared=True),
    "leaves": lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("penalty", [*PENALTIES, *OF_LEAVES])
@pytest.mark.parametrize("table", KEPT)
@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
def test_penalty_over_all_parameters(table: str, penalty: str, is_jitted: bool) -> None:
    ids = jnp.array([1, 1, 12])
    params = {"t": table_behind(table), "w": jnp.ones(2)}

    def loss(p: Any) -> Any:
        return jnp.sum(jnp.sin(p["t"][ids])) + (PENALTIES | OF_LEAVES)[penalty](p)

    gradient = jmask.value_and_grad(loss)
    gradient = jax.jit(gradient) if is_jitted else gradient
    if penalty in OF_LEAVES:
        with pytest.raises(TypeError, match=r"leaves of `p\['t'\]`, a \w+Table.*todense\(\)"):
            gradient(params)
        return
    value, grads = gradient(params)
    arrays = {"t": params["t"].todense(), "w": params["w"]}
    dense = lambda p: jnp.sum(jnp.sin(p["t"][ids])) + sum(jnp.sum(x**2) for x in p.values())
    expected, dense_grads = jax.value_and_grad(dense)(jax.tree.map(np.asarray, arrays))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grads["t"].todense(), dense_grads["t"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads["w"], dense_grads["w"], rtol=1e-5)


@pytest.mark.parametrize("placement", ["div", "mod"])
def test_gradients_on_explicit_axes_outside_jit(placement: str) -> None:
    """Which `jax.make_mesh` gives, and without a mesh that is set."""
    table = jmask.sharded(START, jax.make_mesh((4,), ("x",)), placement=placement)
    ids = jnp.array([1, 1, 12])
    for loss in (lambda t: jnp.sum(t[ids]), lambda t: jnp.sum(jnp.sin(t[ids]))):
        value, gradient = jmask.value_and_grad(loss)(table)
        expected, dense = jax.value_and_grad(loss)(START)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient.todense(), dense, rtol=1e-6)
        new, _ = jmask.apply_gradients(TX, gradient, TX.init(table), table)
        array, _ = jmask.apply_gradients(TX, jmask.grad(loss)(START), TX.init(START), START)
        np.testing.assert_allclose(new, array, rtol=1e-5)
    assert jax.sharding.get_abstract_mesh().empty
