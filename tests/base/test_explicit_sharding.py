"""Where axes of a mesh are explicit, as those of `jax.make_mesh` are, all works as elsewhere.

Tables of every kind, ids of every placement, each against the same program on one device:
lookups lie where their ids do, gradients are row-sparse. Steps: test_random_placements.py.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify, sparse
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from jmask._kernels import tuning
from tests.expressions import functions
from tests.oracle import is_row_sparse
from tests.sampling import chosen

pytestmark = pytest.mark.sampled(15)

V, D = 64, 8
TABLE = np.random.default_rng(0).normal(size=(V, D)).astype(np.float32)


@functools.cache
def mesh_with():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))


put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh_with(), P(*axes)))
TABLES = {
    "an array of no mesh": lambda: jnp.asarray(TABLE),
    "an array on every device": lambda: put(TABLE),
    "an array spread by rows": lambda: put(TABLE, "x"),
    "an array spread by columns": lambda: put(TABLE, None, "x"),
}

# The shape of ids, and the axes over which they are spread; None for an array of no mesh.
IDS = {
    "spread": ((16,), ("x",)),
    "lines spread": ((8, 3), ("x", None)),
    "columns spread": ((3, 8), (None, "x")),
    "on every device": ((7,), ()),
    "of no mesh": ((5, 3), None),
}
lookup = functools.partial(jmask.embedding_lookup, padding_id=3)


def ids_of(name):
    shape, axes = IDS[name]
    ids = np.random.default_rng(1).integers(0, V, shape)
    return jnp.asarray(ids) if axes is None else put(ids, *axes)


def bag(combiner):
    def bags(table, ids):
        segments = ids.reshape(-1) % 5 if ids.ndim == 1 else None
        number = None if segments is None else 5
        return jmask.embedding_bag(
            table, ids, segment_ids=segments, num_segments=number, combiner=combiner
        )

    return bags


def by_hand(table, ids):
    """What JAX asks of a lookup by indexing, where ids or rows are sharded."""
    spec, rows = (jax.typeof(x).sharding.spec for x in (ids, table))
    where = NamedSharding(mesh_with(), P(*spec, None)) if any((*spec, *rows)) else None
    return table.at[ids].get(out_sharding=where)


READS = {
    "lookup": lookup,
    "bounded": lambda t, ids: jmask.embedding_lookup(t, ids, max_norm=1.5),
    "sum": bag("sum"),
    "mean": bag("mean"),
    "max": bag("max"),
    "twice": lambda t, ids: lookup(t, ids) + lookup(t, (ids + 1) % V),
    "beside a few": lambda t, ids: lookup(t, ids) * jnp.sum(lookup(t, [1, 2, 2])),
    "recomputed": jax.checkpoint(lookup),
    "by hand": by_hand,
    # What is made of a table is not made: its rows are read where they are.
    "exponentials": lambda t, ids: lookup(jnp.exp(t), ids),
    "bags of products": lambda t, ids: bag("sum")(t * np.arange(1.0, D + 1)[None], ids),
    "unit rows": lambda t, ids: lookup(t / jnp.sum(t * t, 1, keepdims=True), ids),
    "one after the other": lambda t, ids: lookup(jnp.concatenate([t, 2 * t]), 2 * ids),
    "a stack": lambda t, ids: lookup(jnp.stack([t, jnp.sin(t)])[1], ids),
    "products by hand": lambda t, ids: by_hand(t * np.arange(1.0, D + 1)[None], ids),
    "a layer by hand": lambda t, ids: by_hand(
        jax.lax.dynamic_index_in_dim(jnp.stack([t, t * t]), ids.max() // V, keepdims=False), ids
    ),
}


def is_meant(table, ids, read, in_context):
    """Not what JAX refuses to place: the maximum of rows that are spread themselves, and their
    gradient outside of the mesh. Nor, outside of the mesh, ids that only JAX's own lookup in a
    table of no mesh brings to one: its gradient has ids on axes that are automatic."""
    if (table, ids) == ("an array of no mesh", "columns spread") and "by hand" in read:
        return in_context
    return table != "an array spread by columns" or (read != "max" and in_context)


ALL = [
    (t, i, r, c)
    for t in TABLES
    for i in IDS
    for r in READS
    for c in (False, True)
    if is_meant(t, i, r, c)
]
LISTED = [(t, i, r, bool(n % 2)) for n, (t, i, r) in enumerate(
    [(t, "spread", "lookup") for t in TABLES]
    + [("an array spread by rows", i, "lookup") for i in IDS]
    + [("an array spread by rows", "spread", r) for r in READS]
    + [("an array on every device", "spread", r) for r in READS]
)]  # fmt: skip


@pytest.mark.parametrize(("table", "ids", "read", "in_context"), chosen(LISTED, ALL))
def test_gradient(table, ids, read, in_context, monkeypatch):
    """The value, the gradient, which is row-sparse, and where the rows are."""
    if table == "an array spread by columns" and IDS[ids][1] not in (None, ()):
        ids = "on every device"  # an axis of the mesh can spread but one dimension
    table, ids, read = TABLES[table](), ids_of(ids), READS[read]
    loss = lambda t, ids: jnp.sum(jnp.sin(read(t, ids)))
    expected, dense = jax.value_and_grad(loss)(jnp.asarray(TABLE), np.asarray(ids))
    for few in (0, tuning.SMALL_ROWS):  # all rows wait for their sum, or none
        monkeypatch.setattr(tuning, "SMALL_ROWS", few)
        with context(in_context), jmask.strict():
            value, gradient = jax.jit(jmask.value_and_grad(loss))(table, ids)
        assert is_row_sparse(gradient)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient.todense(), dense, rtol=1e-4, atol=1e-6)
    with context(in_context), jmask.strict():
        rows = jax.jit(lookup)(table, ids)
    if isinstance(ids.sharding, NamedSharding):
        assert tuple(rows.sharding.spec)[: ids.ndim] == tuple(jax.typeof(ids).sharding.spec)


@pytest.mark.parametrize("table", TABLES)
def test_a_gradient_of_no_mesh(table):
    """Made by hand, and applied outside of jit and of the mesh."""
    tx = optax.chain(jmask.clip_by_row_norm(1.0), jmask.adam(0.1))
    gradient, table = jmask.RowSparse([1, 9, 1], jnp.ones((3, D)), (V, D)), TABLES[table]()
    step = lambda t: jmask.apply_gradients(tx, gradient, tx.init(t), t)[0]
    new = step(table)
    assert new.sharding.is_equivalent_to(table.sharding, 2)
    np.testing.assert_allclose(new, step(jnp.asarray(TABLE)), rtol=1e-6)


@pytest.mark.parametrize("read", ["lookup", "sum", "max"])  # `t[ids]` is zeros to JAX
@pytest.mark.parametrize("shape", [(0, 3), (8, 0)])
@pytest.mark.parametrize("table", TABLES)
def test_a_batch_without_ids(table, shape, read):
    """JAX has no sharding for what is reshaped to no entry."""
    table, ids, read = TABLES[table](), put(np.zeros(shape, int), "x", None), READS[read]
    tx = jmask.sgd(0.1)

    def step(table, ids):
        gradient = jmask.grad(lambda t: jnp.sum(read(t, ids) ** 2))(table)
        return *jmask.apply_gradients(tx, gradient, tx.init(table), table), gradient

    with context(True):
        for run in (step, jax.jit(step)):
            new, _, gradient = run(table, ids)
            assert is_row_sparse(gradient)
            np.testing.assert_array_equal(new, TABLE)


def test_ids_out_of_range():
    """JAX's own lookup in a table that is spread by columns needs no word of its place."""
    table, ids = TABLES["an array spread by columns"](), np.array([1, V + 3, V, 5, -V - 1])
    weight = np.arange(1.0, 6.0, dtype=np.float32)[:, None]
    for mode in ("clip", "fill"):
        loss = lambda t, mode=mode: jnp.sum(
            jnp.nan_to_num(jnp.take(t, ids, axis=0, mode=mode)) * weight
        )
        with jmask.strict():
            gradient = jax.jit(jmask.grad(loss))(table)
        assert is_row_sparse(gradient)
        np.testing.assert_array_equal(gradient.todense(), jax.grad(loss)(jnp.asarray(TABLE)))


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("table", TABLES)
def test_rows_that_are_shortened_or_refused(table, ids):
    """For the first ids are sorted, for which they must be on every device."""
    table, ids = TABLES[table](), ids_of(ids)
    with context(True):
        shorter = jax.jit(lambda t, i: jmask.renormalize(t, i, 1.0))(table, ids)
    expected = jmask.renormalize(jnp.asarray(TABLE), np.asarray(ids), 1.0)
    np.testing.assert_allclose(shorter, expected, rtol=1e-6)
    if jax.__version_info__ < (0, 12):
        return  # there `checkify` loses that axes are explicit
    refusing = jax.jit(
        checkify.checkify(lambda t, i: jmask.embedding_lookup(t, i, mode="raise"))
    )
    last = np.asarray(ids)[(-1,) * ids.ndim]
    with context(True):
        error, rows = refusing(table, ids)
        wrong, _ = refusing(table, jnp.where(ids == last, V, ids))
    error.throw()
    np.testing.assert_array_equal(rows, TABLE[np.asarray(ids)])
    at = ", ".join(map(str, np.argwhere(np.asarray(ids) == last)[0]))
    with pytest.raises(checkify.JaxRuntimeError, match=rf"ids\[{at}\]` is {V}"):
        wrong.throw()


