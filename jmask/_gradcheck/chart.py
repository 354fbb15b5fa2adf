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
one for its imaginary part.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jmask._base.types import (
    Argument,
    Function,
    HostArray,
    PyTree,
    PyTreeDef,
    Tensor,
    TensorLike,
)
from jmask._gradcheck.message import Setting
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor, joined, with_values_of
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.specified import todense, with_placeholder
from jmask._tensors.storage import is_entry, is_sparse, stored_values

# --- arguments -----------------------------------------------------------------------------


class Coordinate(NamedTuple):
    """One real number of the arguments or the results in words: args[0]['w'], entry (0, 1)."""

    path: str
    kind: str
    entry: str

    def __str__(self) -> str:
        return f"{self.path}, {self.entry}"


class Leaf:
    """One differentiable leaf of the arguments, in double precision.

    Attributes:
        count: how many values it stores.
        places: the row-major number of the entry of each stored value, `size` for none; then
            the numbers of the entries that are not stored.
        reals: its coordinates: numbers (n,), or real and imaginary parts (n, 2).
    """

    def __init__(self, path: str, x: Tensor):
        values = jnp.asarray(stored_values(x))
        values = values.astype(jnp.complex128 if jnp.iscomplexobj(values) else jnp.float64)
        self.path, self.tensor = path, with_values_of(x, values)
        self.size, self.count = math.prod(self.tensor.shape), values.size
        stored = _stored_places(self.tensor)
        unspecified = np.setdiff1d(np.arange(self.size), stored)
        self.places = np.concatenate([stored, unspecified])
        self.reals = to_reals(jnp.pad(values.ravel(), (0, unspecified.size)))

    def at(self, reals: jax.Array) -> Tensor:
        """Return the tensor with the stored values of a point."""
        stored = _to_numbers(reals)[: self.count]
        return with_values_of(self.tensor, stored.reshape(stored_values(self.tensor).shape))

    def with_placeholder(self, reals: jax.Array) -> Tensor:
        """Return it with a placeholder, by which JAX sees the unspecified entries too."""
        x = self.at(reals)
        return with_placeholder(x, self._dense(reals, self.count)) if is_tensor(x) else x

    def with_every_entry(self, reals: jax.Array) -> Tensor:
        """Return a tensor of the same kind that stores every entry, zeros included."""
        dense = self._dense(reals).reshape(stored_values(self._full).shape)
        return with_values_of(self._full, dense)

    def near(self, reals: jax.Array) -> Tensor:
        """Return the tensor at a point; with all entries if an unspecified one is not 0."""
        return self.with_every_entry(reals) if reals[self.count :].any() else self.at(reals)

    def _dense(self, reals: jax.Array, start: int = 0) -> jax.Array:
        numbers = _to_numbers(reals)[start:]
        dense = jnp.zeros(self.size, numbers.dtype).at[self.places[start:]].add(numbers)
        return dense.reshape(self.tensor.shape)

    @functools.cached_property
    def _full(self) -> Tensor:
        return _fully_specified(self.tensor)

    def coordinates(self) -> list[Coordinate]:
        hidden = "under the mask" if isinstance(self.tensor, MaskedTensor) else "padding"
        stored = [f"stored value {at}" for at in np.ndindex(stored_values(self.tensor).shape)]
        entries = [f"entry {at}" for at in np.ndindex(self.tensor.shape)]
        times, names = np.bincount(self.places), []
        for value, place in zip(stored, self.places[: self.count], strict=True):
            if place == self.size:
                names.append(("hidden", f"{value}, which is {hidden}"))
            else:
                also = f", {value}" if times[place] > 1 else ""
                names.append(("specified", f"{entries[place]}{also}"))
        for place in self.places[self.count :]:
            names.append(("unspecified", f"{entries[place]}, which is not specified"))
        return make_coordinates(self.path, names, self.reals.ndim == 2)


class Chart:
    """The arguments of a function by one real vector; `point` is where they are."""

    def __init__(self, args: PyTree, name: str):
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(args, is_leaf=is_tensor)
        self._leaves = [
            Leaf(f"{name}{jax.tree_util.keystr(path)}", x) if is_differentiable(x) else x
            for path, x in flat
        ]
        leaves = [x for x in self._leaves if isinstance(x, Leaf)]
        if not leaves:
            raise ValueError(
                f"`{name}` hold no floating or complex numbers whose gradient could be checked."
            )
        point, self._unravel = ravel_pytree([x.reals for x in leaves])
        self.point = np.asarray(point)
        self.coordinates = [name for x in leaves for name in x.coordinates()]

    def arguments(self, build: Function, point: jax.Array | HostArray) -> PyTree:
        """Return the arguments at a point; `build` is a method of `Leaf`, or like one."""
        reals = iter(self._unravel(jnp.asarray(point)))
        leaves = [build(x, next(reals)) if isinstance(x, Leaf) else x for x in self._leaves]
        return jax.tree.unflatten(self._treedef, leaves)


def make_coordinates(
    path: str, names: Iterable[tuple[str, str]], is_complex: bool
) -> list[Coordinate]:
    parts = ("real part of ", "imaginary part of ") if is_complex else ("",)
    return [Coordinate(path, kind, part + entry) for kind, entry in names for part in parts]


def to_reals(numbers: jax.Array) -> jax.Array:
    """Return numbers (n,) in double precision, of complex ones the two parts (n, 2)."""
    if jnp.iscomplexobj(numbers):
        numbers = jnp.stack([numbers.real, numbers.imag], axis=-1)
    return numbers.astype(jnp.float64)


def _to_numbers(reals: jax.Array) -> jax.Array:
    return reals if reals.ndim == 1 else jax.lax.complex(reals[:, 0], reals[:, 1])


