"""A program as users write it: it type-checks against the installed jmask, and trains.

    mypy --strict user_code.py        `assert_type` says what a checker must see
    python user_code.py               the loss goes down, untouched rows stay as they were

`make lint` does the first, and `scripts/check_wheel.py` both, away from the repository.
"""

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]


def loss_fn(params: Params, batch: Batch) -> jax.Array:
    rows = assert_type(jmask.embedding_lookup(params["table"], batch["ids"]), jax.Array)
    bags = jmask.embedding_bag(params["table"], batch["ids"][:, None], combiner="mean")
    return jnp.mean(jnp.square((rows + bags) @ params["w"] - batch["y"]))


def step_of(
    tx: optax.GradientTransformation, params: Params, state: optax.OptState, batch: Batch
) -> tuple[Params, optax.OptState, jax.Array]:
    loss, grads = jmask.value_and_grad(loss_fn)(params, batch)
    assert_type(loss, jax.Array)
    updates, state = tx.update(grads, state, params)
    new: Any = jmask.apply_updates(params, updates)
    return new, state, loss


def train(tx: optax.GradientTransformationExtraArgs, batch: Batch) -> tuple[float, float]:
    """The loss before and after 20 steps."""
    params = {"table": jnp.ones((100, 4)), "w": jnp.ones(4)}
    state = tx.init(params)
    step = jax.jit(partial(step_of, tx), donate_argnums=(0, 1))
    losses = []
    for _ in range(20):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    assert bool(jnp.all(params["table"][50] == 1))
    return losses[0], losses[-1]


def optimizers() -> list[optax.GradientTransformationExtraArgs]:
    assert_type(jmask.lazy(optax.adam(0.1)), optax.GradientTransformationExtraArgs)
    assert_type(jmask.adam(0.1), optax.GradientTransformationExtraArgs)
    return [
        jmask.lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))),
        jmask.adam(
            optax.cosine_decay_schedule(0.1, 100), b1=np.float32(0.9), state_dtype=jnp.bfloat16
        ),
        jmask.rowwise_adagrad(0.1, eps=1e-8),
        jmask.sgd(0.05, momentum=0.5, nesterov=True),
    ]


def tensors() -> None:
    x = jmask.RowSparse([2, 0, 2], jnp.ones((3, 2)), (5, 2))
    assert_type(x, jmask.RowSparse)
    assert_type(x.coalesce(), jmask.RowSparse)
    assert_type(x.todense(), jax.Array)
    assert_type(x.shape, tuple[int, ...])
    assert_type(x.nse, int)
    assert_type(x.values, jax.Array)
    assert_type(x.indices, jax.Array)
    assert_type(jmask.RowSparse.zeros((5, 2)), jmask.RowSparse)
    assert_type(jmask.retain(x, [2]), jmask.RowSparse)

    y = jmask.masked_tensor(jnp.array([1.0, jnp.nan]), jnp.array([True, False]))
    assert_type(y, jmask.MaskedTensor)
    assert_type(y.to_tensor(0), jax.Array)
    assert_type(y.stype, str)
    assert_type(y.get_data(), jax.Array | jmask.RowSparse | BCOO | BCSR)
    assert_type(y.valid, jax.Array)
    total: jmask.MaskedTensor = jnm.sum(y * 2 + 1, axis=0)
    assert total.to_tensor(0) == 3
    assert_type(jnm.mean(y, axis=0), jmask.MaskedTensor)
    assert_type(jnm.mean(y.to_tensor(0)), jax.Array)
    assert_type(jnm.mean([1.0, 2.0], where=np.array([True, False])), jax.Array)

    with jmask.strict():
        both = jmask.tree.add({"x": x}, {"x": x})
    assert float(assert_type(jmask.tree.norm(both), jax.Array)) > 0
    assert_type(jmask.gradcheck(lambda x: jnp.sum(x**2), jnp.ones(2)), bool)


def numbers_of_numpy() -> None:
    """NumPy's arrays and lists where arrays are asked for."""
    x = jmask.masked_tensor(jnp.array([1.0, 2.0]), [True, False])
    where = np.array([True, True, False])
    assert jmask.retain(jmask.RowSparse([3], [2.0], (1000,)), [1, 3]).dtype.itemsize == 4
    assert jnm.mean(x.astype(np.float16), axis=0, dtype="float32").to_tensor(0) == 1
    assert jnm.sum(np.ones(3, np.float32), axis=(0,), where=where) == 2
    different, counts = jnm.unique(x, return_counts=True)
    assert jnm.unique(x).shape == different.shape == counts.shape
    table = jnp.ones((10, 4))
    assert jmask.embedding_lookup(table, np.array([1])).shape == (1, 4)
    bags = jmask.embedding_bag(table, np.array([1, 2]), offsets=[0, 1], weights=[1.0, 2.0])
    assert bags.shape == jmask.embedding_bag(table, jmask.pad_bags([1, 2], [0, 1])).shape