context = lambda is_entered: (
    jax.set_mesh(mesh_with()) if is_entered else contextlib.nullcontext()
)


OF_GRADIENTS = functions("g", globals())("""
    jmask.tree.norm(g); jmask.tree.add(g, g); jmask.tree.scale(2.0, g); g + g; g * 2; -g;
    abs(g);
    jmask.tree.merge(jax.tree.map(lambda x: jnp.stack([x, x]), g)); TABLE + g; g.coalesce();
    jmask.numpy.sum(g); jmask.numpy.sum(g, axis=0); jmask.numpy.sum(g, axis=1); g[[1, 5]];
    jmask.numpy.where(g > 0, g, 0); g.retain(jnp.array([1, 2])); jmask.square_sum(g);
    jmask.dot(g, TABLE.T); jmask.masked_tensor(g.coalesce()); g * TABLE[0];
    jmask.from_arrays(jmask.to_arrays(g), like=g);
    jax.lax.scan(lambda c, _: (c, None), g, None, 2)[0]
""")


@pytest.mark.parametrize("name", OF_GRADIENTS)
@pytest.mark.dtype_promotion
def test_functions_of_gradients(name):
    """Outside of jit and in it, in the context of the mesh, as one takes norms of gradients."""
    loss = lambda t, ids: jnp.sum(jnp.sin(jmask.embedding_lookup(t, ids)))
    dense = lambda x: x.to_tensor(0) if hasattr(x, "to_tensor") else jmask.todense(x)
    result = lambda t, ids: dense(OF_GRADIENTS[name](jmask.grad(loss)(t, ids)))
    expected = result(jnp.asarray(TABLE), np.asarray(ids_of("spread")))
    for table in TABLES:
        if table != "an array of no mesh":
            ids = ids_of("spread")
            ids = put(ids) if table.endswith("columns") else ids
            with context(True):
                for run in (result, jax.jit(result)):
                    found = np.asarray(run(TABLES[table](), ids))
                    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# Along a dimension that is not sharded, as functions of JAX.