def is_differentiable(x: Argument) -> bool:
    """Decide whether `x` is a tensor, array or number of floating or complex dtype."""
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic | float | complex)
    if not (is_tensor(x) or is_array):
        return False
    return bool(jnp.issubdtype(jnp.result_type(stored_values(x)), jnp.inexact))


def _stored_places(x: Tensor) -> HostArray:
    """Return for each stored value the row-major number of its entry; the size for none."""
    shape, batch, size = stored_values(x).shape, getattr(x, "n_batch", 0), math.prod(x.shape)
    if shape[:batch] != x.shape[:batch]:
        raise ValueError(
            f"a {type(x).__name__} of shape {x.shape} stores one value for several entries: "
            f"its data of shape {shape} broadcasts over batch dimensions."
        )
    # `todense` is linear in the stored values: its transpose reads for each what a dense array
    # has at its entry. That is the number of the entry less the size here, and 0 for none.
    _, read = jax.vjp(lambda values: todense(with_values_of(x, values)), jnp.zeros(shape))
    (below,) = read(jnp.arange(-size, 0.0).reshape(x.shape))
    if is_sparse(x) and not batch:  # JAX wraps negative indices, which are padding here
        below = jnp.where(is_entry(x), below, 0)
    return np.ravel(below).astype(int) + size


def _fully_specified(x: Tensor) -> Tensor:
    """Return a tensor of the kind of `x` that stores every entry, in row-major order."""
    if isinstance(x, MaskedTensor):
        storage: Argument = _fully_specified(x.storage)
        return joined(storage, jnp.ones(stored_values(storage).shape, bool))
    ones = jnp.ones(x.shape)
    if not is_sparse(x):
        return ones
    if isinstance(x, RowSparse):
        return RowSparse(np.arange(x.shape[0]), ones, x.shape, coalesced=True)
    return type(x).fromdense(ones, n_batch=x.n_batch, n_dense=x.n_dense)


# --- results --------------------------------------------------------------------------------


class Problem:
    """A function of a real vector, to be differentiated at a point.

    Its result is read as a vector of the entries that exist: the valid ones of a
    `MaskedTensor`, in masked semantics those that a sparse tensor stores.

    Attributes:
        run: run(build, point) is its result, with arguments as a method of `Leaf` builds them.
        inputs, outputs: the coordinates of the point and of the result, in words.
        value: the result at the point.
        scales: the size of each coordinate of the point, but at least 1.
    """

    def __init__(
        self, run: Function, point: HostArray, inputs: list[Coordinate], setting: Setting
    ):
        self.run, self.point, self.inputs, self.setting = run, point, inputs, setting
        self.scales = np.where(np.isfinite(point), np.maximum(1, np.abs(point)), 1)
        result = run(Leaf.at, point)
        self._treedef: PyTreeDef
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_tensor)
        self._masks: dict[int, tuple[str, HostArray]] = {}
        self.outputs: list[Coordinate] = []
        for number, (key, y) in enumerate(flat):
            if is_differentiable(y):
                path, mask = f"output{jax.tree_util.keystr(key)}", _mask_of(y, setting.masked)
                self._masks[number] = path, mask
                names = [
                    ("specified", f"entry {tuple(at)}") for at in np.argwhere(mask).tolist()
                ]
                is_complex = jnp.iscomplexobj(stored_values(y))
                self.outputs += make_coordinates(path, names, is_complex)
        if not self._masks:
            raise ValueError(
                "`fun` returns no floating or complex numbers whose gradient could be checked."
            )
        self.value = np.asarray(self._vector(result))

    def _vector(self, result: PyTree) -> jax.Array:
        leaves, entries = jax.tree.leaves(result, is_leaf=is_tensor), []
        for number, (_, mask) in self._masks.items():
            dense = todense(leaves[number], masked_grad=self.setting.masked).ravel()
            entries.append(to_reals(dense[np.flatnonzero(mask)]).ravel())
        return jnp.concatenate(entries)

    def smooth(self, build: Function, point: jax.Array) -> jax.Array:
        """Return the value for JAX to differentiate."""
        return self._vector(self.run(build, point))

    def near(self, point: HostArray, what: str, build: Function = Leaf.near) -> HostArray:
        """Return the value for differences; refuse if `what`, a step, changed the entries."""
        result = self.run(build, point)
        if change := self._change(result):
            raise self.setting.error(
                f"{what} changed the {change}: the function has no derivative here.", "mask"
            )
        return np.asarray(self._vector(result))

    def _change(self, result: PyTree) -> str:
        leaves, treedef = jax.tree.flatten(result, is_leaf=is_tensor)
        if treedef != self._treedef:
            return f"structure of the output from {self._treedef} to {treedef}"
        for number, (path, mask) in self._masks.items():
            now = _mask_of(leaves[number], self.setting.masked)
            if now.shape != mask.shape:
                return f"shape of {path} from {mask.shape} to {now.shape}"
            for entry in np.argwhere(now != mask).tolist():
                return f"mask of {path}, at entry {tuple(entry)} first"
        return ""

    def vanishes(self, kind: str) -> bool:
        """Decide whether derivatives along coordinates of this kind must be zero."""
        return kind == "hidden" or (self.setting.masked and kind == "unspecified")


def _mask_of(y: TensorLike, masked: bool) -> HostArray:
    """Return the entries of an output that exist in these semantics."""
    if not (isinstance(y, MaskedTensor) or (masked and is_tensor(y))):
        return np.ones(np.shape(y), bool)
    return np.asarray(todense(with_values_of(y, jnp.ones(stored_values(y).shape)))) > 0
