"""Gradients and parameters at the border: refused, or in the form that steps take."""

import dataclasses
from typing import TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.array_types import fewer, is_narrow, minus_zero
from jmask._base.row_ids import id_dtype
from jmask._base.shardings import explicit_mesh, on_every_device, typed_like
from jmask._base.types import Argument, Gradient, KeyPath, PyTree, PyTreeDef, RowArray, Table
from jmask._base.validation import (
    KEEP_ARRAYS,
    Model,
    abstract_leaf,
    is_on_host,
    leaf_name,
    not_an_array,
    not_on_device,
)
from jmask._kernels.coalesce import unique_slots
from jmask._kernels.rows import set_rows
from jmask._tables.rows_at import add_to_dense, shape_of
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import coordinates, is_sparse, stored_values

ORDER = "tx.update(grads, opt_state, params)"
_GRADIENTS = RowSparse, MaskedTensor, BCOO, BCSR


def is_gradient_leaf(x: object) -> bool:
    """Decide whether `x` is a sparse or masked gradient: one leaf, not a subtree."""
    return isinstance(x, _GRADIENTS)


def has_gradients(tree: PyTree) -> bool:
    """Decide whether a tree has a sparse or masked gradient among its leaves."""
    return any(map(is_gradient_leaf, jax.tree.leaves(tree, is_leaf=is_gradient_leaf)))


def is_full(x: object) -> bool:
    """Decide whether a parameter is a `RowSparse` that stores all its rows."""
    return isinstance(x, RowSparse) and x.nse >= x.row_count


def model_of(params: PyTree, order: str = ORDER) -> Model:
    """Return the parameters, which may be a whole model, and what else it holds.

    Raises:
        TypeError: for a parameter that is neither an array nor a `RowSparse` with all rows.
    """
    model = Model(params, is_gradient_leaf)
    for path, leaf in jax.tree.leaves_with_path(model.parameters, is_leaf=is_gradient_leaf):
        if is_gradient_leaf(leaf) and not is_full(leaf):
            raise TypeError(
                f"{leaf_name('params', path)} is a {type(leaf).__name__}: parameters must be "
                "dense arrays, or RowSparse with all rows stored (gradients may be sparse or "
                f"masked). Use its dense form. The order is {order}."
            )
        array = abstract_leaf(leaf)
        if not is_full(leaf) and array is None:
            advice = f"pass eqx.filter(model, eqx.is_inexact_array), or {KEEP_ARRAYS}"
            raise not_an_array(leaf_name("params", path), leaf, advice)
        if is_on_host(array):
            raise not_on_device(leaf_name("params", path))
    return model


def check_transformation(name: str, tx: object, order: str) -> None:
    """Refuse what is no optax transformation, and say how the call is written."""
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise TypeError(
            f"`{name}` must be an optax transformation, got {type(tx).__name__}: write for "
            f"example {order}."
        )


def _check_fits(path: KeyPath, update: Gradient, param: jax.Array) -> None:
    """Refuse an update that its parameter, at `path` in both trees, cannot take."""
    name, like, shape = leaf_name("updates", path), shape_of(param), tuple(jnp.shape(update))
    dtype = update.dtype if hasattr(update, "dtype") else jnp.result_type(update)
    if shape != like.shape:
        raise ValueError(
            f"{name} of shape {shape} does not fit its parameter of shape {like.shape}."
        )
    is_a = lambda kind: [jnp.issubdtype(x, kind) for x in (dtype, like.dtype)]
    advice = ""
    if is_a(jnp.bool_) == [True, False]:
        advice = "is it a mask?"
    elif is_a(jnp.complexfloating) == [True, False]:
        advice = (
            "complex gradients of real parameters are not supported. Take the real part, "
            "`.real`, if that is meant."
        )
    elif is_gradient_leaf(update) and is_a(jnp.inexact) == [True, False]:
        advice = (
            "an update would be cut to integers. Store the parameter as a floating array, "
            "`.astype(jnp.float32)`."
        )
    if advice:
        raise TypeError(f"{name} is {dtype} and its parameter {like.dtype}: {advice}")


# --- not row local ------------------------------------------------------------------------
#
# The error of a transformation that `lazy` cannot lift, with what to do instead.


