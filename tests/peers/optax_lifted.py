"""A plugin of pytest: optax's tests with every optimizer lifted by `jmask.lazy`.

    python -m pytest -p tests.peers.optax_lifted --pyargs optax._src.alias_test

The gradient of each parameter with a dimension becomes a `RowSparse` with all of its rows, and
the updates become arrays again: what the test computes must come out the same.
"""

import collections
import contextvars
import functools
import inspect
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jmask

# The modules of optax that make transformations, found by what is public of them.
MODULES = [
    sys.modules[function.__module__]
    for function in (optax.adam, optax.scale_by_adam, optax.clip, optax.add_noise)
]
# By words of the name of a test.
LEFT_OUT = {
    "polyak_l1_norm": "gives gradients of another structure than parameters, to see it fail",
    "clip_by_block_rms": "fails by a last digit without jmask, too",
    "lbfgs": "a line search takes the loss and whole gradients: refused by name",
    "LBFGS": "a line search takes the loss and whole gradients: refused by name",
    "recompile": "counts compilations of optax's own functions",
}
NOT_LIFTED = {
    "refused": "the proof of row-locality refused it: it ran as it is",
    "another state": "the test gives a state that `init` did not make: it ran as it is",
    "complex": "complex parameters, which jmask refuses: it ran as it is",
    "scalars": "no parameter has rows",
    "lifted": "ran on rows",
}
_REFUSALS = {
    "jmask.lazy cannot wrap": "refused",
    "`state` was not made by `init`": "another state",
}
_making = contextvars.ContextVar("making")
counts = collections.Counter()


def lifted(name, tx):
    """The transformation on row-sparse gradients, with dense ones in and out."""
    tx = optax.with_extra_args_support(tx)
    lazy = jmask.lazy(tx)

    def update(updates, state, params=None, **extra_args):
        rows = jax.tree.map(as_rows, updates)
        leaves = jax.tree.leaves((updates, params))
        if any(jnp.iscomplexobj(x) for x in leaves):
            counts[name, "complex"] += 1
            return tx.update(updates, state, params, **extra_args)
        if not any(
            isinstance(x, jmask.RowSparse) for x in jax.tree.leaves(rows, is_leaf=is_rows)
        ):
            counts[name, "scalars"] += 1
            return tx.update(updates, state, params, **extra_args)
        try:
            rows, state = lazy.update(rows, state, params, **extra_args)
        except ValueError as error:
            why = next((kind for words, kind in _REFUSALS.items() if words in str(error)), None)
            if why is None:
                raise
            counts[name, why] += 1
            return tx.update(updates, state, params, **extra_args)
        counts[name, "lifted"] += 1
        return jax.tree.map(as_array, rows, is_leaf=is_rows), state

    return optax.GradientTransformationExtraArgs(tx.init, update)


def as_rows(x):
    x = jnp.asarray(x)
    if not x.ndim or not x.shape[0] or jnp.iscomplexobj(x):
        return x
    return jmask.RowSparse(jnp.arange(x.shape[0]), x, x.shape, coalesced=True)


def as_array(x):
    # With -0.0 elsewhere nothing would differ: all rows are there.
    return x.todense() if is_rows(x) else x


def is_rows(x):
    return isinstance(x, jmask.RowSparse)


def _in_place(function):
    @functools.wraps(function)
    def make(*args, **kwargs):
        # An optimizer is lifted as a whole, and not what it is made of.
        token = _making.set(True)
        is_part = token.old_value is True
        try:
            made = function(*args, **kwargs)
        finally:
            _making.reset(token)
        is_one = isinstance(made, optax.GradientTransformation) and not is_part
        return lifted(function.__name__, made) if is_one else made

    return make


def pytest_configure(config):
    for module in MODULES:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                setattr(module, name, _in_place(function))


def pytest_collection_modifyitems(config, items):
    kept, left = [], []
    for item in items:
        item.add_marker(pytest.mark.rank_promotion)
        item.add_marker(pytest.mark.dtype_promotion)
        (left if any(word in item.nodeid for word in LEFT_OUT) else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_terminal_summary(terminalreporter):
    write = terminalreporter.write_line
    for word, reason in LEFT_OUT.items():
        write(f"left out: tests with `{word}` in their name: {reason}")
    for kind, reason in NOT_LIFTED.items():
        names = sorted(name for name, what in counts if what == kind)
        write(f"{kind}, {reason}: {' '.join(names) or '-'}")
