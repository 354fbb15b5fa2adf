"""What wraps an optimizer, on every kind of table and in every program: beside NumPy, float64.

The optimizer is SGD with momentum: m <- mu m + g, p <- p - rate m, where g is not zero by
nature: in the rows, or the entries, that were looked up. The model is written out in `Model`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask._optim.named import MomentumState
from tests.expressions import functions
from tests.stored_tables import STEPS, of_lines, stored, unpacked

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

RATE, MU, NORM, DECAY, D = 0.5, 0.5, 0.75, 0.25, 3
EMA = jmask.ema(DECAY)
decay = optax.add_decayed_weights(DECAY, lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
sgd = jmask.sgd(RATE, momentum=MU)
WRAPPED = functions("like", {**vars(jmask), **globals()})("""
    skip_nonfinite(sgd); optax.chain(drop_nonfinite_rows(), sgd);
    optax.chain(clip_by_row_norm(NORM), sgd); optax.chain(sgd, max_row_norm(NORM));
    multi_steps(sgd, 2, like); optax.chain(sgd, EMA);
    lazy(optax.chain(decay, sgd)); skip_nonfinite(multi_steps(sgd, 2, like));
    multi_steps(skip_nonfinite(optax.chain(sgd, EMA)), 2, like)
""")
FORMS = ("array", "stack", "entries", "packed")
HOW = ("eager", "jit", "scan", "vmap")


class Model:
    """Steps on a table (R, D) and a dense parameter (4,), each beside its momentum."""

    def __init__(self, name, params, form):
        self.name, self.form = name, form
        self.params = [np.asarray(x, np.float64).reshape(-1, D) for x in params[:1]]
        self.params.append(np.asarray(params[1], np.float64))
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
            grads = [((a + c) / 2, b | d) for (a, b), (c, d) in zip(*self.waiting, strict=True)]
            self.waiting = []
            if outer == "multi_steps" and any(not np.isfinite(g[t]).all() for g, t in grads):
                self.skipped += "skip" in self.name
                if "skip" in self.name:
                    return
        for i, (g, touched) in enumerate(grads):
            self.move(i, g, touched)

    def move(self, i, g, touched):
        p, is_table = self.params[i], i == 0
        if "drop" in self.name:
            bad = ~np.isfinite(g) & touched
            bad = bad if self.form == "entries" or not is_table else bad.any(1, keepdims=True)
            self.dropped += int(bad.sum())
            g = np.where(bad, 0, g)
            touched = touched & ~bad if is_table else touched
        if "clip" in self.name:
            g = shortened(g, is_table)
        if "decay" in self.name and is_table:
            g = g + DECAY * p
        m = np.where(touched, MU * self.momenta[i] + g, self.momenta[i])
        new = np.where(touched, p - RATE * m, p)
        if "max_row_norm" in self.name:
            rows = touched.any(-1, keepdims=True) if is_table else touched
            new = np.where(rows, shortened(new, is_table), new)
        self.params[i], self.momenta[i] = new, m
        self.averages[i] = DECAY * self.averages[i] + (1 - DECAY) * new


def shortened(x, are_rows):
    norm = np.sqrt((x**2).sum(-1, keepdims=True)) if are_rows else np.abs(x)
    return x * np.minimum(1, NORM / np.maximum(norm, 1e-30))


def gradients(form, shape, seed, has_nan):
    """A gradient with equal ids and padding, and the model's (gradient, touched) of it."""
    rng = np.random.default_rng(seed)
    leading = {"stack": 2, "entries": 2}.get(form, 1)
    count, row = int(np.prod(shape[:leading])), shape[leading:]
    ids = rng.integers(0, min(count, 8), 6)
    ids[1], ids[4] = ids[0], count
    values, dense = rng.normal(size=(6, *row)), rng.normal(size=4)
    if has_nan:
        values[2], dense[3] = np.nan, np.inf
    values[4] = np.nan  # padding
    rows = jmask.RowSparse(ids, jnp.asarray(values, jnp.float32), shape, leading=leading)
    g, touched = np.zeros((count + 1, *row)), np.zeros((count + 1, *row), bool)
    np.add.at(g, ids, values)
    touched[ids] = True
    table = [x[:-1].reshape(-1, D) for x in (g, touched)]
    return [rows, jnp.asarray(dense, jnp.float32)], [table, (dense, np.ones(4, bool))]


def run(tx, how, step, params, grads):
    """Parameters and state after a step with each of the gradients."""
    take = functools.partial(STEPS[step], tx)
    if how in ("eager", "jit"):
        take, state = take if how == "eager" else jax.jit(take), tx.init(params)
        for g in grads:
            params, state = take(g, state, params)
        return params, state
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)

    @jax.jit
    def scanned(params, grads):
        body = lambda carry, g: (take(g, *carry[::-1]), None)
        return jax.lax.scan(body, (params, tx.init(params)), grads)[0]

    if how == "scan":
        return scanned(params, stacked)
    two = jax.tree.map(lambda x: jnp.stack([x, x]), (params, stacked))
    return jax.tree.map(lambda x: x[1], jax.vmap(scanned)(*two))


def table_of(form, rows, rng):
    shape = (2, rows, D) if form == "stack" else (rows, D)
    table = jnp.asarray(rng.normal(size=shape), jnp.float32)
    return shape, table


@pytest.mark.parametrize("rows", [5, 300])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WRAPPED)
def test_beside_numpy(name, form, how, rows):
    shape, start = table_of(form, rows, np.random.default_rng(0))
    table = stored(form, start) if form == "packed" else start
    params = [table, jnp.zeros(4)]
    has_nan = "nonfinite" in name
    pairs = [gradients(form, shape, seed, has_nan and seed in (1, 4)) for seed in range(6)]
    grads = [ours for ours, _ in pairs]
    if form == "packed":
        grads = [[of_lines(g, table), dense] for g, dense in grads]
    tx, model = WRAPPED[name](grads[0]), Model(name, [start, params[1]], form)
    step = "apply_gradients" if (HOW.index(how) + rows + FORMS.index(form)) % 2 else "update"
    if form == "packed" and "max_row_norm" in name:
        with pytest.raises(ValueError, match="row by row, and the table is packed"):
            run(tx, how, step, params, grads)
        return
    new, state = run(tx, how, step, params, grads)
    if form == "packed":
        averaged = EMA.average(state, new) if "EMA" in name else None
        new, state, averaged = unpacked((new, state, averaged), table, shape)
    for _, theirs in pairs:
        model.step(theirs)
    (trace,) = (x.momentum for x in jax.tree.leaves(state, is_leaf=is_sgd) if is_sgd(x))
    momenta = [-RATE * m for m in model.momenta]  # the buffer contains the rate
    for x, expected in ((new, model.params), (trace, momenta)):
        for ours, theirs in zip(x, expected, strict=True):
            ours = np.asarray(ours, np.float64).reshape(theirs.shape)
            np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)
    if "nonfinite" in name:
        counts = [x for x in jax.tree.leaves(state) if x.ndim == 0 and x.dtype == jnp.int32]
        assert model.skipped + model.dropped in map(int, counts)
    if "EMA" in name:
        average = averaged if form == "packed" else EMA.average(state, new)
        average = np.asarray(average[0]).reshape(-1, D)
        np.testing.assert_allclose(average, model.averages[0], 1e-5, 1e-6)


is_sgd = lambda x: isinstance(x, MomentumState)
