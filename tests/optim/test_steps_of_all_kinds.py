"""Every optimizer, and what wraps one, on every kind of table and in every program.

Beside NumPy in float64 what wraps an optimizer: SGD with momentum, m <- mu m + g and
p <- p - rate m, where g is not zero by nature: in the rows, or the entries, that were looked
up. The model is written out in `Model`. Every optimizer beside itself on rows of an array,
whose formulas `test_named_optimizers.py` has.
"""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask._optim.named import MomentumState
from tests.expressions import functions
from tests.optimizers import NOT_LAZY, OPTIMIZERS
from tests.oracle import assert_close
from tests.stored_tables import STEPS, bits, stepped
from tests.table_kinds import KINDS, MASKED, OF_ENTRIES, SHARDED, drawn, in_rows, kept, paired

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

HOW = ("eager", "jit", "one program", "scan", "vmap")
BY_ROWS = "row by row, and the table is packed"


# Pairs that once failed, or whose mechanisms meet in few other pairs.
FIXED = (
    ("optax.chain(clip_by_row_norm(NORM), sgd)", "entries"),
    ("multi_steps(sgd, 2, like)", "8 devices"),
    ("skip_nonfinite(multi_steps(sgd, 2, like))", "rows over table, batch over both"),
    ("lazy(optax.chain(decay, sgd))", "entries of a stack"),
    ("optax.chain(lazy(decay), sgd)", "packed"),
    ("optax.chain(lazy(decay), sgd)", "packed complex"),
    ("adamw", "stack"),
    ("ftrl", "packed complex"),
)


def cases(names, each):
    """All pairs of a name and a kind; `each` of a name in all runs, and so all kinds."""
    for number, name in enumerate(names):
        for kind in KINDS:
            is_first = (KINDS.index(kind) - each * number) % len(KINDS) < each
            marks = [pytest.mark.each] if is_first or (name, kind) in FIXED else []
            yield pytest.param(name, kind, marks=marks, id=f"{name}, {kind}")


def table_of(rows):
    """A table (rows, 12) whose last row, which no gradient has, is not all finite."""
    x = np.random.default_rng(0).normal(size=(rows, 12)).astype(np.float32)
    x[-1, :2] = -0.0, np.nan
    return x


def context(name, kind):
    """How to step, and how many rows; drawn at random, the same always."""
    draw = random.Random(f"{name}, {kind}")
    # Eager operations on compressed rows take seconds; sparse arrays of JAX have no new axes.
    how = {"masked csr": ["jit"], **dict.fromkeys(SHARDED, HOW[1:3])}.get(kind, HOW)
    how = draw.choice(how[:-1] if "coo" in kind else how)
    return how, draw.choice(sorted(STEPS)), draw.choice([24, 600])


def run(tx, how, step, params, grads):
    """Parameters and state after a step with each of the gradients."""
    take = functools.partial(STEPS[step], tx)
    if how in ("eager", "jit"):
        return stepped(tx, params, grads, step, jax.jit if how == "jit" else lambda f: f)

    @jax.jit
    def scanned(params, grads):
        body = lambda carry, g: (take(g, *carry[::-1]), None)
        return jax.lax.scan(body, (params, tx.init(params)), grads)[0]

    # The state is an argument: XLA folds powers of a constant count with other roundings, and
    # 1 - 0.999**3 has few digits.
    @jax.jit
    def one_program(params, state, grads):
        for g in grads:
            params, state = take(g, state, params)
        return params, state

    if how == "one program":
        # Older JAX makes no zeros like a sharded array under jit, but where the mesh is set.
        init = jax.jit(tx.init) if jax.__version_info__ >= (0, 12) else tx.init
        return one_program(params, init(params), grads)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    if how == "scan":
        return scanned(params, stacked)
    two = jax.tree.map(lambda x: jnp.stack([x, x]), (params, stacked))
    return jax.tree.map(lambda x: x[1], jax.vmap(scanned)(*two))


# --- what wraps an optimizer, beside NumPy ---------------------------------------------------

