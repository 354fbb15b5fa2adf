"""Follow the trajectory of a dense optimizer at the cost of the rows touched.

dense        every row moves in every step                   O(V) a step
lazy         a row moves when it has a gradient              O(rows touched)
deferred     every row moves in every step, and is caught up
             before it is read                               O(rows touched)

    step        1     2     3     4     5
    row 7       g     -     -     -     g         steps 2 to 4 of the dense optimizer
    last              1     1     1     1   5     are taken when the row is caught up

While a row is inactive its gradient is zero, so what a dense optimizer does to it is known:
`measured` finds it out, and `missed_steps` takes the steps since the row was last caught up.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmask._base.array_types import fewer, trailing, wide
from jmask._base.row_ids import Order, id_dtype, numbered
from jmask._base.shardings import Shards, end_to_end, sharding_of_rows
from jmask._base.types import (
    ArrayFunction,
    Function,
    KeyPath,
    Numbers,
    PyTree,
    PyTreeDef,
    Shape,
)
from jmask._base.validation import checked_integer, leaf_name, named_parts
from jmask._deferred.measured import (
    FormOrReason,
    NotDeferrableError,
    forms_of_steps,
    steps_of_inactive_rows,
)
from jmask._deferred.missed_steps import Form, Step, advanced, caught_up
from jmask._embedding.lookup import checked_integers
from jmask._kernels.coalesce import unique_slots
from jmask._kernels.rows import gather_rows, gather_unique_rows, ids_after_reading, set_rows
from jmask._kernels.sharded_rows import looked_up
from jmask._lazy.checks import (
    Fit,
    check_transformation,
    gradient_and_valid,
    is_gradient_leaf,
    with_whole_rows,
)
from jmask._lazy.lazy import Lifted, noticing_dense_tables
from jmask._lazy.programs import taken
from jmask._lazy.state_rows import check_state_type, rows_of_state
from jmask._lazy.step import Leaf, step_of, written_in_rows
from jmask._tables.rows_at import shape_of
from jmask._tensors.masked_tensor import MaskedTensor

# Rows of a block where all rows are caught up: temporaries are of the size of a block, not of
# the table.
_BLOCK = 1 << 16
_GO_ON = "A run of the dense optimizer goes on by tx.init(params)._replace(inner=state)."


class TableState(NamedTuple):
    """Hold what a deferred table needs besides the state of its optimizer."""

    last: jax.Array  # how many steps each row has taken, (V,) int32; of a stack (M, V)
    lines: jax.Array  # coefficients of the steps since each of the last W, (W, numbers)
    carry: jax.Array  # what rounding took from them, (W, sums)
    swept: jax.Array  # how many rows were caught up in turn


class DeferredState(NamedTuple):
    """The state of `jmask.deferred`."""

    inner: PyTree  # the state of the dense optimizer; of rows, as of their last step
    clock: jax.Array  # how many steps were taken, int32
    tables: PyTree  # a `TableState` for each parameter with rows that may wait, else ()

    def with_start(self, first: "DeferredState") -> "DeferredState":
        """Return the initial state of rows that start now, which have missed no step."""
        is_one = lambda x: isinstance(x, TableState)
        now = lambda x: x._replace(last=jnp.full_like(x.last, self.clock)) if is_one(x) else x
        return first._replace(tables=jax.tree.map(now, first.tables, is_leaf=is_one))


class Deferred(NamedTuple):
    """A transformation whose rows wait for their steps. Made by `jmask.deferred`."""

    init: Function  # params -> state
    update: Function  # (gradients, state, params, **extra_args) -> (updates, state)
    catch_up: Function  # (params, state, ids) -> (params, state), rows as they are now

    @property
    def is_a_step(self) -> bool:
        """Say that its update is one step, as `Lifted` does."""
        return True


def deferred(inner: optax.GradientTransformation, *, window: int = 4096) -> Deferred:
    """Return a transformation that follows a dense optimizer at the cost of the rows touched.

    A dense optimizer moves every row in every step, also those that have no gradient: by their
    momentum, their moments, their decay. What it does to them is known in advance. So rows
    can wait for it until they are read, and `catch_up` makes them what they would be now:

        params, state = tx.catch_up(params, state, {"table": ids})    # before the loss
        loss, grads = jmask.value_and_grad(loss_fn)(params, batch)
        params, state = jmask.apply_gradients(tx, grads, state, params)
        ...
        params, state = tx.catch_up(params, state)      # all rows: to evaluate, save or stop

    Parameters stay the arrays that they are. A leaf with a row-sparse gradient is a table in
    that step, any other one takes the dense step. After the last line parameters and
    `state.inner` equal, up to rounding, what a run of `inner` on dense gradients has. A run
    may go on in either way from there; a dense one goes on as a deferred one with the state
    `tx.init(params)._replace(inner=opt_state)`.

    `ids` is a tree like the parameters, parts of which may be missing: an array of row
    numbers, negative ones from the end; a tuple of index arrays, as for `tables[m, ids]` of
    stacks; or a list of these. More rows than the loss reads may be caught up, and less may
    not: a row with a gradient that was not caught up becomes nan, and so does a table with a
    dense gradient of which a row was not.

    Args:
        inner: an optimizer of optax, or one with a name; whole chains, for nothing may come
            behind it. Rates may follow schedules or be injected.
        window: the most steps that a row may wait: in each `catch_up` with ids V / window
            further rows of a table are caught up in turn, so that none does. A row that waits
            for longer, as in a table that no `catch_up` names for so long, reads as nan.

    Returns:
        A transformation with `catch_up`. Its state is `inner`'s and one int32 for each row.

    Raises:
        TypeError: if `inner` is no transformation; by `init`, if a parameter is no array.
        ValueError: by `init`, or by `update` for a row-sparse gradient, if what `inner` does
            to rows without a gradient has no closed form, with the reason: L2 decay in an
            adaptive optimizer, noise, RAdam, what is not row-local.

    References:
        Lipton and Elkan, "Efficient Elastic Net Regularization for Sparse Linear Models", 2015,
        for the decay of weights; moments are derived in `jmask/_deferred/missed_steps.py`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.deferred(jmask.adam(0.1))
        >>> params = {"table": jnp.ones((4, 2))}
        >>> state = tx.init(params)
        >>> for ids in ([0, 1], [0, 2], [0, 3]):
        ...     params, state = tx.catch_up(params, state, {"table": ids})
        ...     loss = lambda params: params["table"][jnp.array(ids)].sum()
        ...     grads = jmask.grad(loss)(params)
        ...     params, state = jmask.apply_gradients(tx, grads, state, params)
        >>> params, state = tx.catch_up(params, state)
        >>> print(params["table"][:, 0].round(2))   # row 1 has moved on by itself
        [0.7  0.78 0.87 0.94]
    """
    check_transformation("inner", inner, "jmask.deferred(optax.adam(1e-3))")
    if checked_integer("window", window) < 2:
        raise ValueError(f"`window` must be 2 steps or more, got {window}.")
    inner = optax.with_extra_args_support(inner)
    if isinstance(inner, Lifted) and inner.inner is not None:
        inner = inner.inner  # of arrays

    measured: dict[PyTree, list[FormOrReason]] = {}  # what cloudpickle takes

    def forms_of(params: PyTree) -> list[FormOrReason]:
        leaves, tree = jax.tree.flatten(params)
        # The same for all numbers of rows, with the dimensions that there were.
        ones = lambda x: (1,) * (x.ndim - 1) + x.shape[-1:] if x.ndim > 1 else (1,) * x.ndim
        structure = tree, tuple(x.update(shape=ones(x)) for x in map(shape_of, leaves))
        if structure not in measured:
            measured[structure] = forms_of_steps(inner, *structure)
        return measured[structure]

    def init(params: PyTree) -> DeferredState:
        params = Fit.alone(params).params
        tree: PyTreeDef = jax.tree.structure(params)
        forms = forms_of(params)
        if not any(isinstance(form, Form) for form in forms):
            errors = [form for form in forms if isinstance(form, Exception)]
            no_table = NotDeferrableError("no table of real numbers is among `params`")
            raise errors[0] if errors else no_table
        tables: list[PyTree] = [()] * len(forms)
        for i, (form, x) in enumerate(zip(forms, jax.tree.leaves(params), strict=True)):
            if isinstance(form, Form):
                fresh = form.line(wide(x.dtype))
                shape = (*x.shape[:-1], 1) if x.ndim > 1 else x.shape
                last = jnp.zeros(shape, jnp.int32, device=sharding_of_rows(x))
                last = last[..., 0] if x.ndim > 1 else last
                carry = jnp.zeros((window, form.sums), fresh.dtype)
                lines = jnp.tile(fresh, (window, 1))
                tables[i] = TableState(last, lines, carry, jnp.zeros((), jnp.int32))
        clock = jnp.zeros((), jnp.int32)
        return DeferredState(inner.init(params), clock, tree.unflatten(tables))

    def update(
        updates: PyTree,
        state: DeferredState,
        params: PyTree | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, DeferredState]:
        """Take the step of rows, and note what it was for all others."""
        if params is None:
            raise ValueError("`params` must be given to update(): rows are compared with them.")
        fit = Fit.of(updates, params)
        check_state_type(state, DeferredState, _GO_ON)
        gradients, params = fit.gradients, fit.params
        forms = forms_of(params)
        tree: PyTreeDef = jax.tree.structure(gradients, is_leaf=is_gradient_leaf)
        # 0 where they were masked, as they are to dense optimizers.
        filled = lambda x: gradient_and_valid(x)[0] if isinstance(x, MaskedTensor) else x
        gradients = jax.tree.map(filled, gradients, is_leaf=is_gradient_leaf)
        # A dense step moves all rows of a line.
        gradients = with_whole_rows(gradients, lines=True)
        step = step_of(inner, gradients, state.inner, params, extra_args)
        tables, leaves = tree.flatten_up_to(state.tables), list(step.leaves)
        steps = zip(forms, steps_of_inactive_rows(step, forms), strict=True)
        for i, (form, scalars) in enumerate(steps):
            if isinstance(form, Form):
                leaves[i], tables[i] = _noted(form, tables[i], state.clock, leaves[i], scalars)
        results, new = taken(dataclasses.replace(step, leaves=leaves))
        return results, DeferredState(new, state.clock + 1, tree.unflatten(tables))

    def catch_up(
        params: PyTree, state: DeferredState, ids: PyTree = None
    ) -> tuple[PyTree, DeferredState]:
        check_state_type(state, DeferredState, _GO_ON)
        fit = Fit.alone(params)
        paths: list[tuple[KeyPath, jax.Array]] = jax.tree.leaves_with_path(fit.params)
        tree: PyTreeDef = jax.tree.structure(fit.params)
        leaves = [jnp.asarray(x) for _, x in paths]
        forms = forms_of(fit.params)
        likes, is_table = list(map(shape_of, leaves)), [isinstance(x, Form) for x in forms]
        owners = rows_of_state(inner.init, likes, is_table, tree, state.inner)
        tables = tree.flatten_up_to(state.tables)
        slots = jax.tree.leaves(state.inner)
        chosen: dict[int, PyTree] = dict.fromkeys(range(len(leaves)))  # all rows of each
        if ids is not None:
            named = named_parts("ids", [path for path, _ in paths], ids).items()
            chosen = {i: _numbers(paths[i][0], x, leaves[i].shape) for i, x in named}
        for i, where in chosen.items():
            form = forms[i]
            if not isinstance(form, Form):
                continue
            places = [k for k, (owner, _) in enumerate(owners) if owner == i]
            old = [leaves[i], *(slots[k] for k in places)]
            (leaves[i], *rows), tables[i] = _caught_up(form, old, tables[i], state.clock, where)
            for k, x in zip(places, rows, strict=True):
                slots[k] = x
        new = jax.tree.unflatten(jax.tree.structure(state.inner), slots)
        now = DeferredState(new, state.clock, tree.unflatten(tables))
        return fit.as_given(tree.unflatten(leaves)), now

    return Deferred(init, noticing_dense_tables(update), catch_up)


def _noted(
    form: Form, table: TableState, clock: jax.Array, leaf: Leaf, step: Step | None
) -> tuple[Leaf, TableState]:
    """Return the gradient, nan where rows were not caught up, and what is kept of a table."""
    g, last = leaf.value, table.last
    if leaf.table is None:  # all rows take the step
        g = jnp.where(jnp.any(last != clock), jnp.nan, g).astype(g.dtype)
        slot = (clock + 1) % table.lines.shape[0]
        lines = table.lines.at[slot].set(form.line(table.lines.dtype))
        kept = (jnp.full_like(last, clock + 1), lines, table.carry.at[slot].set(0))
        return dataclasses.replace(leaf, given=g), TableState(*kept, table.swept)
    flat, ids = last.reshape(g.row_count, *g.row[:-1]), g.row_ids()
    is_sharded = bool(Shards.of(flat).rows)
    since = looked_up(flat, ids) if is_sharded else gather_unique_rows(flat, ids, g.order)
    # Padding reads any row.
    behind = (since != clock) & trailing(ids < g.row_count, flat.ndim)
    values = jnp.where(trailing(behind, g.values.ndim), jnp.nan, g.values)
    step = jax.tree.map(lambda x: x.astype(table.lines.dtype), step)
    lines, carry = advanced(form, table.lines, table.carry, clock, step)
    ids = ids_after_reading(ids, since)
    flat = set_rows(flat, ids, jnp.full(behind.shape, clock + 1), g.order)
    last = written_in_rows(flat.reshape(last.shape), last)
    new = TableState(last, lines, carry, table.swept)
    return dataclasses.replace(leaf, given=leaf.given.with_values(values)), new


# --- rows as they are now -----------------------------------------------------------------


# In one program, so that outside of jit it is compiled once.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _caught_up(
    form: Form,
    slots: list[jax.Array],
    table: TableState,
    clock: jax.Array,
    ids: jax.Array | None,
) -> tuple[list[jax.Array], TableState]:
    """Return parameter and state with the rows `ids` (n,) caught up; all rows for None."""
    arrays, shared = [*slots, table.last], [table.lines, clock, table.swept]
    shards = Shards.of(slots[0], *([] if ids is None else [ids]))

    def on_block(
        shared: Sequence[jax.Array], ids: jax.Array | None, *arrays: jax.Array
    ) -> list[jax.Array]:
        """Catch rows up, of the block of one device where there are several."""
        lines, clock, swept = shared
        kept = arrays[-1].shape
        count, size = math.prod(kept), min(math.prod(kept), _BLOCK)
        if not count:
            return [*arrays, swept]
        flat, dtype = [x.reshape(count, *x.shape[len(kept) :]) for x in arrays], id_dtype(count)

        def in_blocks(ids_of: ArrayFunction, blocks: Numbers) -> list[jax.Array]:
            def block(i: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
                return _caught_up_at(form, lines, clock, ids_of(i), arrays, "sorted")

            return lax.fori_loop(0, blocks, block, flat)

        def all_ids(i: jax.Array) -> jax.Array:
            first = jnp.minimum(jnp.asarray(i, dtype) * size, count - size)
            return first + jnp.arange(size, dtype=dtype)

        if ids is None:
            flat = in_blocks(all_ids, -(-count // size))
        else:
            ids = shards.local(ids, count)
            each = -(-count // (lines.shape[0] - 1))
            more = (swept.astype(dtype) + jnp.arange(each, dtype=dtype)) % count
            ids = jnp.concatenate([ids.astype(dtype), more])
            if shards.rows:
                # Most ids are V, of rows that other shards have: only the last block has some.
                n = ids.shape[0]
                unique, _ = unique_slots(ids, fewer(n, count), count)
                own = min(2 * -(-n // shards.count), unique.shape[0])
                unique = jnp.pad(unique, (0, -unique.shape[0] % own), constant_values=count)
                blocks = -(-jnp.sum(unique < count, dtype=jnp.int32) // own)
                flat = in_blocks(
                    lambda i: lax.dynamic_slice(unique, (i * own,), (own,)), blocks
                )
            else:
                flat = _caught_up_at(form, lines, clock, ids, flat, "any")
            swept = ((swept + each) % count).astype(jnp.int32)
        return [*(x.reshape(y.shape) for x, y in zip(flat, arrays, strict=True)), swept]

    specs = [shards.spec if x.shape == slots[0].shape else shards.spec[:1] for x in arrays]
    given, out = [(), (), *specs], [*specs, ()]
    *new, last, swept = shards.run(on_block, shared, ids, *arrays, specs=given, out=out)
    return new, table._replace(last=last, swept=swept)


def _caught_up_at(
    form: Form,
    lines: jax.Array,
    clock: jax.Array,
    ids: jax.Array,
    arrays: list[jax.Array],
    order: Order,
) -> list[jax.Array]:
    """Return parameter, state and `last`, with rows of ids as they are now."""
    *entries, last = (gather_rows(x, ids) for x in arrays)
    # Without the barrier XLA gathers the lines again for each entry.
    since = gather_rows(lines, last % lines.shape[0])
    *entries, since = lax.optimization_barrier((*entries, since))
    new = caught_up(form, since, [x.astype(since.dtype) for x in entries])
    waited = trailing(clock - last, new[0].ndim)
    new[0] = jnp.where(waited < lines.shape[0], new[0], jnp.nan)
    # After both reads: jaxlib 0.10 makes the other one from a copy.
    ids = ids_after_reading(ids_after_reading(ids, entries[0]), last)
    # XLA's CPU compiler would compute the rows inside of the scatters, in one thread and
    # once for each: a step took 1.4 times as long (jaxlib 0.12).
    rows = lax.optimization_barrier([*new, jnp.full_like(last, clock)])
    pairs = zip(arrays, rows, strict=True)
    return [set_rows(x, ids, y.astype(x.dtype), order) for x, y in pairs]


# --- the ids that a user gives to `catch_up`, as row numbers ----------------------------------
#
# {"table": ids}                  along the first dimension of table (V, D)
# {"tables": (m, ids)}            of tables (M, V, D), as in `tables[m, ids]`
# {"table": [ids, others]}        both

_Named = Numbers | tuple[Numbers, ...]


def _numbers(path: KeyPath, ids: _Named | list[_Named], shape: Shape) -> jax.Array:
    """Return the numbers (n,) of rows in a table of `shape`, whose rows are its last dimension.

    Args:
        ids: an array of numbers along the first dimension, a tuple of such along several, or a
            list of both.
    """
    name, sizes = leaf_name("ids", path)[1:-1], shape[:-1] if len(shape) > 1 else shape
    dtype = id_dtype(math.prod(sizes))
    numbers: list[jax.Array] = []
    for given in ids if isinstance(ids, list) else [ids]:
        several = given if isinstance(given, tuple) else (given,)
        parts = [checked_integers(name, x, "fill") for x in several[: len(sizes)]]
        # Rows outside are rows of the edge, which it does no harm to catch up.
        at = lambda x, size: jnp.clip(jnp.where(x < 0, x + size, x), 0, size - 1)
        along = [at(x, size) for x, size in zip(parts, sizes, strict=False)]
        number = numbered(along, sizes[: len(parts)], dtype).reshape(-1, 1)
        each = math.prod(sizes[len(parts) :])
        numbers.append((number * each + jnp.arange(each, dtype=dtype)[None]).reshape(-1))
    return end_to_end(numbers or [jnp.zeros((0,), dtype)])
