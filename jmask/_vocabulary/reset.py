"""Let rows that another key got start anew, with all that an optimizer keeps of them.

state      count    mu (V, D)   nu (V, D)   last (V, 1)       whose rows: as `lazy` finds it
new rows            tx.init of the new rows alone             what an optimizer starts with
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jmask._base.array_types import fewer, is_known
from jmask._base.row_ids import canonical
from jmask._base.shardings import on_every_device
from jmask._base.types import DType, PyTree, PyTreeDef, RowArray, Shape
from jmask._base.validation import leaf_name, named_parts
from jmask._embedding.lookup import checked_integers
from jmask._kernels.coalesce import unique_slots
from jmask._kernels.rows import set_rows
from jmask._kernels.stochastic_rounding import check_key
from jmask._lazy.checks import Fit, check_transformation
from jmask._lazy.state_rows import rows_of_state
from jmask._optim.microbatches import holds_gradients
from jmask._tables.rows_at import shape_of
from jmask._vocabulary.vocabulary import Vocabulary

Initializer = Callable[[jax.Array, Shape, DType], jax.Array]
_Arrays = dict[int, list[jax.Array]]
"""For each table, by its number: the table and its slots, or rows of these."""
# Of a batch of 8,192 keys some hundred are new, and random numbers for a row of 64 take as long
# as its step of Adam.
_BLOCK = 512


@jax.named_scope("jmask.vocabulary.reset")
def reset(
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    rows: PyTree,
    init: Initializer,
    *,
    key: jax.Array | None = None,
    vocab: Vocabulary | None = None,
) -> tuple[PyTree, PyTree]:
    """Return parameters and state in which some rows are as before the first step.

    Call it in the step, between `rows_of` and the loss. All else keeps its bits, and is updated
    in place where parameters and state are donated. Counts of steps go on, as in a dense run in
    which these rows of the parameters and of each slot are written anew. Rows of
    `jmask.deferred` have missed no step then, and `jmask.rows_since` counts these rows as moved
    by the next step.

    Args:
        tx: the transformation that made the state; whose rows each array of it has is found
            from its `init`, and so is what they start from.
        params: the parameters.
        state: the state of `tx`.
        rows: a tree like `params`, parts of which may be missing, of row numbers (n,), as
            `rows_of` returns them last. What is no row of the table is padding.
        init: (key, shape, dtype) -> rows, as of `jax.nn.initializers`. It is called for each
            row r of table k as init(fold_in(fold_in(key, k), r), (1, D), dtype), k counting the
            leaves of `params`: the row does not depend on the other rows.
        key: of `jax.random`; a new one in each step, or a row starts as it did the last time.
            `jax.random.key(0)` by default.
        vocab: that the rows are from; the tables are then refused if they have fewer rows.

    Raises:
        TypeError: if `tx` is no transformation, row numbers are no integers, or `init` no
            function.
        ValueError: if the state was not made by `tx.init`, or holds gradients of rows (as
            of `jmask.multi_steps`); if `rows` names no parameter; or if a table is too small.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jmask
        >>> tx, params = jmask.lazy(optax.adam(0.1)), {"table": jnp.ones((3, 2))}
        >>> state, zeros = tx.init(params), jax.nn.initializers.zeros
        >>> params, state = jmask.vocabulary.reset(
        ...     tx, params, state, {"table": jnp.array([1, 3])}, zeros)
        >>> print(params["table"][:, 0])
        [1. 0. 1.]
    """
    check_transformation("tx", tx, "jmask.lazy(optax.adam(1e-3))")
    fit = Fit.alone(params)
    if not callable(init):
        raise TypeError(
            "`init` must be a function (key, shape, dtype) -> rows, as "
            f"jax.nn.initializers.normal(0.01), got {type(init).__name__}."
        )
    if holds_gradients(state):
        raise ValueError(
            "`state` holds gradients of rows, as of jmask.multi_steps. What waits for a row "
            "would go to its next key: add the gradients of microbatches with jmask.tree.add, "
            "and take one update."
        )
    if vocab is not None and not isinstance(vocab, Vocabulary):
        raise TypeError(f"`vocab` must be a Vocabulary, got {type(vocab).__name__}.")
    key = jax.random.key(0) if key is None else key
    check_key(key)
    paths = [path for path, _ in jax.tree.leaves_with_path(fit.params)]
    tree: PyTreeDef = jax.tree.structure(fit.params)
    leaves = jax.tree.leaves(fit.params)
    chosen: dict[int, jax.Array] = {}
    for i, ids in named_parts("rows", paths, rows).items():
        name, table = leaf_name("params", paths[i]), jnp.asarray(leaves[i])
        ids = checked_integers(leaf_name("rows", paths[i])[1:-1], ids, "fill")
        most = 0 if vocab is None else vocab.table_rows
        if vocab is None and ids.size and not isinstance(ids, jax.core.Tracer):
            most = int(np.asarray(ids).max())  # padding is the number of rows
        if not table.ndim or most > table.shape[0]:
            raise ValueError(
                f"{name} has shape {table.shape}, and `rows` are of a vocabulary whose tables "
                f"have {most} rows or more: make it with `vocab.table_rows` rows."
            )
        count = table.shape[0]
        ids = canonical(on_every_device(jnp.asarray(ids)).reshape(-1), count)
        size = fewer(ids.shape[0], count)
        if size:
            chosen[i], _ = unique_slots(ids, size, count)
    likes, is_table = list(map(shape_of, leaves)), [i in chosen for i in range(len(leaves))]
    owners = rows_of_state(tx.init, likes, is_table, tree, state, dtypes=False)
    state_tree: PyTreeDef = jax.tree.structure(state)
    slots = jax.tree.leaves(state)
    of_table = {i: [k for k, (owner, _) in enumerate(owners) if owner == i] for i in chosen}

    def start(ids: Mapping[int, jax.Array], arrays: _Arrays) -> _Arrays:
        """Write rows `ids` of each table and of its slots."""
        few = list(leaves)
        for i, numbers in ids.items():
            few[i] = _new_rows(init, jax.random.fold_in(key, i), numbers, few[i])
        # A state that depends on when rows start has a method for that.
        depends = lambda x: hasattr(x, "with_start")
        started = lambda first, now: now.with_start(first) if depends(first) else first
        made = tx.init(tree.unflatten(few))
        first = jax.tree.leaves(jax.tree.map(started, made, state, is_leaf=depends))
        new = {i: [few[i], *(first[k] for k in of_table[i])] for i in ids}
        pairs = {i: zip(arrays[i], new[i], strict=True) for i in ids}
        return {i: [set_rows(x, ids[i], y, "sorted") for x, y in pairs[i]] for i in ids}

    arrays = {i: [jnp.asarray(leaves[i]), *(slots[k] for k in of_table[i])] for i in chosen}
    written = _in_blocks(start, chosen, arrays) if chosen else arrays
    for i, (table, *new) in written.items():
        leaves[i] = table
        for k, x in zip(of_table[i], new, strict=True):
            slots[k] = x
    return fit.as_given(tree.unflatten(leaves)), state_tree.unflatten(slots)


def _new_rows(
    init: Initializer, key: jax.Array, numbers: jax.Array, table: jax.Array
) -> RowArray:
    """Return rows (n, *row) of a table, each made by its number alone."""
    shape, dtype = (1, *table.shape[1:]), table.dtype
    row = lambda r: init(jax.random.fold_in(key, r), shape, dtype)[0]
    return jax.vmap(row)(numbers).astype(dtype)


def _in_blocks(
    start: Callable[[Mapping[int, jax.Array], _Arrays], _Arrays],
    ids: Mapping[int, jax.Array],
    arrays: _Arrays,
) -> _Arrays:
    """Return start(ids, arrays), in blocks of the sorted ids (n,), up to the padding."""
    sizes = [x.size for x in ids.values()]
    if not is_known(*sizes) or max(sizes) <= _BLOCK:
        return start(ids, arrays)
    counts = {i: arrays[i][0].shape[0] for i in ids}
    rows = [jnp.sum(x < counts[i], dtype=jnp.int32) for i, x in ids.items()]
    last = functools.reduce(jnp.maximum, rows)
    padded = {
        i: jnp.pad(x, (0, -x.size % _BLOCK), constant_values=counts[i]) for i, x in ids.items()
    }

    def body(number: jax.Array, arrays: _Arrays) -> _Arrays:
        # A table with fewer of them has its last block written again, which is the same.
        block = lambda x: lax.dynamic_slice(x, (number * _BLOCK,), (_BLOCK,))
        return start({i: block(x) for i, x in padded.items()}, arrays)

    return lax.fori_loop(0, (last + _BLOCK - 1) // _BLOCK, body, arrays)
