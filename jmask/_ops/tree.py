"""Arithmetic on whole gradients, leaf by leaf: `jmask.tree`, whose page says what it is for."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import joint_dtype
from jmask._base.row_ids import hide
from jmask._base.shardings import rows_in_any_order, varying_alike, varying_axes, varying_over
from jmask._base.types import Function, PyTree, Scalar, Table, Tensor
from jmask._base.validation import abstract_leaf, check_flag, check_leaves, shown
from jmask._kernels.sharded_rows import Exchange, summed_over_rows
from jmask._ops.formulas import root_of_sums, sums_of_squares
from jmask._tensors.masked_tensor import MaskedTensor, as_masked_tensor, as_tensor, is_tensor
from jmask._tensors.methods import library
from jmask._tensors.row_sparse import is_row_sparse
from jmask._tensors.storage import stored_values


def add(tree: PyTree, *others: PyTree, like: PyTree | None = None) -> PyTree:
    """Return the sum of trees of one structure, leaf by leaf.

    Args:
        tree: arrays, `RowSparse` and `MaskedTensor`; None leaves stay.
        *others: trees of the same structure. A dense and a row-sparse leaf add to a dense
            one.
        like: a tree whose row-sparse leaves give the capacity of the result's, and the type
            that a carry of `lax.scan` has to keep; by default all rows fit.

    Raises:
        ValueError: if structures or shapes differ, or more different rows come together
            than the capacity of `like`. Under jit the values of that leaf are nan instead.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> g = {"t": jmask.RowSparse([1], jnp.array([2.]), (3,))}
        >>> jmask.tree.add(g, g), jmask.tree.add(g, g, like=g)
        ({'t': RowSparse(float32[3], nse=2)}, {'t': RowSparse(float32[3], nse=1)})
    """

    def sum_of(x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            raise ValueError(
                f"`tree`: leaves of shapes {x.shape} and {y.shape} cannot be added."
            )
        return library().numpy.add(x, y)

    def within_capacity(x: Tensor, like: Tensor) -> Tensor:
        if not is_row_sparse(x) or not is_row_sparse(like):
            return x
        x = x.coalesce(nse=like.nse)
        is_any = like.order == "any"  # a carry keeps its type, of which `order` is a part
        return x.with_leaves(x.index_leaf, x.values, order="any") if is_any else x

    for other in others:
        tree = _map(sum_of, tree, other)
    return tree if like is None else _map(within_capacity, tree, like)


def scale(scalar: Scalar, tree: PyTree) -> PyTree:
    """Return tree with every entry, floating or complex, multiplied by `scalar`, dtypes kept.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.tree.scale(2, jmask.RowSparse([1], jnp.array([2.]), (3,))).values
        Array([4.], dtype=float32)
    """
    array = abstract_leaf(scalar)
    if array is None or array.shape or not jnp.issubdtype(array.dtype, jnp.number):
        raise TypeError(f"`scalar` must be a number, got {shown(scalar)}.")
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)

    def scaled(x: Tensor) -> Tensor:
        if not jnp.issubdtype(x.dtype, jnp.complexfloating if is_complex else jnp.inexact):
            raise TypeError(
                f"`tree` holds {x.dtype}, which a multiple by `scalar` {array.dtype} may not "
                "be: cast it by x.astype(...)."
            )
        return library().numpy.multiply(x, jnp.asarray(scalar, x.dtype))

    return _map(scaled, tree)


def mean(trees: Sequence[PyTree], like: PyTree | None = None) -> PyTree:
    """Return the mean of trees of one structure, such as the gradients of microbatches.

    Args:
        trees: at least one.
        like: as in `add`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> g = jmask.RowSparse([1], jnp.array([2.]), (3,))
        >>> jmask.tree.mean([g, jmask.RowSparse.zeros((3,))]).todense()
        Array([0., 1., 0.], dtype=float32)
    """
    if not isinstance(trees, list | tuple):
        raise TypeError(f"`trees` must be a list of trees, got {type(trees).__name__}.")
    if not trees:
        raise ValueError("`trees` must hold at least one tree, got none.")
    return scale(1 / len(trees), add(*trees, like=like))


def merge(stacked: PyTree) -> PyTree:
    """Return the sum over axis 0 of what `lax.scan` or `jax.vmap` stacked.

    Args:
        stacked: a tree whose arrays have a leading axis of one size k; each `RowSparse` has
            k times n rows, which become the rows of one.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> gradient = jmask.grad(lambda table, ids: table[ids].sum())
        >>> batches = jnp.array([[1, 2], [2, 3]])
        >>> jmask.tree.merge(jax.vmap(gradient, (None, 0))(jnp.ones((9, 2)), batches))
        RowSparse(float32[9, 2], nse=4)
    """

    def merged(x: Table) -> Table:
        _refuse_others(x, "stacked")
        if not is_row_sparse(x):
            if not x.ndim:
                raise ValueError("`stacked` holds a scalar, which has no leading axis.")
            return jnp.sum(x, axis=0, dtype=x.dtype)
        ids, values = x.index_leaf, x.values
        if ids.ndim != 2:
            raise ValueError(
                "`stacked` must hold RowSparse tensors with one leading axis, as from "
                f"lax.scan or jax.vmap; got indices of shape {ids.shape}."
            )
        return x.with_leaves(*rows_in_any_order(ids, values), order="any")

    check_leaves("stacked", stacked)
    return _map(merged, stacked)


def norm(tree: PyTree, squared: bool = False) -> jax.Array:
    """Return the global norm: the root of the sum of the squares of all entries.

    Rows with equal indices are added first, so that the norm equals the dense gradient's;
    masked entries do not count. Accumulated in float32 at least. In a `shard_map` it is the
    norm of the part on this device: sum the gradient with `psum` first.

    Args:
        tree: arrays, `RowSparse` and `MaskedTensor`.
        squared: whether to return the sum, without the root.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> table = jmask.RowSparse([1, 1], jnp.array([[1.], [2.]]), (9, 1))
        >>> jmask.tree.norm({"table": table, "w": jnp.array([4.])})
        Array(5., dtype=float32)
    """
    check_flag("squared", squared)
    check_leaves("tree", tree)
    leaves = jax.tree.leaves(tree, is_leaf=is_tensor)
    sums = [_sums_of_squares(x) for x in leaves or [jnp.zeros(0)]]
    dtype = joint_dtype(jnp.float32, *(x for x, *_ in sums))
    added = lambda *parts: functools.reduce(jnp.add, [x.astype(dtype) for x in parts])
    total, root = root_of_sums(list(map(added, *sums)))
    return total if squared else root


def psum(tree: PyTree, axis_name: str | tuple[str, ...]) -> PyTree:
    """Return the sum over a mapped axis (`vmap`, `shard_map`), as `lax.psum`.

    The rows of a `RowSparse` of all devices are gathered and concatenated: n rows on each of k
    devices become k n rows everywhere, and nothing of the size of a table moves.

    Args:
        tree: arrays and `RowSparse`; a `MaskedTensor` is refused.
        axis_name: of one mapped axis, or a tuple of them.

    Raises:
        TypeError: if the tree holds a `MaskedTensor`, whose masks may differ.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> rows = lambda i: jmask.RowSparse(i, jnp.ones(1), (3,))
        >>> total = jax.vmap(lambda i: jmask.tree.psum(rows(i), "i").todense(), axis_name="i")
        >>> total(jnp.array([[0], [2]]))[0]
        Array([1., 0., 1.], dtype=float32)
    """
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)

    def summed(x: Table) -> Table:
        _refuse_others(x, "tree")
        if not is_row_sparse(x):
            return lax.psum(x, names)
        ids, values = varying_alike(x.flat().row_ids(), x.values)
        # An array that is typed as the same on all devices is added by each, as in `lax.psum`.
        manual = frozenset(names).intersection(jax.sharding.get_abstract_mesh().manual_axes)
        ids, values = (varying_over(manual, a) for a in (ids, values))
        to = "invarying" if varying_axes(values) else "varying"
        for name in names:
            ids, values = (lax.all_gather(a, name, tiled=True, to=to) for a in (ids, values))
        return x.with_leaves(hide(ids), values, order="any")

    return _map(summed, tree)


def pmean(tree: PyTree, axis_name: str | tuple[str, ...]) -> PyTree:
    """Return the mean over a mapped axis, as `lax.pmean`; see `psum`.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> jax.vmap(lambda x: jmask.tree.pmean(x, "i"), axis_name="i")(jnp.array([1., 3.]))
        Array([2., 2.], dtype=float32)
    """
    return scale(1 / lax.psum(1, axis_name), psum(tree, axis_name))


def size(tree: PyTree) -> int:
    """Return the number of entries of all leaves: of parameters, how many there are.

    A `RowSparse` has V times the entries of a row, whichever rows it stores.

    Args:
        tree: arrays, sparse and masked tensors, or shapes of these.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> table = jmask.RowSparse([1], jnp.ones((1, 2)), (5, 2))
        >>> jmask.tree.size({"table": table, "w": jnp.ones(3)})
        13
    """
    check_leaves("tree", tree)
    leaves = jax.tree.leaves(tree, is_leaf=is_tensor)
    return sum(math.prod(jnp.shape(x)) for x in leaves)


def map(  # noqa: A001
    f: Function, tree: PyTree, *rest: PyTree, is_leaf: Callable[[PyTree], bool] | None = None
) -> PyTree:
    """Apply a function to each leaf, as `jax.tree.map`, where tensors are leaves.

    It has the arguments and errors of `jax.tree.map`. `f` gets the `RowSparse`, `MaskedTensor`,
    BCOO or BCSR itself, and never their indices or masks; in the same place of each of `rest`
    may be a tensor of another kind or shape.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> g = {"t": jmask.RowSparse([1], jnp.array([2.]), (3,)), "w": jnp.ones(2)}
        >>> jmask.tree.map(lambda x, y: x * y, g, {"t": jnp.arange(3.), "w": 2.})
        {'t': RowSparse(float32[3], nse=1), 'w': Array([2., 2.], dtype=float32)}
    """
    return jax.tree.map(f, tree, *rest, is_leaf=_leaf_or(is_leaf))


def leaves(tree: PyTree, is_leaf: Callable[[PyTree], bool] | None = None) -> list[PyTree]:
    """Return the leaves, as `jax.tree.leaves`, where tensors are leaves.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.tree.leaves([jmask.RowSparse([1], jnp.array([2.]), (3,)), None, jnp.ones(1)])
        [RowSparse(float32[3], nse=1), Array([1.], dtype=float32)]
    """
    return jax.tree.leaves(tree, is_leaf=_leaf_or(is_leaf))


def _leaf_or(is_leaf: Callable[[PyTree], bool] | None) -> Callable[[PyTree], bool]:
    return lambda x: is_tensor(x) or (is_leaf is not None and is_leaf(x))


def _map(function: Function, tree: PyTree, *others: PyTree) -> PyTree:
    for each in (tree, *others):
        check_leaves("tree", each)
    leaves = [jax.tree.map(as_tensor, x, is_leaf=is_tensor) for x in (tree, *others)]
    structures = dict.fromkeys(str(jax.tree.structure(x, is_leaf=is_tensor)) for x in leaves)
    if len(structures) > 1:
        raise ValueError(
            f"`tree`: trees of one structure are expected, got {' and '.join(structures)}: "
            "these are gradients of different parameters."
        )
    return jax.tree.map(function, *leaves, is_leaf=is_tensor)


def _sums_of_squares(x: Tensor) -> Sequence[jax.Array]:
    """Return `sums_of_squares` of the entries of a tensor, in float32 at least."""
    if is_row_sparse(x):
        x = x.flat().widened()
        ids = x.row_ids()
        exchange = Exchange.of_sums(ids, x.values) if x.order == "any" else None
        if exchange is not None:
            return _squares_in_rounds(exchange, x.shape[0], ids, x.values)
    x = as_masked_tensor(as_tensor(x))
    return sums_of_squares(jnp.where(x.valid, stored_values(x), 0))


# In one program, so that outside of jit it is compiled once.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _squares_in_rounds(
    exchange: Exchange, count: int, ids: jax.Array, values: jax.Array
) -> Sequence[jax.Array]:
    return summed_over_rows(exchange, ids, values, count, sums_of_squares)


def _refuse_others(x: Tensor, argument: str) -> None:
    if is_tensor(x) and not is_row_sparse(x):
        advice = 'use jmask.cast_storage(x, "row_sparse"), or its dense form'
        if isinstance(x, MaskedTensor):
            advice = "masks may differ; sum x.to_tensor(0) and x.mask"
        raise TypeError(
            f"`{argument}` holds a {type(x).__name__}, which is not put side by side with "
            f"others: {advice}."
        )