MASKED = {
    name: functools.partial(getattr(module, name), axis=1)
    for module, names in (
        (jmask.numpy, "sum var max argmin any sort argsort median cumsum ptp average diff"),
        (jmask.nn, "softmax logsumexp normalize"),
    )
    for name in names.split()
}
MASKED["quantile"] = lambda x: jmask.numpy.quantile(x, 0.3, axis=1)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.dtype_promotion
def test_masked_functions(name):
    x, mask = put(TABLE, "x"), put(TABLE > 0, "x")
    function = lambda x, mask: MASKED[name](jmask.masked_tensor(x, mask))
    expected = function(jnp.asarray(TABLE), jnp.asarray(TABLE > 0))
    with context(True):
        for run in (function, jax.jit(function)):
            new = run(x, mask)
            np.testing.assert_array_equal(new.mask, expected.mask)
            np.testing.assert_allclose(new.to_tensor(0), expected.to_tensor(0), rtol=1e-5)


ENTRIES = np.where(np.random.default_rng(1).random((6, V)) < 0.1, 2.0, 0.0).astype(np.float32)
OPERANDS = {
    "BCSR": sparse.BCSR.fromdense,
    "BCOO": sparse.BCOO.fromdense,
    "RowSparse": jmask.RowSparse.fromdense,
}


