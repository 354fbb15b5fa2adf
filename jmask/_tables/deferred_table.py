"""Tables that compute what their rows are now: dense optimizers for the cost of rows touched.

    step        1     2     3     4     5
    row 7       g     -     -     -     g         what a dense optimizer does in steps 2 to 4
    last              1     1     1     1   5     is computed when the row is read next

While a row is away its gradient is zero, and so what a dense optimizer does to it is known. The
table holds what the optimizer keeps of each row, for reads need it, and the step at which each
row was last brought up to date; see `skipped_steps` for the steps since then.

    main       (V, entries)  parameter and state side by side, so that a row is one read;
                             of a packed or sharded table this one, (V, *row)
    others     state of another dtype, with one number for each row, or of such a table
    last       (V,) int32
    lines      one for each of the last W steps, the same for all rows

In each step a few rows, one after the other, are brought up to date besides, so that none is
ever behind by W steps.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.array_types import trailing, wide
from jmask._base.row_ids import id_dtype
from jmask._kernels.rows import gather_rows, ids_after_reading
from jmask._tables.skipped_steps import Form, StepWithout, advanced, skipped
from jmask._tables.stored_table import (
    StoredTable,
    is_stored_table,
    read_rows,
    rows_of,
    whole,
    with_rows,
)
from jmask._tensors.row_sparse import RowSparse

# Rows that are computed at a time where all of them are.
_BLOCK = 1 << 16


@jax.tree_util.register_pytree_with_keys_class
class DeferredTable(StoredTable):
    """A table (V, *row) whose rows are, when read, what a dense optimizer has made of them.

    Made by `jmask.deferred`; used like an array by lookups, gradients and optimizers.

    Attributes:
        shape: (V, *row).
        clock: how many steps the table has taken, int32.
        last: the step at which each row was last brought up to date, (V,) int32.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.sgd(1.0, momentum=0.5)
        >>> table = jmask.deferred(jnp.zeros((3, 1)), tx)
        >>> state = tx.init(table)
        >>> for i in (0, 2):
        ...     grads = jmask.grad(lambda t: t[jnp.array([i])].sum())(table)
        ...     table, state = jmask.apply_gradients(tx, grads, state, table)
        >>> table.todense().ravel()         # row 0 has moved on by half of its last step
        Array([-1.5,  0. , -1. ], dtype=float32)
    """

    __slots__ = (
        "apart", "carry", "form", "last", "lines", "made_for", "main", "others", "sealed_clock",
    )  # fmt: skip

    _ARRAYS = ("main", "others", "last", "sealed_clock", "lines", "carry", "phantom")
    _NAMES = ("main", "others", "last", "clock", "lines", "carry", "phantom")
    _STATIC = ("shape", "apart", "form", "made_for")

    main: Any
    others: tuple[Any, ...]
    last: Any
    sealed_clock: Any
    lines: Any
    carry: Any
    apart: tuple[bool, ...]
    form: Form | None
    made_for: str | None

    @classmethod
    def of(cls, **parts: Any) -> "DeferredTable":
        node = object.__new__(cls)
        for name in (*cls._ARRAYS, *cls._STATIC):
            setattr(node, name, parts.get(name))
        return node

    @classmethod
    def before(cls, table: Any, slots: Sequence[Any]) -> "DeferredTable":
        """A table of which it is not known what its steps have in common: see `begun`.

        Args:
            table (V, *row): an array or a stored table.
            slots: what the optimizer keeps of it, (V, ...) in the order of its state.
        """
        apart = [not _is_beside(x, table) for x in slots]
        beside = [x for x, is_apart in zip(slots, apart, strict=True) if not is_apart]
        main = table if is_stored_table(table) else _side_by_side([table, *beside])
        return cls.of(
            main=main,
            others=tuple(x for x, is_apart in zip(slots, apart, strict=True) if is_apart),
            last=_last_of(main, table.shape[0]),
            sealed_clock=sealed(jnp.zeros((), jnp.int32)),
            shape=tuple(table.shape),
            apart=tuple(apart),
        )

    def begun(self, form: Form, made_for: str) -> "DeferredTable":
        """The table before its first step.

        Args:
            form: what its steps have in common.
            made_for: which optimizer takes them.
        """
        line = form.fresh(wide(self.dtype))
        return self._with(
            lines=jnp.tile(line, (ring_of(self.shape[0]), 1)),
            carry=jnp.zeros((ring_of(self.shape[0]), form.sums), line.dtype),
            form=form,
            made_for=made_for,
        )

    @property
    def dtype(self) -> Any:
        return self.main.dtype

    @property
    def clock(self) -> jax.Array:
        return _unsealed(self.sealed_clock)[0]

    def full(self, row: Sequence[int], value: Any, dtype: Any) -> jax.Array:
        """What an optimizer keeps of this table elsewhere: one row that is not used."""
        return jnp.full((1, *row), value, dtype)

    # --- rows ----------------------------------------------------------------------------

    def read(self, ids: jax.Array) -> jax.Array:
        return self._now(*self._gathered(lambda x: read_rows(x, ids)))[0]

    def fitted(self, gradient: RowSparse) -> Any:
        if not is_stored_table(self.main):
            return gradient
        like = self.main._with(shape=self.shape)  # `main` says where rows live
        return like.fitted(gradient)

    def rows(self, gradient: Any) -> jax.Array:
        return self.all_rows(gradient)[0]

    def all_rows(self, gradient: Any) -> list[jax.Array]:
        """Rows (n, ...) of a gradient as they are now, of the parameter and of the state."""
        return self._now(*self._gathered(lambda x: rows_of(x, gradient)))

    def taken(self, gradient: RowSparse) -> tuple[RowSparse, list[jax.Array]]:
        """Return a fitted gradient with rows of equal ids summed, and `all_rows` of it."""
        distinct = _distinct(gradient)
        return distinct, self.all_rows(distinct)

    def set_rows(self, gradient: Any, rows: jax.Array) -> "DeferredTable":
        _, *state = self.all_rows(gradient)
        return self.with_all_rows(gradient, [rows, *state])

    def with_all_rows(self, gradient: Any, rows: Sequence[jax.Array]) -> "DeferredTable":
        """The table with other rows, which are up to date, where a gradient has them."""

        def write(x: Any, new: jax.Array) -> Any:
            return with_rows(x, gradient, new.astype(x.dtype))

        return self._written(write, rows)

    def stepped(
        self, gradient: Any, rows: Sequence[jax.Array], step: StepWithout
    ) -> "DeferredTable":
        """The table after a step.

        Args:
            gradient: with equal ids summed.
            rows: parameter and state after the step where the gradient has rows.
            step: what the step is for all other rows.
        """
        assert self.form is not None
        lines, carry = advanced(self.form, self.lines, self.carry, self.clock, step)
        table = self._with(sealed_clock=sealed(self.clock + 1), lines=lines, carry=carry)
        return table.with_all_rows(gradient, rows)._swept(self.clock)

    def _swept(self, number: jax.Array) -> "DeferredTable":
        """The table with the next few rows up to date."""
        rows = self.shape[0]
        if not rows:
            return self
        rounds = self.lines.shape[0] - 1
        count = -(-rows // rounds)
        first = jnp.minimum(number % rounds * count, rows - count).astype(jnp.int32)
        return self._up_to_date_from(first, count)

    def _up_to_date_from(self, first: Any, count: int) -> "DeferredTable":
        """The table with so many rows up to date, from the first.

        They are gathered: of a slice XLA makes a part of what is written, and on JAX 0.10 then
        reads it from a copy of the table.
        """
        kind = id_dtype(self.shape[0])
        ids = jnp.asarray(first, kind) + jnp.arange(count, dtype=kind)
        nothing = jnp.zeros((count, *self.shape[1:]), self.dtype)
        which = self.fitted(RowSparse.of_rows(ids, nothing, self.shape, coalesced=True))
        return self.with_all_rows(which, self.all_rows(which))

    def up_to_date(self) -> "DeferredTable":
        """The table with all rows up to date: O(V), in place where it is donated."""
        if self.form is not None:
            self._checked_lines()
        caught_up: Any = jax.jit(DeferredTable._caught_up)
        return caught_up(self) if self.shape[0] else self

    def _caught_up(self) -> "DeferredTable":
        rows = self.shape[0]
        count = min(rows, _BLOCK)
        if is_stored_table(self.main):
            return self._up_to_date_from(0, rows)

        def block(i: jax.Array, table: Any) -> Any:
            return table._up_to_date_from(jnp.minimum(i * count, rows - count), count)

        return lax.fori_loop(0, -(-rows // count), block, self)

    def parts(self) -> list[Any]:
        """Parameter and state as a run without deferred tables keeps them, as they are now."""
        if not is_stored_table(self.main):
            return self.all_entries()
        table = self.up_to_date()
        return [table.main, *table.others]

    def all_entries(self) -> list[jax.Array]:
        """Parameter and state as arrays (V, ...), as they are now."""
        if is_stored_table(self.main):
            return self._now(*self._gathered(lambda x: x.todense()))
        table = self.up_to_date()
        return self._ordered(self._parted(table.main), list(table.others))

    def entries(self) -> list[jax.Array]:
        if is_stored_table(self.main):
            return self.up_to_date().main.entries()
        return [self.all_entries()[0]]

    def todense(self) -> jax.Array:
        """The array (V, *row) that the dense optimizer has at this step."""
        return whole(self.all_entries()[0], self.phantom)

    # --- parts ---------------------------------------------------------------------------

    def _gathered(self, read: Callable[[Any], jax.Array]) -> tuple[Any, Any, Any]:
        last = read(self.last)
        return read(self.main), [read(x) for x in self.others], last.reshape(last.shape[0])

    def _now(self, main: jax.Array, others: list[jax.Array], last: jax.Array) -> list[Any]:
        entries = self._ordered(self._parted(main), others)
        if self.form is None:
            return entries
        dtype = self.lines.dtype
        ring = self.lines.shape[0]
        lines = gather_rows(self._checked_lines(), last % ring)
        # Or XLA gathers them for each entry again.
        main, lines, *others = lax.optimization_barrier((main, lines, *others))
        entries = self._ordered(self._parted(main), others)
        new = skipped(self.form, lines, [x.astype(dtype) for x in entries])
        return [x.astype(y.dtype) for x, y in zip(new, entries, strict=True)]

    def _checked_lines(self) -> jax.Array:
        """The lines; nan if something has mapped arithmetic over the leaves of the table.

        Rows that are behind are no numbers to calculate with, and neither are the lines. The
        line of rows that are up to date is known: another one comes of arithmetic, also of that
        on floating leaves alone.

        Raises:
            ValueError: in place of nan, outside of jit.
        """
        assert self.form is not None
        clock, is_sealed = _unsealed(self.sealed_clock)
        now = self.lines[clock % self.lines.shape[0]]
        is_sound = is_sealed & jnp.all(now == self.form.fresh(now.dtype))
        if isinstance(is_sound, jax.core.Tracer):
            return jnp.where(is_sound, self.lines, jnp.nan)
        if not is_sound:
            raise ValueError(
                "this DeferredTable was changed by arithmetic over its leaves, some of which "
                "are no numbers: calculate with `table.todense()`, and make a table of the "
                "result by jmask.deferred(array, tx)."
            )
        return self.lines

    def _written(
        self, write: Callable[[Any, jax.Array], Any], rows: Sequence[jax.Array]
    ) -> "DeferredTable":
        count = rows[0].shape[0]
        is_other = self._are_others()
        beside = [x for x, other in zip(rows, is_other, strict=True) if not other]
        main = jnp.concatenate(
            [x.reshape(count, math.prod(x.shape[1:])).astype(self.dtype) for x in beside],
            axis=1,
        )
        main = main.reshape(count, *self.main.shape[1:])
        others = [x for x, other in zip(rows, is_other, strict=True) if other]
        # What is written here depends on what was read, or XLA reads from a copy.
        clock = ids_after_reading(jnp.full((count,), self.clock), main)
        last = trailing(clock, self.last.ndim)
        return self._with(
            main=write(self.main, main),
            others=tuple(write(x, y) for x, y in zip(self.others, others, strict=True)),
            last=write(self.last, last),
        )

    def _are_others(self) -> list[bool]:
        """For the parameter and each slot whether it is among `others`."""
        return [False, *self.apart]

    def _parted(self, main: jax.Array) -> list[jax.Array]:
        """The entries of rows (n, entries) that are side by side."""
        size = math.prod(self.shape[1:])
        main = main.reshape(main.shape[0], math.prod(main.shape[1:]))
        parts = [main[:, i : i + size] for i in range(0, main.shape[1], size)]
        return [x.reshape(main.shape[0], *self.shape[1:]) for x in parts]

    def _ordered(self, beside: list[Any], others: list[Any]) -> list[Any]:
        """Parameter and slots in the order of the state."""
        parts = {False: iter(beside), True: iter(others)}
        return [next(parts[other]) for other in self._are_others()]


# In the second word of a clock: zeros are none.
_SEAL = np.uint32(0x6A6D6173)


def sealed(clock: jax.Array) -> jax.Array:
    """A clock (...,) as a leaf on which arithmetic is a TypeError: a random key of JAX.

    A norm or an average over the leaves of a `DeferredTable` would be wrong without a word. The
    dtype is one of JAX's own, for orbax, `jax.export` and pickle know those.
    """
    words = lax.bitcast_convert_type(clock, np.uint32)
    words = jnp.stack([words, jnp.full_like(words, _SEAL)], axis=-1)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _unsealed(leaf: Any) -> tuple[jax.Array, jax.Array]:
    """The clock, and whether the leaf is one.

    Raises:
        TypeError: if it is a number, as arithmetic or an older version made it.
    """
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"the clock of this DeferredTable came back as {leaf.dtype}: its leaves are no "
            "numbers to calculate with, use `table.todense()`. Checkpoints of other versions "
            "are restored by jmask.from_arrays(arrays, like=...)."
        )
    words = jax.random.key_data(leaf)
    return lax.bitcast_convert_type(words[..., 0], np.int32), words[..., 1] == _SEAL


def is_deferred(x: Any) -> bool:
    """Whether `x` is a `DeferredTable`."""
    return isinstance(x, DeferredTable)


def ring_of(rows: int) -> int:
    """W, how many steps a row may be behind: about twice the root of V."""
    return min(max(1 << math.ceil(math.log2(2 * math.sqrt(max(rows, 1)))), 64), 1 << 14)


def _distinct(gradient: RowSparse) -> RowSparse:
    """Return a gradient with the rows of equal ids summed, and zeros for padding."""
    if gradient.order == "any":
        gradient = gradient.coalesce()
    exists = trailing(gradient.row_ids() < gradient.shape[0], gradient.ndim)
    zero = jnp.zeros((), gradient.dtype)
    return gradient.with_values(jnp.where(exists, gradient.values, zero))


def _is_beside(slot: Any, table: Any) -> bool:
    alike = slot.dtype == table.dtype and tuple(slot.shape) == tuple(table.shape)
    return alike and not is_stored_table(table)


def _side_by_side(tables: Sequence[Any]) -> Any:
    """Tables (V, *row) as one, (V, entries)."""
    columns = [x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in tables]
    return jnp.concatenate(columns, axis=1)


def _last_of(main: Any, rows: int) -> Any:
    if is_stored_table(main):
        return main.full((1,), 0, jnp.int32)
    return jnp.zeros((rows,), jnp.int32)
