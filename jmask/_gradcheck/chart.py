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
one for its imaginary part. `Outputs` reads a function's result as such a vector in turn.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.types import HostArray, PyTree, Shape, Tensor, TensorLike
from jmask._gradcheck.message import Coordinate, GradcheckError, Setting
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.specified import todense, values_of, with_placeholder, with_values_of
from jmask._tensors.storage import is_sparse

KINDS = ("specified", "unspecified", "hidden")


def blocks(coordinates: Sequence[Coordinate]) -> list[HostArray]:
    """Return the indices of the coordinates of each path and kind that there are."""
    members: dict[tuple[str, str], list[int]] = {}
    for index, (path, kind, _) in enumerate(coordinates):
        for each in KINDS:
            members.setdefault((path, each), [])
        members[path, kind].append(index)
    return [np.array(indices) for indices in members.values() if indices]


# --- arguments ---------------------------------------------------------------------------


class Leaf:
    """One differentiable leaf of the arguments, in double precision.

    Attributes:
        positions: for each stored value the row-major number of its entry, -1 for none.
        unspecified: the numbers of the entries that are not stored.
        point: its coordinates.
    """

    def __init__(self, path: str, x: TensorLike):
        values = jnp.asarray(values_of(x))
        self.is_complex = jnp.iscomplexobj(values)
        values = values.astype(jnp.complex128 if self.is_complex else jnp.float64)
        self.path, self.tensor = path, with_values_of(x, values)
        self.shape, self.stored_shape = tuple(self.tensor.shape), values.shape
        self.positions = stored_positions(self.tensor)
        self.unspecified = np.setdiff1d(np.arange(math.prod(self.shape)), self.positions)
        others = jnp.zeros(self.unspecified.size, values.dtype)
        self.point = np.asarray(reals_of(jnp.concatenate([values.ravel(), others])))

    def numbers(self, point: jax.Array | HostArray) -> tuple[jax.Array, jax.Array]:
        """Return the stored values at a point, and the entries that are not stored."""
        if self.is_complex:
            point = jax.lax.complex(point[::2], point[1::2])
        stored, others = jnp.split(jnp.asarray(point), [self.positions.size])
        return stored.reshape(self.stored_shape), others

    def at(self, point: jax.Array | HostArray) -> Tensor:
        """Return the tensor with the stored values of a point."""
        return with_values_of(self.tensor, self.numbers(point)[0])

    def with_placeholder(self, point: jax.Array) -> Tensor:
        """Return the tensor with a placeholder, so that JAX sees the other entries too."""
        x, (_, others) = self.at(point), self.numbers(point)
        if not is_tensor(x):
            return x
        placeholder = jnp.zeros(math.prod(self.shape), others.dtype)
        placeholder = placeholder.at[self.unspecified].set(others)
        return with_placeholder(x, placeholder.reshape(self.shape))

    def with_every_entry(self, point: HostArray) -> Tensor:
        """Return a tensor of the same kind that stores every entry, zeros included."""
        stored, others = self.numbers(point)
        full, positions = self._full
        dense, is_entry = np.zeros(positions.size, others.dtype), self.positions >= 0
        np.add.at(dense, self.positions[is_entry], np.ravel(stored)[is_entry])
        dense[self.unspecified] = others
        values = dense[positions].reshape(values_of(full).shape)
        return with_values_of(full, jnp.asarray(values))

    def near(self, point: HostArray) -> Tensor:
        """Return the tensor at a point, with an unspecified entry stored where it has moved."""
        moves = np.any(self.numbers(point)[1])
        return self.with_every_entry(point) if moves else self.at(point)

    @functools.cached_property
    def _full(self) -> tuple[Tensor, HostArray]:
        full = fully_specified(self.tensor)
        return full, stored_positions(full)

    def coordinates(self) -> list[Coordinate]:
        parts = ("real part of ", "imaginary part of ") if self.is_complex else ("",)
        hidden = "under the mask" if isinstance(self.tensor, MaskedTensor) else "padding"
        times = np.bincount(self.positions + 1, minlength=1)
        names = []
        for number, position in enumerate(self.positions.tolist()):
            stored = f"stored value {index_of(number, self.stored_shape)}"
            if position < 0:
                names.append(("hidden", f"{stored}, which is {hidden}"))
                continue
            which = f", {stored}" if times[position + 1] > 1 else ""
            names.append(("specified", f"entry {index_of(position, self.shape)}{which}"))
        for position in self.unspecified.tolist():
            entry = f"entry {index_of(position, self.shape)}, which is not specified"
            names.append(("unspecified", entry))
        return [Coordinate(self.path, k, part + entry) for k, entry in names for part in parts]


class Chart:
    """The arguments of a function by one real vector: `point` is where they are.

    Raises:
        ValueError: if they hold nothing that is differentiable.
    """

    def __init__(self, args: PyTree, name: str = "args"):
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(args, is_leaf=is_tensor)
        self._leaves = [
            Leaf(f"{name}{jax.tree_util.keystr(path)}", x) if is_differentiable(x) else x
            for path, x in flat
        ]
        leaves = [x for x in self._leaves if isinstance(x, Leaf)]
        if not leaves:
            raise ValueError(
                f"`{name}` hold no floating or complex numbers, so there is no gradient to "
                "check."
            )
        self.point = np.concatenate([x.point for x in leaves])
        self.coordinates = [c for x in leaves for c in x.coordinates()]

    def arguments(
        self,
        point: jax.Array | HostArray,
        build: Callable[[Leaf, jax.Array | HostArray], Tensor],
    ) -> PyTree:
        """Return the arguments at a point; `build` makes each tensor, as methods of `Leaf`."""
        leaves, start = list(self._leaves), 0
        for number, x in enumerate(leaves):
            if isinstance(x, Leaf):
                stop = start + x.point.size
                leaves[number] = build(x, point[start:stop])
                start = stop
        return jax.tree.unflatten(self._treedef, leaves)


