"""A chart of a function's arguments: one real vector whose coordinates are their entries.

    x = BCOO of [[-, 3],     stored values   3      4      0 (padding)
                 [4, -]]     entries         (0,1)  (1,0)  none
                             unspecified     (0,0)  (1,1)

    point   3, 4, 0, 0, 0    the stored values of each tensor, then its unspecified entries

| kind        | coordinate of                     | the derivative along it                  |
|-------------|-----------------------------------|------------------------------------------|
| specified   | a stored value that is an entry   | compared with differences                |
| unspecified | an entry that is not stored       | 0 in masked semantics, compared in plain |
| hidden      | padding, or a value under a mask  | 0, always                                |

An entry stored twice has two specified coordinates; a complex number has one for its real and
one for its imaginary part. `Outputs` reads the function's result as such a vector in turn.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.types import Function, HostArray, PyTree, PyTreeDef, Tensor, TensorLike
from jmask._gradcheck.message import Coordinate, GradcheckError, Setting
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.specified import todense, values_of, with_placeholder, with_values_of
from jmask._tensors.storage import is_entry, is_sparse

_NOTHING = "whose gradient could be checked."


class Leaf:
    """One differentiable leaf of the arguments, in double precision.

    Attributes:
        positions: for each stored value the row-major number of its entry, -1 for none.
        unspecified: the numbers of the entries that are not stored.
        point: its coordinates.
    """

    def __init__(self, path: str, x: TensorLike):
        values = jnp.asarray(values_of(x))
        values = values.astype(jnp.complex128 if jnp.iscomplexobj(values) else jnp.float64)
        self.path, self.tensor, self.values = path, with_values_of(x, values), values
        self.size = math.prod(self.tensor.shape)
        self.positions = stored_positions(self.tensor)
        self.unspecified = np.setdiff1d(np.arange(self.size), self.positions)
        others = jnp.zeros(self.unspecified.size, values.dtype)
        self.point = np.asarray(_reals(jnp.concatenate([values.ravel(), others])))

    # --- the tensor at a point ----------------------------------------------------------

    def at(self, point: jax.Array | HostArray) -> Tensor:
        """Return the tensor with the stored values of a point."""
        return with_values_of(self.tensor, self._numbers(point)[0])

    def with_placeholder(self, point: jax.Array | HostArray) -> Tensor:
        """Return it with a placeholder, by which JAX sees the unspecified entries too."""
        x, (_, others) = self.at(point), self._numbers(point)
        if not is_tensor(x):
            return x
        placeholder = jnp.zeros(self.size, others.dtype).at[self.unspecified].set(others)
        return with_placeholder(x, placeholder.reshape(x.shape))

    def with_every_entry(self, point: HostArray) -> Tensor:
        """Return a tensor of the same kind that stores every entry, zeros included."""
        stored, others = self._numbers(point)
        entries = self.positions >= 0
        dense = jnp.zeros(self.size, others.dtype).at[self.unspecified].set(others)
        dense = dense.at[self.positions[entries]].add(stored.ravel()[entries])
        full, positions = self._full
        return with_values_of(full, dense[positions].reshape(values_of(full).shape))

    def near(self, point: HostArray) -> Tensor:
        """Return the tensor at a point, with every entry where an unspecified one has moved."""
        moves = np.asarray(self._numbers(point)[1]).any()
        return self.with_every_entry(point) if moves else self.at(point)

    def _numbers(self, point: jax.Array | HostArray) -> tuple[jax.Array, jax.Array]:
        """Return the stored values and the unspecified entries at a point."""
        if jnp.iscomplexobj(self.values):
            point = jax.lax.complex(point[::2], point[1::2])
        stored, others = jnp.split(jnp.asarray(point), [self.values.size])
        return stored.reshape(self.values.shape), others

    @functools.cached_property
    def _full(self) -> tuple[Tensor, HostArray]:
        full = _fully_specified(self.tensor)
        return full, stored_positions(full)

    # --- its coordinates in words -------------------------------------------------------

    def coordinates(self) -> list[Coordinate]:
        hidden = "under the mask" if isinstance(self.tensor, MaskedTensor) else "padding"
        index = lambda number, shape: tuple(map(int, np.unravel_index(number, shape)))
        names, times = [], np.bincount(self.positions + 1, minlength=1)
        for number, position in enumerate(self.positions):
            stored = f"stored value {index(number, self.values.shape)}"
            if position < 0:
                names.append(("hidden", f"{stored}, which is {hidden}"))
                continue
            entry = f"entry {index(position, self.tensor.shape)}"
            names.append(
                ("specified", entry if times[position + 1] == 1 else f"{entry}, {stored}")
            )
        for position in self.unspecified:
            entry = f"entry {index(position, self.tensor.shape)}, which is not specified"
            names.append(("unspecified", entry))
        return _coordinates(self.path, names, jnp.iscomplexobj(self.values))


class Chart:
    """The arguments of a function by one real vector; `point` is where they are.

    Raises:
        ValueError: if they hold nothing that is differentiable.
    """

    def __init__(self, args: PyTree, name: str):
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(args, is_leaf=is_tensor)
        self._leaves = [
            Leaf(f"{name}{jax.tree_util.keystr(path)}", x) if _is_differentiable(x) else x
            for path, x in flat
        ]
        leaves = [x for x in self._leaves if isinstance(x, Leaf)]
        if not leaves:
            raise ValueError(f"`{name}` hold no floating or complex numbers {_NOTHING}")
        self.point = np.concatenate([x.point for x in leaves])
        self.coordinates = [name for x in leaves for name in x.coordinates()]

    def arguments(self, build: Function, point: jax.Array | HostArray) -> PyTree:
        """Return the arguments at a point; `build` is a method of `Leaf`, or like one."""
        leaves, start = list(self._leaves), 0
        for number, x in enumerate(leaves):
            if isinstance(x, Leaf):
                leaves[number] = build(x, point[start : start + x.point.size])
                start += x.point.size
        return jax.tree.unflatten(self._treedef, leaves)


class Outputs:
    """The differentiable leaves of a result, read as one real vector where entries exist.

    A `MaskedTensor` has its valid entries, and in masked semantics a sparse tensor those that
    it stores.
    """

    def __init__(self, result: PyTree, setting: Setting):
        self._treedef: PyTreeDef
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_tensor)
        self._setting = setting
        self._masks: dict[int, tuple[str, HostArray]] = {}
        self.coordinates: list[Coordinate] = []
        for number, (key, y) in enumerate(flat):
            if _is_differentiable(y):
                path, mask = f"output{jax.tree_util.keystr(key)}", _mask_of(y, setting.masked)
                self._masks[number] = path, mask
                names = [
                    ("specified", f"entry {tuple(at)}") for at in np.argwhere(mask).tolist()
                ]
                self.coordinates += _coordinates(path, names, jnp.iscomplexobj(values_of(y)))
        if not self._masks:
            raise ValueError(f"`fun` returns no floating or complex numbers {_NOTHING}")

    def vector(self, result: PyTree) -> jax.Array:
        leaves = jax.tree.leaves(result, is_leaf=is_tensor)
        entries = []
        for number, (_, mask) in self._masks.items():
            dense = todense(leaves[number], masked_grad=self._setting.masked)
            entries.append(_reals(dense.ravel()[np.flatnonzero(mask)]))
        return jnp.concatenate(entries)

    def checked(self, result: PyTree, what: str) -> HostArray:
        """Return the vector, or raise a `GradcheckError` if `what` changed where it is read."""
        change = self._change(result)
        if change:
            advice = self._setting.fields("mask")
            raise GradcheckError(
                f"{what} changed the {change}: the function has no derivative here.\n{advice}"
            )
        return np.asarray(self.vector(result))

    def _change(self, result: PyTree) -> str:
        leaves, treedef = jax.tree.flatten(result, is_leaf=is_tensor)
        if treedef != self._treedef:
            return f"structure of the output from {self._treedef} to {treedef}"
        for number, (path, mask) in self._masks.items():
            now = _mask_of(leaves[number], self._setting.masked)
            if now.shape != mask.shape:
                return f"shape of {path} from {mask.shape} to {now.shape}"
            for entry in np.argwhere(now != mask).tolist():
                return f"mask of {path}, at entry {tuple(entry)} first"
        return ""


def blocks(coordinates: Sequence[Coordinate]) -> list[HostArray]:
    """Return the indices of the coordinates of each kind and path, specified ones first."""
    kinds = ("specified", "unspecified", "hidden")
    members: dict[tuple[str, str], list[int]] = {}
    for index, x in enumerate(coordinates):
        members.setdefault((x.kind, x.path), []).append(index)
    return [np.array(members[key]) for key in sorted(members, key=lambda k: kinds.index(k[0]))]


def _coordinates(
    path: str, names: Sequence[tuple[str, str]], is_complex: bool
) -> list[Coordinate]:
    parts = ("real part of ", "imaginary part of ") if is_complex else ("",)
    return [Coordinate(path, kind, part + entry) for kind, entry in names for part in parts]


def _reals(numbers: jax.Array) -> jax.Array:
    """Return numbers (n,) as real coordinates in double precision."""
    if jnp.iscomplexobj(numbers):
        numbers = jnp.stack([numbers.real, numbers.imag], axis=-1).ravel()
    return numbers.astype(jnp.float64)


def _is_differentiable(x: object) -> bool:
    """Decide whether `x` is a tensor, array or number of floating or complex dtype."""
    if not (
        is_tensor(x) or isinstance(x, jax.Array | np.ndarray | np.generic | float | complex)
    ):
        return False
    return bool(jnp.issubdtype(jnp.result_type(values_of(x)), jnp.inexact))


def stored_positions(x: TensorLike) -> HostArray:
    """Return for each stored value the row-major number of its entry; -1 where it is none.

    Raises:
        ValueError: if one stored value stands for several entries.
    """
    shape, batch = values_of(x).shape, getattr(x, "n_batch", 0)
    if shape[:batch] != x.shape[:batch]:
        raise ValueError(
            f"a {type(x).__name__} of shape {x.shape} stores one value for several entries: "
            f"its data of shape {shape} broadcasts over batch dimensions."
        )
    # `todense` is linear in the stored values: its transpose reads a dense array at each.
    _, read = jax.vjp(lambda values: todense(with_values_of(x, values)), jnp.zeros(shape))
    numbers = jnp.arange(1.0, math.prod(x.shape) + 1).reshape(x.shape)
    positions = np.ravel(read(numbers)[0]).astype(int) - 1
    if is_sparse(x) and not batch:  # JAX wraps negative indices, which are padding here
        positions[~np.ravel(is_entry(x))] = -1
    return positions


def _mask_of(y: TensorLike, masked: bool) -> HostArray:
    """Return the entries of an output that exist in these semantics."""
    if not (isinstance(y, MaskedTensor) or (masked and is_tensor(y))):
        return np.ones(np.shape(y), bool)
    return np.asarray(todense(with_values_of(y, jnp.ones(values_of(y).shape)))) > 0


def _fully_specified(x: Tensor) -> Tensor:
    """Return a tensor of ones, of the kind of `x`, that stores every entry."""
    if isinstance(x, MaskedTensor):
        storage = _fully_specified(x.storage)
        return joined(storage, jnp.ones(values_of(storage).shape, bool))
    ones = jnp.ones(x.shape)
    if not is_sparse(x):
        return ones
    if isinstance(x, RowSparse):
        return RowSparse(np.arange(x.shape[0]), ones, x.shape, coalesced=True)
    return type(x).fromdense(ones, n_batch=x.n_batch, n_dense=x.n_dense)