class NotRowLocalError(ValueError):
    """Why `lazy` refuses a transformation, and what to do instead."""

    def __init__(self, why: str, advice: str | None = None):
        advice = advice or (
            "Chain jmask.densify() before it to apply it to the dense gradient, keep it for "
            "the dense parameters with optax.partition, or use an optimizer that treats every "
            "row by itself."
        )
        super().__init__(f"jmask.lazy cannot wrap this optax transformation: {why}. {advice}")


# --- masked gradient ----------------------------------------------------------------------
#
# Masked gradients as optimizers take them: rows or an array, and which entries are valid.
#
#     MaskedTensor on                     gradient                 valid
#     dense storage (V, D)                array, 0 where masked    (V, D)
#     RowSparse with n rows               RowSparse, coalesced     (n, D)
#     BCOO, BCSR with nse entries         RowSparse of their rows  (min(nse, V), D)
#
# A plain BCOO is one of these whose entries are all valid: it updates the entries of a table
# that it stores, as a RowSparse does the rows.
#
# A parameter, and the state that belongs to it, moves where an entry is valid. Elsewhere the
# update is -0.0, the one number that changes nothing when added: -0.0 + 0.0 would be 0.0.


def check_gradients(name: str, updates: PyTree) -> None:
    """Refuse leaves that are no arrays, naming the first."""
    for path, x in jax.tree.leaves_with_path(updates, is_leaf=is_gradient_leaf):
        if not is_gradient_leaf(x) and abstract_leaf(x) is None:
            advice = "gradients are those of jmask.grad or jax.grad"
            raise not_an_array(leaf_name(name, path), x, advice)


def as_gradients(updates: PyTree) -> PyTree:
    """Return the tree with each BCOO as masked rows, of which the entries that it stores exist.

    Their ids refuse arithmetic, which optax maps over the indices of a BCOO without a word.
    """
    check_gradients("updates", updates)

    def entries(path: KeyPath, x: Gradient | BCOO | BCSR) -> Gradient:
        if not isinstance(x, BCOO | BCSR):
            return x
        if isinstance(x, BCSR):
            raise TypeError(
                f"{leaf_name('updates', path)} is a BCSR: of sparse gradients optimizers take "
                "RowSparse, MaskedTensor and BCOO, `x.to_bcoo()`."
            )
        if not jnp.issubdtype(x.indices.dtype, jnp.integer):
            raise TypeError(
                f"{leaf_name('updates', path)} is a BCOO with indices of {x.indices.dtype}: "
                "something mapped arithmetic over its leaves. Put the optax transformation "
                "inside jmask.lazy(...)."
            )
        masked = MaskedTensor(x)
        if not x.n_sparse:
            return masked
        storage: Argument = masked.storage  # a BCOO, too
        rows = _entries_as_rows(storage, storage.data, masked.valid)
        return MaskedTensor.tree_unflatten(None, rows)

    return jax.tree.map_with_path(entries, updates, is_leaf=is_gradient_leaf)


def gradient_and_valid(gradient: Gradient) -> tuple[Table, jax.Array | None]:
    """Split a gradient leaf into an array or coalesced `RowSparse`, and its valid entries."""
    if is_row_sparse(gradient):
        return coalesced(gradient), None
    if not isinstance(gradient, MaskedTensor):
        return gradient, None
    storage, valid = gradient.storage, gradient.valid
    if not gradient.ndim:
        raise ValueError(
            "a MaskedTensor gradient needs at least one dimension, got a scalar: use a "
            "plain array for the gradient of a scalar parameter."
        )
    values = jnp.where(valid, stored_values(storage), 0)
    if not is_sparse(storage):
        return values, valid
    if is_row_sparse(storage):
        return storage.with_values(values), valid
    return _entries_as_rows(storage, values, valid)


def is_entries(x: object) -> TypeGuard[RowSparse]:
    """Decide whether a gradient is of single entries: ids number all dimensions of a table."""
    return is_row_sparse(x) and x.leading > 1 and not x.row


def with_whole_rows(updates: PyTree, *, lines: bool = False) -> PyTree:
    """Return gradients of entries (V, D) as rows, of zeros but for an entry each.

    Args:
        lines: whether to return rows of packed tables as lines, too.
    """

    def whole(x: Gradient) -> Gradient:
        if not is_row_sparse(x) or not (is_entries(x) or (lines and x.width)):
            return x
        width, ids = x.width or 1, x.flat().row_ids()
        each = x.shape[-1] // width
        place = lax.broadcasted_iota(ids.dtype, (x.nse, each, width), 1)
        rows = x.values.reshape(x.nse, 1, width)
        values = jnp.where(place == (ids % each)[:, None, None], rows, 0)
        values = values.reshape(x.nse, each * width)
        return RowSparse.from_rows(
            ids // each, values, x.shape, coalesced=False, leading=x.leading - 1
        )

    return jax.tree.map(whole, updates, is_leaf=is_gradient_leaf)