@pytest.mark.parametrize("axes", [(), ("x",), (None, "x")], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("operand", OPERANDS)
def test_products(operand, transposed, axes):
    x, w = OPERANDS[operand](ENTRIES.T if transposed else ENTRIES), put(TABLE, *axes)
    product = lambda w: jmask.todense(jmask.dot(x, w, transpose_a=transposed))
    for run in (product, jax.jit(product)):
        np.testing.assert_allclose(run(w), ENTRIES @ TABLE, rtol=1e-5, atol=1e-5)
    loss = lambda w: jnp.sum(product(w) ** 2)
    for run in (jmask.grad(loss), jax.jit(jmask.grad(loss))):
        gradient = jmask.todense(run(w))
        np.testing.assert_allclose(
            gradient, 2 * ENTRIES.T @ ENTRIES @ TABLE, rtol=1e-5, atol=1e-5
        )


@pytest.mark.of_cpus
@pytest.mark.parametrize("axes", [(), (None, "x")])
def test_a_linear_loss_copies_no_table(axes):
    """Read from the compiled step: the loss reads the table before it is written."""
    rows = 100_000

    def typed(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh_with(), P(*axes)))

    tx = jmask.sgd(0.1)

    def step(table, state, ids):
        loss = lambda table: table.at[ids].get(out_sharding=P(None, *axes[1:])).sum()
        value, grads = jmask.value_and_grad(loss)(table)
        return *jmask.apply_gradients(tx, grads, state, table), value

    table, ids = typed((rows, 64), jnp.float32, *axes), typed((512,), jnp.int32)
    with jax.set_mesh(mesh_with()):
        lowered = jax.jit(step, donate_argnums=0).lower(table, tx.init(jnp.ones((1, 1))), ids)
        memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * 4  # a number of each row


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="this JAX has no `reduced` in a PartitionSpec"
)
def test_a_reduced_table_has_the_gradient_of_jax():
    """Each device holds a summand of it, which is no row of a table: dense, and said."""
    with jax.set_mesh(mesh_with()):
        reduced = P(None, None, reduced={"x"})
        table = jax.device_put(np.tile(TABLE, (200, 8)), NamedSharding(mesh_with(), reduced))
        ids = put(np.arange(16) % 5, "x")
        loss = lambda table: jnp.sum(table.at[ids].get(out_sharding=P("x")) ** 2)
        with pytest.warns(jmask.StorageFallbackWarning, match="looked up"):
            found = jax.jit(jmask.grad(loss))(table)
        expected = jax.jit(jax.grad(loss))(table)
        assert jax.typeof(found) == jax.typeof(expected)
        found, expected = (jax.sharding.reshard(x, P()) for x in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