def gradients_with_more() -> None:
    def loss(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = table[jnp.array([1])]
        return jnp.sum(rows), rows

    table = jnp.ones((10, 4))
    assert_type(jmask.grad(lambda table: loss(table)[0])(table), Any)
    gradient, rows = assert_type(jmask.grad(loss, has_aux=True)(table), tuple[Any, Any])
    (value, _), same = jmask.value_and_grad(loss, has_aux=True)(table)
    assert assert_type(value, jax.Array) == jnp.sum(rows)
    assert gradient.shape == same.shape == (10, 4)
    if TYPE_CHECKING:  # a gradient has the arguments of its function
        jmask.grad(loss, has_aux=True)("a name")  # type: ignore[arg-type]


def narrowed(gradient: jax.Array | jmask.RowSparse | jmask.MaskedTensor) -> jax.Array:
    """A checker learns what a gradient is, and what it is not."""
    if isinstance(gradient, jmask.MaskedTensor):
        return gradient.to_tensor(0)
    if isinstance(gradient, jmask.RowSparse):
        return assert_type(gradient.coalesce().todense(), jax.Array)
    return assert_type(gradient, jax.Array)


def tables_and_deferred_rows() -> None:
    mesh = jax.make_mesh((1,), ("x",))
    table = assert_type(jmask.sharded(jnp.ones((10, 4)), mesh), jax.Array)
    assert_type(jmask.packed(jnp.ones((10, 4))), jax.Array)
    ids = np.array([1, 2])
    assert_type(jmask.embedding_bag(table, ids[None], combiner="sum"), jax.Array)
    assert_type(jmask.pad_bags([[1, 2], [3]]).ids, jax.Array | np.ndarray)
    assert jmask.pad_bags({"a": [[1, 2]]}, at_least=4)["a"].ids.shape == (4,)
    tx = jmask.deferred(optax.adam(0.1))
    params = {"table": jnp.ones((10, 4))}
    params, state = tx.catch_up(params, tx.init(params), {"table": ids})
    gradient = {"table": jmask.RowSparse(ids, jnp.ones((2, 4)), (10, 4))}
    new = jmask.apply_gradients(tx, gradient, state, params)
    assert narrowed(gradient["table"]).shape == new[0]["table"].shape


def wrong_calls(table: jax.Array, x: jmask.MaskedTensor) -> None:
    """Each of these is an error to a checker: an ignored one that is none is reported."""
    jmask.embedding_lookup(table, "ids")  # type: ignore[arg-type]
    jmask.embedding_lookup({"table": table}, np.array([1]))  # type: ignore[arg-type]
    jmask.embedding_bag(table, np.array([1]), weights="ones")  # type: ignore[arg-type]
    jmask.masked_tensor(table, "mask")  # type: ignore[arg-type]
    jmask.masked_tensor(x)  # type: ignore[arg-type]
    jmask.RowSparse([0], {"values": table}, (5, 2))  # type: ignore[arg-type]
    jmask.retain(table, [1])  # type: ignore[arg-type]
    jmask.sharded("table", None)  # type: ignore[arg-type]
    jmask.packed({"table": table})  # type: ignore[arg-type]
    jmask.dot(table, "y")  # type: ignore[arg-type]
    jmask.adam("fast")  # type: ignore[arg-type]
    jmask.RowSparse.fromdense(x)  # type: ignore[arg-type]
    _ = x.get_data().values  # type: ignore[union-attr]
    x.coalesce()  # type: ignore[attr-defined]
    jnm.masked_where(None, table)  # type: ignore[arg-type]


if __name__ == "__main__":
    warnings.simplefilter("error")
    tensors()
    numbers_of_numpy()
    gradients_with_more()
    tables_and_deferred_rows()
    batch = {"ids": jnp.array([3, 1, 3]), "y": jnp.zeros(3)}
    for tx in optimizers():
        first, last = train(tx, batch)
        assert last < first, (first, last)
    print(f"jmask {jmask.__version__} from {jmask.__file__} trains")
