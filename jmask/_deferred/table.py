"""Tables whose rows are caught up when they are read: dense training at the cost of lazy.

    step        1     2     3     4     5
    row 7       g     -     -     -     g         steps 2 to 4 of a dense optimizer
    last              1     1     1     1   5     are computed when the row is read next

While a row is inactive its gradient is zero, so what a dense optimizer does to it is known. The
table holds the state of each row, which reads need, and the step at which each row was last
caught up; `closed_form` takes the steps since then.

    main       (V, entries)  parameter and state interleaved, so that a row is one read;
                             of a packed table its own storage, (V, *row)
    others     separate slots: state of another dtype, with one entry for each row, or of a
               packed table
    last       (V,) int32
    lines      (W, numbers) the coefficients for each of the last W start steps
    carry      (W, sums) what rounding took from the sums
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jmask._base.array_types import is_complex, is_known, trailing, wide
from jmask._base.row_ids import id_dtype
from jmask._base.types import DType, Gradient, Index, Scalar, Table
from jmask._deferred.closed_form import Form, StepWithout, advanced, skipped
from jmask._kernels.coalesce import RowsOfTable, summed_into_first
from jmask._kernels.rows import LOOKED_UP, gather_rows, ids_after_reading
from jmask._tables.deferral import Deferred, sealed, unsealed
from jmask._tables.stored_table import (
    RowsAt,
    differentiable,
    is_stored_table,
    read_rows,
)
from jmask._tensors.row_sparse import RowSparse

# Rows of a block where all rows are caught up: temporaries are of the size of a block, not of
# the table.
_BLOCK = 1 << 16


@jax.tree_util.register_pytree_with_keys_class
class DeferredTable(Deferred):
    """A table (V, *row) whose rows, when read, are as a dense optimizer leaves them.

    Made by `jmask.deferred`; used like an array by lookups, gradients and optimizers.

    Attributes:
        shape: (V, *row).
        clock: how many steps the table has taken, int32.
        last: the step at which each row was last caught up, (V,) int32.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.sgd(1.0, momentum=0.5)
        >>> table = jmask.deferred(jnp.zeros((3, 1)), tx)
        >>> state = tx.init(table)
        >>> for i in (0, 2):
        ...     grads = jmask.grad(lambda t: t[jnp.array([i])].sum())(table)
        ...     table, state = jmask.apply_gradients(tx, grads, state, table)
        >>> table.todense().ravel()         # row 0 has moved by half of its last step
        Array([-1.5,  0. , -1. ], dtype=float32)
    """

    __slots__ = (
        "apart", "carry", "form", "last", "lines", "made_for", "main", "others", "sealed_clock",
    )  # fmt: skip

    _ARRAYS = ("main", "others", "last", "sealed_clock", "lines", "carry", "placeholder")
    _NAMES = ("main", "others", "last", "clock", "lines", "carry", "placeholder")
    _STATIC = ("shape", "apart", "form", "made_for")

    main: Table
    others: tuple[Table, ...]
    last: Table
    sealed_clock: jax.Array
    lines: jax.Array
    carry: jax.Array
    apart: tuple[bool, ...]
    form: Form | None
    made_for: str | None

    @classmethod
    def of(cls, **parts: object) -> "DeferredTable":
        node = object.__new__(cls)
        for name in (*cls._ARRAYS, *cls._STATIC):
            setattr(node, name, parts.get(name))
        return node

    def is_stack(self) -> bool:
        return jnp.ndim(self.sealed_clock) > 0

    @classmethod
    def before(cls, table: Table, slots: Sequence[Table]) -> "DeferredTable":
        """Return a table without coefficients yet: see `begun`.

        Args:
            table (V, *row): an array or a table container.
            slots: the optimizer's state of it, (V, ...) in the order of the leaves.

        Raises:
            TypeError: if the table is complex.
        """
        rows, is_stored = table.shape[0], is_stored_table(table)
        if is_complex(table):
            raise TypeError(
                f"`table` is {table.dtype}, and deferred tables are real: keep it as a real "
                "array (V, 2 * D), real parts first, or leave it an array."
            )
        apart = [
            is_stored_table(x) or (x.dtype, tuple(x.shape)) != (table.dtype, tuple(table.shape))
            for x in slots
        ]
        interleaved = [table, *(x for x, alone in zip(slots, apart, strict=True) if not alone)]
        return cls.of(
            main=table if is_stored else _side_by_side(interleaved),
            others=tuple(x for x, alone in zip(slots, apart, strict=True) if alone),
            last=table.full((1,), 0, jnp.int32) if is_stored else jnp.zeros((rows,), jnp.int32),
            sealed_clock=sealed(jnp.zeros((), jnp.int32)),
            shape=tuple(table.shape),
            apart=tuple(apart),
        )

    def begun(self, form: Form, made_for: str) -> "DeferredTable":
        """Return the table before its first step.

        Args:
            form: what its steps have in common.
            made_for: which optimizer takes them.
        """
        ring, fresh = ring_of(self.shape[0]), form.fresh(wide(self.dtype))
        return self._with(
            lines=jnp.tile(fresh, (ring, 1)),
            carry=jnp.zeros((ring, form.sums), fresh.dtype),
            form=form,
            made_for=made_for,
        )

    @property
    def dtype(self) -> DType:
        return self.main.dtype

    @property
    def clock(self) -> jax.Array:
        return unsealed(self.sealed_clock)[0]

    def full(self, row: Sequence[int], value: Scalar, dtype: DTypeLike) -> jax.Array:
        """Return the state that an optimizer holds itself for this table: one unused row."""
        return jnp.full((1, *row), value, dtype)

    # --- rows ----------------------------------------------------------------------------

    def read(self, ids: jax.Array) -> jax.Array:
        return self._now(*self._gathered(lambda x: read_rows(x, ids)))[0]

    def fitted(self, gradient: RowSparse) -> RowSparse:
        if not is_stored_table(self.main):
            return gradient
        like = self.main._with(shape=self.shape)  # `main` says where rows live
        return like.fitted(gradient)

    def rows(self, gradient: Gradient) -> jax.Array:
        return self.all_rows(gradient)[0]

    def all_rows(self, gradient: Gradient) -> list[jax.Array]:
        """Return the rows (n, ...) of a gradient as they are now, of parameter and state."""
        return self._now(*self._gathered(RowsAt.of(self.main, gradient).read))

    def taken(self, gradient: RowSparse) -> tuple[RowsAt, list[jax.Array]]:
        """Return the rows of a fitted gradient, equal ids summed, and `all_rows` of it.

        Where equal ids are summed into the first of them, rows are read where the loss looked
        them up, which XLA then does once for both.
        """
        count, ids = self.shape[0], gradient.row_ids()
        is_array = not is_stored_table(self.main) and is_known(*ids.shape)
        if is_array and gradient.order == "any" and ids.shape[0] < count:
            lookups = LOOKED_UP.of(gradient.index_leaf) or [ids]
            read = lambda x: jnp.concatenate([read_rows(x, where) for where in lookups])
            rows = self._now(*self._gathered(read))
            ids, values = summed_into_first(RowsOfTable(ids, gradient.values, count))
            at = RowsAt.in_arrays(ids, values, "unique")
        else:
            gradient = gradient.coalesce() if gradient.order == "any" else gradient
            at, ids = RowsAt.of(self.main, gradient), gradient.row_ids()
            rows = self.all_rows(gradient)
        exists = trailing(ids < count, gradient.ndim)
        zero = jnp.zeros((), gradient.dtype)  # of padding
        return at._replace(values=jnp.where(exists, at.values, zero)), rows

    def set_rows(self, gradient: Gradient, rows: jax.Array) -> "DeferredTable":
        _, *state = self.all_rows(gradient)
        return self.with_all_rows(RowsAt.of(self.main, gradient), [rows, *state])

    def with_all_rows(self, at: RowsAt, rows: Sequence[jax.Array]) -> "DeferredTable":
        """Return the table with `rows`, caught up, written where a gradient has rows."""
        count = rows[0].shape[0]
        slots = list(zip(rows, (False, *self.apart), strict=True))
        main = _side_by_side([x.astype(self.dtype) for x, alone in slots if not alone])
        main = main.reshape(count, *self.main.shape[1:])
        others = [x for x, alone in slots if alone]
        # What is written here depends on what was read, or XLA reads from a copy.
        clock = ids_after_reading(jnp.full((count,), self.clock), main)
        return self._with(
            main=at.write(self.main, main),
            others=tuple(map(at.write, self.others, others)),
            last=at.write(self.last, trailing(clock, self.last.ndim)),
        )

    def stepped(
        self, at: RowsAt, rows: Sequence[jax.Array], step: StepWithout
    ) -> "DeferredTable":
        """Return the table after a step.

        Args:
            at: the rows of the gradient, equal ids summed.
            rows: parameter and state after the step there.
            step: what the step is for all other rows.
        """
        assert self.form is not None
        lines, carry = advanced(self.form, self.lines, self.carry, self.clock, step)
        table = self._with(sealed_clock=sealed(self.clock + 1), lines=lines, carry=carry)
        table = table.with_all_rows(at, rows)
        # The coefficients of start step s are overwritten at step s + W: no row may ever be W
        # steps behind. In W - 1 rounds of as many rows each, every row is caught up once in any
        # W - 1 steps.
        rounds = self.lines.shape[0] - 1
        count = -(-self.shape[0] // rounds)
        first = jnp.minimum(self.clock % rounds * count, self.shape[0] - count)
        return table._caught_up(first.astype(jnp.int32), count) if count else table

    def _caught_up(self, first: Index, count: int) -> "DeferredTable":
        """Return the table with `count` rows caught up, from the first.

        They are gathered, not sliced: XLA fuses a slice into what is written, and on JAX 0.10
        then reads it from a copy of the table.
        """
        kind = id_dtype(self.shape[0])
        ids = jnp.asarray(first, kind) + jnp.arange(count, dtype=kind)
        nothing = jnp.zeros((count, *self.shape[1:]), self.dtype)
        which = self.fitted(RowSparse.from_rows(ids, nothing, self.shape, coalesced=True))
        return self.with_all_rows(RowsAt.of(self.main, which), self.all_rows(which))

    def up_to_date(self) -> "DeferredTable":
        """Return the table with all rows caught up: O(V), in place where it is donated."""
        if self.form is not None:
            self._checked_lines()
        return _all_caught_up(self) if self.shape[0] else self

    def parts(self) -> list[Table]:
        """Return parameter and state as a run without deferred tables has them now."""
        table = self.up_to_date()
        if is_stored_table(self.main):
            return [table.main, *table.others]
        return self._slots(table.main, list(table.others))

    def entries(self) -> list[jax.Array]:
        param = self.parts()[0]
        return param.entries() if is_stored_table(param) else [param]

    def todense(self) -> jax.Array:
        """Return the array (V, *row) that the dense optimizer has at this step."""
        self.check_single()
        if is_stored_table(self.main):
            return differentiable(
                self._now(*self._gathered(lambda x: x.todense()))[0], self.placeholder
            )
        return differentiable(self.parts()[0], self.placeholder)

    # --- parts ---------------------------------------------------------------------------

    def _gathered(
        self, read: Callable[[Table], jax.Array]
    ) -> tuple[jax.Array, list[jax.Array], jax.Array]:
        last = read(self.last)
        return read(self.main), [read(x) for x in self.others], last.reshape(last.shape[0])

    def _slots(self, main: jax.Array, others: list[jax.Array]) -> list[jax.Array]:
        """Return the rows (n, ...) of parameter and state, in the order of the leaves."""
        size = math.prod(self.shape[1:])
        main = main.reshape(main.shape[0], math.prod(main.shape[1:]))
        columns = (main[:, i : i + size] for i in range(0, main.shape[1], size))
        interleaved = (x.reshape(main.shape[0], *self.shape[1:]) for x in columns)
        separate = iter(others)
        return [next(separate if alone else interleaved) for alone in (False, *self.apart)]

    def _now(
        self, main: jax.Array, others: list[jax.Array], last: jax.Array
    ) -> list[jax.Array]:
        """Return what rows have become since `last`."""
        if self.form is None:
            return self._slots(main, others)
        lines = gather_rows(self._checked_lines(), last % self.lines.shape[0])
        # Without the barrier XLA gathers the lines again for each entry.
        main, lines, *others = lax.optimization_barrier((main, lines, *others))
        entries = self._slots(main, others)
        new = skipped(self.form, lines, [x.astype(lines.dtype) for x in entries])
        return [x.astype(y.dtype) for x, y in zip(new, entries, strict=True)]

    def _checked_lines(self) -> jax.Array:
        """Return the coefficients; nan if something mapped arithmetic over the table's leaves.

        Arithmetic on rows that are behind, or on coefficients, has no meaning. Coefficients for
        a row that is caught up are known, so others show that arithmetic changed the leaves,
        even if it changed the floating ones alone.

        Raises:
            ValueError: in place of nan, outside of jit.
        """
        assert self.form is not None
        clock, is_sealed = unsealed(self.sealed_clock)
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


@jax.jit
def _all_caught_up(table: DeferredTable) -> DeferredTable:
    rows = table.shape[0]
    if is_stored_table(table.main):
        return table._caught_up(0, rows)
    count = min(rows, _BLOCK)

    def block(i: jax.Array, table: DeferredTable) -> DeferredTable:
        return table._caught_up(jnp.minimum(i * count, rows - count), count)

    return lax.fori_loop(0, -(-rows // count), block, table)


def _side_by_side(slots: Sequence[jax.Array]) -> jax.Array:
    """Return arrays (n, ...) as one of the rows that are read together, (n, entries)."""
    return jnp.concatenate([x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in slots], 1)


def ring_of(rows: int) -> int:
    """Return W, by how many steps a row may be behind: a power of 2, 2√V or more.

    A step takes all W sets of coefficients one step further and catches up V / (W - 1) rows.
    The sum is least near W = √V where a row costs what a set does. A row costs a gather and a
    scatter of its entries, so W is greater: at most √V / 2 rows are caught up in a step.
    """
    return min(max(1 << math.ceil(math.log2(2 * math.sqrt(max(rows, 1)))), 64), 1 << 14)