# --- results -----------------------------------------------------------------------------


class Outputs:
    """The differentiable leaves of a result, read as a real vector at entries that exist.

    A `MaskedTensor` has its valid entries, and in masked semantics a sparse tensor those that it
    stores.

    Attributes:
        narrow: for each path the dtype, if it is less than double precision.
    """

    def __init__(self, result: PyTree, setting: Setting):
        flat, self._structure = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_tensor)
        self._setting = setting
        self._masks: dict[int, HostArray] = {}
        self.coordinates: list[Coordinate] = []
        for number, (key, y) in enumerate(flat):
            if not is_differentiable(y):
                continue
            path, dtype = f"output{jax.tree_util.keystr(key)}", jnp.result_type(values_of(y))
            mask = self._masks[number] = mask_of(y, setting.masked)
            is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
            parts = ("real part of ", "imaginary part of ") if is_complex else ("",)
            for entry in np.argwhere(mask).tolist():
                for part in parts:
                    name = f"{part}entry {tuple(entry)}"
                    self.coordinates.append(Coordinate(path, "specified", name))
        if not self._masks:
            raise ValueError(
                "`fun` returns no floating or complex numbers, so there is no gradient to check."
            )

    def vector(self, result: PyTree) -> jax.Array:
        leaves = jax.tree.leaves(result, is_leaf=is_tensor)
        entries = []
        for number, mask in self._masks.items():
            y = todense(leaves[number], masked_grad=self._setting.masked)
            entries.append(reals_of(y.ravel()[np.flatnonzero(mask)]))
        return jnp.concatenate(entries)

    def checked(self, result: PyTree, what: str) -> HostArray:
        """Return the vector, or a `GradcheckError` if `what` changed a structure or a mask."""
        flat, structure = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_tensor)
        if structure != self._structure:
            raise GradcheckError(
                f"{what} changed the structure of the output from {self._structure} to "
                f"{structure}: such a function has no derivative here."
            )
        for number, mask in self._masks.items():
            key, y = flat[number]
            path, shape = f"output{jax.tree_util.keystr(key)}", tuple(np.shape(y))
            if shape != mask.shape:
                raise GradcheckError(
                    f"{what} changed the shape of {path} from {mask.shape} to {shape}: such a "
                    "function has no derivative here."
                )
            for entry in np.argwhere(mask_of(y, self._setting.masked) != mask)[:1].tolist():
                raise GradcheckError(
                    f"{what} changed the mask of {path}, at entry {tuple(entry)} first: the "
                    f"function has no derivative here.\n{self._setting.fields("mask")}"
                )
        return np.asarray(self.vector(result))


# --- entries -----------------------------------------------------------------------------


def is_differentiable(x: object) -> bool:
    """Decide whether `x` is a tensor, array or number of floating or complex dtype."""
    if is_tensor(x):
        return bool(jnp.issubdtype(values_of(x).dtype, jnp.inexact))
    numbers = isinstance(x, jax.Array | np.ndarray | np.generic | float | complex)
    return numbers and bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def reals_of(numbers: jax.Array) -> jax.Array:
    """Return numbers (n,) in double precision as real coordinates."""
    if jnp.iscomplexobj(numbers):
        numbers = jnp.stack([numbers.real, numbers.imag], axis=-1).ravel()
    return numbers.astype(jnp.float64)


def index_of(number: int, shape: Shape) -> Shape:
    return tuple(map(int, np.unravel_index(number, shape)))


def stored_positions(x: TensorLike) -> HostArray:
    """Return for each stored value the row-major number of its entry; -1 where it is none.

    Raises:
        ValueError: if one stored value stands for several entries.
    """
    # A tensor is linear in its stored values, so the transposed map reads a dense array at them.
    shape = values_of(x).shape
    dense = lambda values: todense(with_values_of(x, values))
    _, read = jax.vjp(dense, jnp.zeros(shape))
    times, numbers = (
        np.ravel(read(cotangent)[0]).astype(int)
        for cotangent in (jnp.ones(x.shape), jnp.arange(float(math.prod(x.shape))).reshape(x.shape))
    )
    if (times > 1).any():
        raise ValueError(
            f"a {type(x).__name__} of shape {x.shape} stores one value for several entries: its "
            f"data of shape {shape} broadcasts over batch dimensions {x.shape[: x.n_batch]}."
        )
    return np.where(times == 1, numbers, -1)


def mask_of(y: TensorLike, masked: bool) -> HostArray:
    """Return the entries of an output that exist in these semantics."""
    if not (isinstance(y, MaskedTensor) or (masked and is_tensor(y))):
        return np.ones(np.shape(y), bool)
    return np.asarray(todense(with_values_of(y, jnp.ones(values_of(y).shape)))) > 0


def fully_specified(x: Tensor) -> Tensor:
    """Return a tensor of ones, of the kind of `x`, that stores every entry."""
    if isinstance(x, MaskedTensor):
        storage = fully_specified(x.storage)
        return joined(storage, jnp.ones(values_of(storage).shape, bool))
    ones = jnp.ones(x.shape, x.dtype)
    if not is_sparse(x):
        return ones
    if isinstance(x, RowSparse):
        return RowSparse(np.arange(x.shape[0]), ones, x.shape, coalesced=True)
    return type(x).fromdense(ones, n_batch=x.n_batch, n_dense=x.n_dense)