def dense_gradient(gradient: Gradient, param: Table | None = None) -> jax.Array:
    """Return a gradient as an array, zero where it is masked or stores nothing.

    Where the type of its parameter says which devices have which rows, so does its own: no
    device need have all of the table.
    """
    if isinstance(gradient, MaskedTensor):
        return gradient.to_tensor(0)
    if not is_row_sparse(gradient):
        return gradient
    if isinstance(param, jax.Array) and gradient.leading == 1 and explicit_mesh(param):
        zeros = jnp.zeros_like(param, dtype=gradient.dtype)  # outside of jit where `param` is
        return add_to_dense(typed_like(zeros, param), gradient)
    return gradient.todense()


def with_wide_rows(gradients: PyTree) -> PyTree:
    """Return gradients with 16-bit rows in float32 where rows of equal ids are to be summed.

    An optimizer computes with the sums, and what it makes of them is rounded once, where it is
    stored: a sum that is rounded first loses what is left of 1 - 1.003 in bfloat16. Unique rows
    keep their dtype, and optax's optimizers return updates of the same.
    """
    is_16_bit_sum = lambda x: is_row_sparse(x) and x.order == "any" and is_narrow(x.dtype)
    widened = lambda x: x.widened() if is_16_bit_sum(x) else x
    return jax.tree.map(widened, gradients, is_leaf=is_gradient_leaf)


_G = TypeVar("_G", RowSparse, Gradient)


def coalesced(gradient: _G) -> _G:
    """Return the gradient with the rows of equal ids summed, one without such rows as it is."""
    if is_row_sparse(gradient) and gradient.order == "any":
        return gradient.coalesce()
    return gradient


def _entries_as_rows(
    storage: BCOO | BCSR, values: jax.Array, valid: jax.Array
) -> tuple[RowSparse, RowArray]:
    """Turn entries (nse,) at (row, ...) into coalesced rows and their valid entries."""
    rows, row = storage.shape[0], tuple(storage.shape[1:])
    values = jnp.where(_in_promised_order(storage), values, jnp.nan).astype(values.dtype)
    # Equal ids are found by a sort, and JAX sorts no array that is sharded over devices.
    first, *others = map(on_every_device, coordinates(storage))
    values, valid = on_every_device(values), on_every_device(valid)
    slots = fewer(values.shape[0], rows)
    if slots == 0:
        return RowSparse.zeros(storage.shape, values.dtype), jnp.zeros((0, *row), bool)
    entry = valid.reshape(valid.shape[0], -1).any(1)
    ids, slot = unique_slots(jnp.where(entry, first, rows), slots, rows)
    places = (slot, *others)
    gradient = jnp.zeros((slots, *row), values.dtype).at[places].set(values, mode="drop")
    kept = jnp.zeros((slots, *row), bool).at[places].set(valid, mode="drop")
    return RowSparse(ids, gradient, storage.shape, coalesced=True), kept


def _in_promised_order(storage: BCOO | BCSR) -> jax.Array | bool:
    """Decide whether indices are sorted and unique still: arithmetic may have changed them."""
    if not (isinstance(storage, BCOO) and storage.indices_sorted and storage.unique_indices):
        return True
    before, after = storage.indices[:-1], storage.indices[1:]
    first = jnp.argmax(before != after, axis=1)[:, None]
    grows = jnp.take_along_axis(before < after, first, axis=1)[:, 0]
    is_padding = (after >= jnp.asarray(storage.shape[: storage.n_sparse])[None]).any(1)
    return jnp.all(grows | is_padding)