RATE, MU, NORM, DECAY = 0.5, 0.5, 0.75, 0.25
EMA = jmask.ema(DECAY)
decay = optax.add_decayed_weights(DECAY, lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
sgd = jmask.sgd(RATE, momentum=MU)
WRAPPED = functions("like", {**vars(jmask), **globals()})("""
    skip_nonfinite(sgd); optax.chain(drop_nonfinite_rows(), sgd);
    optax.chain(clip_by_row_norm(NORM), sgd); optax.chain(sgd, max_row_norm(NORM));
    multi_steps(sgd, 2, like); multi_steps(sgd, 2, like, use_grad_mean=False);
    optax.chain(sgd, EMA); lazy(optax.chain(sgd, EMA));
    optax.chain(sgd, optax.masked(EMA, [True, True])); lazy(optax.chain(decay, sgd));
    optax.chain(lazy(decay), sgd);
    skip_nonfinite(multi_steps(sgd, 2, like));
    multi_steps(skip_nonfinite(optax.chain(sgd, EMA)), 2, like)
""")


class Model:
    """Steps on a table (R, 12) and a dense parameter (4,), each beside its momentum."""

    def __init__(self, name, params, kind):
        self.name, self.kind = name, kind
        self.params = [np.asarray(x, np.float64) for x in params]
        self.momenta = [np.zeros_like(x) for x in self.params]
        self.averages, self.waiting = list(self.params), []
        self.skipped = self.dropped = 0

    def step(self, grads):
        """Take (gradient, touched) of the table and of the dense parameter."""
        outer, *_ = self.name.split("(")
        is_bad = any(not np.isfinite(g[touched]).all() for g, touched in grads)
        if outer == "skip_nonfinite" and is_bad:
            self.skipped += 1
            return
        if "multi_steps" in self.name:
            self.waiting.append(grads)
            if len(self.waiting) < 2:
                return
            count = 1 if "use_grad_mean=False" in self.name else 2
            pairs = zip(*self.waiting, strict=True)
            grads = [((a + c) / count, b | d) for (a, b), (c, d) in pairs]
            self.waiting = []
            if outer == "multi_steps" and any(not np.isfinite(g[t]).all() for g, t in grads):
                self.skipped += "skip" in self.name
                if "skip" in self.name:
                    return
        for i, (g, touched) in enumerate(grads):
            self.move(i, g, touched)

    def move(self, i, g, touched):
        p, is_table = self.params[i], i == 0
        # A vector's rows are its entries, as those of the dense parameter.
        has_rows = is_table and self.kind != "vector"
        if "drop" in self.name:
            bad = ~np.isfinite(g) & touched
            bad = bad.any(1, keepdims=True) if has_rows and self.kind not in OF_ENTRIES else bad
            self.dropped += int(bad.sum())
            g = np.where(bad, 0, g)
            touched = touched & ~bad if is_table else touched
        if "clip" in self.name:
            g = shortened(g, has_rows)
        if "decay" in self.name and has_rows:
            g = g + DECAY * p
        m = np.where(touched, MU * self.momenta[i] + g, self.momenta[i])
        new = np.where(touched, p - RATE * m, p)
        if "max_row_norm" in self.name:
            rows = touched.any(-1, keepdims=True) if has_rows else touched
            new = np.where(rows, shortened(new, has_rows), new)
        self.params[i], self.momenta[i] = new, m
        self.averages[i] = DECAY * self.averages[i] + (1 - DECAY) * new


def shortened(x, are_rows):
    norm = np.sqrt((x**2).sum(-1, keepdims=True)) if are_rows else np.abs(x)
    return x * np.minimum(1, NORM / np.maximum(norm, 1e-30))


is_sgd = lambda x: isinstance(x, MomentumState)


AVERAGED_BY_ROWS = "lazy(optax.chain(sgd, EMA))"


def has_model(name, kind):
    """Entries of a row that is averaged move with it; masked ones are in its norm.

    The bounds of such rows are in test_masked_gradients.py. Updates have no mask, so that what
    comes next in a chain moves all entries.
    """
    if "max_row_norm" in name or "lazy(decay)" in name:
        return kind not in MASKED
    return name != AVERAGED_BY_ROWS or kind not in OF_ENTRIES or kind == "vector"


PAIRS = [x for x in cases(WRAPPED, 4) if has_model(*x.values)]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_beside_numpy(name, kind):
    how, step, rows = context(name, kind)
    # A product with a complex nan is nan in both parts.
    start, has_nan = np.nan_to_num(table_of(rows)), "nonfinite" in name
    params, model = [kept(kind, start), jnp.zeros(4)], Model(name, [start, np.zeros(4)], kind)
    grads = []
    for seed in range(6):
        is_bad = has_nan and seed in (1, 4)
        draw = drawn(kind, start, seed, has_nan=is_bad)
        dense = np.random.default_rng(seed).normal(size=4)
        dense[3] = np.inf if is_bad else dense[3]
        grads.append([draw.gradient, jnp.asarray(dense, jnp.float32)])
        model.step([(draw.dense, draw.touched), (dense, np.ones(4, bool))])
    largest = drawn(kind, start, 0, count=32).gradient
    tx = WRAPPED[name]([largest, grads[0][1]])
    if "packed" in kind and ("max_row_norm" in name or name == AVERAGED_BY_ROWS):
        with pytest.raises(ValueError, match=BY_ROWS):
            run(tx, how, step, params, grads)
        return
    new, state = run(tx, how, step, params, grads)
    averages = EMA.average(state, new) if "EMA" in name else None
    (trace,) = (x.momentum for x in jax.tree.leaves(state, is_leaf=is_sgd) if is_sgd(x))
    momenta = [-RATE * m for m in model.momenta]  # the buffer contains the rate
    for ours, theirs in ((new, model.params), (trace, momenta), (averages, model.averages)):
        for x, y in zip(in_rows(kind, ours, start) or [], theirs, strict=ours is not None):
            np.testing.assert_allclose(x.reshape(y.shape), y, 1e-5, 1e-6)
    if has_nan:
        counts = [x for x in jax.tree.leaves(state) if x.ndim == 0 and x.dtype == jnp.int32]
        assert model.skipped + model.dropped in map(int, counts)
    if kind in SHARDED:
        assert new[0].sharding.is_equivalent_to(params[0].sharding, 2)


# --- every optimizer, beside itself on the rows of an array ----------------------------------

by_ndim = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
OTHERS = functions("", {**vars(optax), "jmask": jmask, "by_ndim": by_ndim})("""
    chain(jmask.rowwise_adagrad(0.1), jmask.ema(0.5));
    jmask.lazy(chain(clip_by_global_norm(1.0), jmask.rowwise_adam(0.1)));
    jmask.rowwise_adagrad(linear_schedule(0.1, 0.01, 3));
    jmask.adam(0.1, state_dtype="float32");
    inject_hyperparams(jmask.rowwise_adagrad)(learning_rate=0.1);
    jmask.skip_nonfinite(jmask.adam(0.1, count="per_row"));
    partition({"t": jmask.rowwise_adagrad(0.3), "w": sgd(0.1)}, {"t": "t", "w": "w"});
    jmask.lazy(adamw(0.1, weight_decay=0.5, mask=by_ndim));
    jmask.lazy(chain(masked(adam(0.1), by_ndim), scale(0.5)));
    jmask.lazy(partition({True: adam(0.1), False: set_to_zero()}, by_ndim));
    jmask.lazy(chain(centralize(), adam(0.1)));
    jmask.lazy(apply_if_finite(adam(0.1), 3))
""")
EVERY = OPTIMIZERS | NOT_LAZY | {name: make() for name, make in OTHERS.items()}
READS_ROWS = ("rowwise", "per row", "per_row", "within norms", "averaged", "centralize")
READS_SHAPES = ("adamw", "by_ndim", "within norms", "centralize")


def is_compared(name, kind):
    """Entries are no rows where rows are read; dense ones of optax take no pairs.

    A rate that optax injects has the dtype of parameters, which ids have not.
    """
    is_lifted = any(x in name for x in ("optax", "chain", "lazy", "densify", "inject"))
    return not (
        (kind in OF_ENTRIES and kind != "vector" and any(x in name for x in READS_ROWS))
        or (kind == "vector" and any(x in name for x in READS_SHAPES))
        or ("complex" in kind and (is_lifted or "adamw" in name))
        or (name.startswith("inject") and kind == "row-sparse weight")
    )


@pytest.mark.parametrize(
    ("name", "kind"), [x for x in cases(EVERY, 2) if is_compared(*x.values)]
)
def test_as_rows_of_an_array(name, kind):
    how, step, rows = context(name, kind)
    tx, start = EVERY[name], table_of(rows)
    draws = [drawn(kind, start, seed) for seed in range(3)]
    w = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    dense = jnp.asarray(paired(w) if "complex" in kind else w)
    params = {"t": kept(kind, start), "w": dense}
    grads = [{"t": draw.gradient, "w": dense * (k + 1)} for k, draw in enumerate(draws)]
    if "packed" in kind and any(x in name for x in READS_ROWS):
        with pytest.raises(ValueError, match=BY_ROWS):
            run(tx, how, step, params, grads)
        return
    ours = in_rows(kind, run(tx, how, step, params, grads), start)
    of_array = {"t": jnp.asarray(start).reshape(draws[0].of_array.shape), "w": jnp.asarray(w)}
    grads = [{"t": draw.of_array, "w": of_array["w"] * (k + 1)} for k, draw in enumerate(draws)]
    theirs = stepped(tx, of_array, grads, "update")
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if x.size != y.size:  # a number for each row, at each index of all but the last axis
            y = np.broadcast_to(np.reshape(y, (-1,) + (1,) * (x.ndim - 1)), x.shape)
        np.testing.assert_allclose(x.ravel(), np.ravel(y), 2e-5, 1e-6)
    if name not in NOT_LAZY:
        untouched = ~np.any([draw.touched for draw in draws], 0)
        table = bits(ours[0]["t"]).reshape(start.shape)
        np.testing.assert_array_equal(table[untouched], bits(start)[untouched])


@pytest.mark.parametrize("shape", [(7, 5), (3, 7, 5), (700, 3)], ids=str)
@pytest.mark.parametrize("name", [name for name in EVERY if any(x in name for x in READS_ROWS)])
def test_entries_move_their_rows(name, shape):
    """`table[s, a]` of (V, A), where rows are read: as the row of zeros that it is part of."""
    rng, tx = np.random.default_rng(0), EVERY[name]
    table = jnp.asarray(rng.normal(size=shape), jnp.float32)
    at = tuple(jnp.array([0, 2, 0, size - 1]) for size in shape)
    entries, rows, dense = [], [], jnp.ones(2)
    for _ in range(3):
        weights = jnp.asarray(rng.normal(size=4), jnp.float32)
        one = jmask.grad(lambda t, w=weights: jnp.sum(t[at] * w))(table)
        several = lambda t, w=weights: jnp.sum(t[at[:-1]][jnp.arange(4), at[-1]] * w)
        whole = jmask.grad(several)(table)
        assert (one.leading, whole.leading) == (len(shape), len(shape) - 1)
        entries.append({"t": one, "w": dense})
        rows.append({"t": whole, "w": dense})
    found, expected = (stepped(tx, {"t": table, "w": dense}, x) for x in (entries, rows))
    assert_close(found, expected)


OF_A_ROW = functions("u", globals())("u * u[..., :1]; u / u.shape[-1]")


@pytest.mark.parametrize("name", OF_A_ROW)
def test_entries_beside_others_of_their_row(name):
    """A row of one entry would be its own first column."""
    inner, state = optax.stateless(lambda u, _: OF_A_ROW[name](u)), optax.EmptyState()
    table, at = jnp.ones((4, 3)), (jnp.array([0, 2, 0]), jnp.array([0, 1, 2]))
    gradient = jmask.grad(lambda t: jnp.sum(t[at] * jnp.arange(2.0, 5.0)))(table)
    updates, _ = jmask.lazy(inner).update(gradient, state, table)
    expected, _ = inner.update(gradient.todense(), state, table)
    np.testing.assert_allclose(updates.todense(), expected)