def unchanged_where_masked(update: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Return the update of a parameter, -0.0 where the gradient is masked."""
    return keep_valid(update, minus_zero(jnp.result_type(update)), valid)


def keep_valid(new: jax.Array, old: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Return `new` where valid, `old` elsewhere.

    They have the shape of `valid` (n, *row), or one entry for each of its rows: (n,), (n, 1).
    """
    if valid is None:
        return new
    shape = jnp.shape(new)
    valid = valid.any(tuple(range(len(shape), valid.ndim)))
    merged = tuple(d for d, size in enumerate(shape) if size == 1 != valid.shape[d])
    valid = valid.any(merged, keepdims=True)
    if valid.shape != shape:
        raise NotRowLocalError(
            f"its state of shape {shape} matches neither the entries nor the rows of a "
            "masked gradient"
        )
    like = jax.typeof(old if jnp.ndim(old) else new)  # a gradient may lie elsewhere
    return jnp.where(typed_like(valid, like), typed_like(new, like), old)


# --- fit ----------------------------------------------------------------------------------
#
# Gradients and parameters in the form that optimizers take, aligned once for each step.
#
#     gradients   {"t": BCOO, "w": array}          masked rows of "t", array
#     parameters  Model(t=RowSparse of all rows,   array, array, None
#                       w=array, activation=relu)
#
# New parameters get the form of those that were given: `Fit.as_given`.


@dataclasses.dataclass(frozen=True)
class Fit:
    """Gradients aligned with the parameters that they belong to."""

    gradients: PyTree  # a tree of arrays, `RowSparse` and `MaskedTensor`
    params: PyTree  # arrays in a tree of the same structure, or None
    model: Model  # what was given as parameters

    @classmethod
    def of(
        cls, gradients: PyTree, params: PyTree, order: str = ORDER, *, partial: bool = False
    ) -> "Fit":
        """Return gradients, and parameters that they fit, or None.

        Args:
            partial: whether gradients may be None where parameters are not.
        """
        fit = dataclasses.replace(cls.alone(params, order), gradients=as_gradients(gradients))
        if params is None:
            return fit
        is_leaf = lambda x: x is None or is_gradient_leaf(x)
        given: list[tuple[KeyPath, Gradient | None]]
        given = jax.tree.leaves_with_path(fit.gradients, is_leaf=is_leaf)
        have: PyTreeDef = jax.tree.structure(fit.gradients, is_leaf=is_leaf)
        expected: PyTreeDef = jax.tree.structure(fit.params, is_leaf=is_leaf)
        if have != expected:
            raise ValueError(
                f"`updates` and `params` must have the same structure, got {have} and "
                f"{expected}. The order is {order}."
            )
        arrays: list[jax.Array | None] = jax.tree.leaves(fit.params, is_leaf=is_leaf)
        for (path, gradient), param in zip(given, arrays, strict=True):
            if param is not None and gradient is not None:
                _check_fits(path, gradient, param)
            elif (gradient is None) != (param is None) and not partial:
                missing = "updates" if gradient is None else "params"
                raise ValueError(
                    f"{leaf_name(missing, path)} is None, and its counterpart is not: give the "
                    "parameter a gradient, or keep it out with optax.partition or "
                    f"eqx.partition. The order is {order}."
                )
        return fit

    @classmethod
    def alone(cls, params: PyTree, order: str = ORDER) -> "Fit":
        """Return parameters without gradients: arrays, also of a `RowSparse` of all rows."""

        def as_array(x: Table) -> jax.Array:
            if not isinstance(x, RowSparse):
                return x
            rows = x.coalesce().flat()
            # Written, not added to zeros: -0.0 stays.
            zeros = jnp.zeros(rows.shape, rows.dtype)
            return set_rows(zeros, rows.row_ids(), rows.values, "sorted").reshape(x.shape)

        model = model_of(params, order)
        return cls((), jax.tree.map(as_array, model.parameters, is_leaf=is_full), model)

    def dense(self, *, but_stacks: bool = False) -> PyTree:
        """Return the gradients as arrays, but with `but_stacks` not those of stacked tables."""

        def dense(gradient: Gradient, param: Table | None = None) -> Gradient:
            is_stack = is_row_sparse(gradient) and gradient.leading > 1
            return gradient if but_stacks and is_stack else dense_gradient(gradient, param)

        params = () if self.params is None else (self.params,)
        return jax.tree.map(dense, self.gradients, *params, is_leaf=is_gradient_leaf)

    def as_given(self, new: PyTree) -> PyTree:
        """Return new parameters in the form they had: a model, or a `RowSparse` of all rows."""

        def stored(old: Table, x: jax.Array) -> Table:
            if not is_full(old):
                return x
            ids = jnp.arange(old.shape[0], dtype=id_dtype(old.shape[0]))
            return RowSparse.from_rows(ids, x, old.shape, coalesced=True)

        is_leaf = lambda x: is_full(x) or x is None
        new = jax.tree.map(stored, self.model.parameters, new, is_leaf=is_leaf)
        return self.model.with_parameters(new)
