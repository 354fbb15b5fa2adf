"""A function as a gradient check sees it: from the entries of inputs to those of outputs.

    fun: {"x": BCOO, "n": 3} -> (MaskedTensor, {"loss": array})
    inputs   args[0]['x']                       (n is an integer: it stays)
    outputs  output[0], at its valid entries    output[1]['loss']

The function is evaluated in two ways. `values` runs it eagerly near the input and compares the
masks of its outputs with those at the input. `smooth` is the function of stored values and
placeholders that JAX differentiates: the same run, read as dense arrays.

In masked semantics a sparse output is compared at the positions it stores, in plain
semantics everywhere. A `MaskedTensor` is compared at its valid entries in both.

Derivatives can be compared only under these premises:

| premise                                                        | else                      |
|----------------------------------------------------------------|---------------------------|
| the function returns the same for the same input               | differences are noise     |
| no output is nan                                               | nor has it differences    |
| plain semantics: a stored zero is the same as an unstored one  | it jumps where an entry   |
|                                                                | is stored: no derivative  |

`is_masked_function` decides whether a function depends on specified entries only: for all dx
in a neighbourhood of 0,

    f(x + dx) = f(sparse_mask(x + dx, x))

So a product `x @ y` of a sparse x is no masked function, although its gradient in JAX has
entries where x has: stored zeros are the same to it as no entries. After `sparse_mask` it is
one. For sparse x the sum x + dx stores every entry. A `MaskedTensor` keeps its mask in x + dx:
dx moves the values under the mask, and those that `todense` takes for zeros.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmask._base.types import DType, Function, HostArray, KeyPath, PyTree, PyTreeDef, Tensor
from jmask._base.validation import check_leaves, shown
from jmask._gradcheck.entries import (
    KINDS,
    Input,
    Parts,
    entry,
    in_double_precision,
    is_differentiable,
    part_name,
    parts_of,
    random_reals,
    reals_of,
    stored_positions,
    wide,
)
from jmask._gradcheck.message import GradcheckError, Setting
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor
from jmask._tensors.specified import todense, values_of, with_placeholder, with_values_of


@dataclasses.dataclass(frozen=True)
class Output:
    """One differentiable leaf of the function's result.

    Attributes:
        path: its name in messages.
        number: among all leaves.
        dtype: as the function gives it.
        mask: the entries that are compared.
    """

    path: str
    number: int
    shape: tuple[int, ...]
    dtype: DType
    mask: HostArray

    @functools.cached_property
    def at(self) -> HostArray:
        """Return the numbers of the entries that are compared."""
        return np.flatnonzero(self.mask)

    @property
    def parts(self) -> int:
        return parts_of(self.dtype)

    def reals(self, dense: ArrayLike) -> HostArray:
        """Return the coordinates of the compared entries of a dense array."""
        return reals_of(np.asarray(dense).astype(wide(self.dtype)).ravel()[self.at])

    def cotangent(self, weights: HostArray) -> jax.Array:
        """Return the cotangent that weighs the coordinates with `weights`."""
        dense = np.zeros(self.shape, wide(self.dtype))
        # JAX pairs a cotangent c with a tangent t as the real part of c * t.
        dense.ravel()[self.at] = np.conj(weights.view(dense.dtype))
        return jnp.asarray(dense)


class Problem:
    """A function with its arguments, in double precision; `name` names an input by its path.

    Attributes:
        inputs: the differentiable leaves of the arguments.
        outputs: the differentiable leaves of the result.
        starts: where the coordinates of each input begin among those of all.
        kinds: the kind of each coordinate of the inputs; see `entries`.
        scales: the step along each of them.
        vanishes: for each of them whether the derivatives along it must be zero.
        blocks: the coordinates of one kind of one input; none is empty.
        base: the coordinates of the outputs at the arguments.
        columns: for each output the positions of its coordinates among all coordinates.
        with_placeholders: whether the function takes tensors with placeholders.
    """

    def __init__(
        self,
        fun: Function,
        args: Sequence[PyTree],
        setting: Setting,
        name: Callable[[KeyPath], str] = lambda path: f"args{jax.tree_util.keystr(path)}",
    ):
        self.fun, self.setting = fun, setting
        self.with_placeholders = True
        flat, self.treedef = jax.tree_util.tree_flatten_with_path(args, is_leaf=is_tensor)
        self.leaves = [x for _, x in flat]
        self.numbers = [i for i, x in enumerate(self.leaves) if is_differentiable(x)]
        self.inputs = [
            Input(name(flat[i][0]), in_double_precision(self.leaves[i])) for i in self.numbers
        ]
        for x, number in zip(self.inputs, self.numbers, strict=True):
            self.leaves[number] = x.tensor
        result = self.run([x.tensor for x in self.inputs])
        self.structure: PyTreeDef
        flat, self.structure = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_tensor)
        self.outputs = [
            Output(
                f"output{jax.tree_util.keystr(path)}",
                number,
                tuple(np.shape(y)),
                y.dtype if is_tensor(y) else jnp.result_type(y),
                mask_of(y, setting.masked),
            )
            for number, (path, y) in enumerate(flat)
            if is_differentiable(y)
        ]
        for leaves, what in ((self.inputs, "`args` hold"), (self.outputs, "`fun` returns")):
            if not leaves:
                raise ValueError(
                    f"{what} no floating or complex numbers, so there is no gradient to check."
                )
        self.base = self.reals([todense(flat[y.number][1]) for y in self.outputs])
        ends = np.cumsum([0, *(len(y.at) * y.parts for y in self.outputs)])
        self.columns = list(map(slice, ends[:-1], ends[1:]))
        self.starts = np.cumsum([0, *(len(x.kinds) for x in self.inputs[:-1])])
        self.kinds = np.concatenate([x.kinds for x in self.inputs])
        self.scales = np.concatenate([x.scales for x in self.inputs])
        self.vanishes = self.kinds == "hidden"
        if setting.masked:
            self.vanishes |= self.kinds == "unspecified"
        pairs = zip(self.starts, self.inputs, strict=True)
        blocks = [s + np.flatnonzero(x.kinds == kind) for s, x in pairs for kind in KINDS]
        self.blocks = [rows for rows in blocks if rows.size]

    @property
    def args(self) -> Sequence[PyTree]:
        return jax.tree.unflatten(self.treedef, self.leaves)

    def run(self, tensors: Sequence[Tensor]) -> PyTree:
        leaves = list(self.leaves)
        for number, x in zip(self.numbers, tensors, strict=True):
            leaves[number] = x
        return self.fun(*jax.tree.unflatten(self.treedef, leaves))

    def reals(self, dense: Sequence[ArrayLike]) -> HostArray:
        """Return the coordinates of the outputs, from dense arrays."""
        return np.concatenate([y.reals(x) for y, x in zip(self.outputs, dense, strict=True)])

    def cotangents(self, weights: HostArray) -> list[jax.Array]:
        """Return the cotangents of the outputs that weigh their coordinates."""
        parts = (weights[columns] for columns in self.columns)
        return [y.cotangent(part) for y, part in zip(self.outputs, parts, strict=True)]

    def values(self, changed: dict[int, Tensor], what: str) -> HostArray:
        """Return the coordinates of the outputs with some inputs changed.

        Raises:
            GradcheckError: if the structure or the mask of an output changes.
        """
        tensors = [changed.get(i, x.tensor) for i, x in enumerate(self.inputs)]
        flat, structure = jax.tree.flatten(self.run(tensors), is_leaf=is_tensor)
        if structure != self.structure:
            raise GradcheckError(
                f"{what} changed the structure of the output from {self.structure} to "
                f"{structure}: such a function has no derivative here."
            )
        for output in self.outputs:
            self._check_mask(output, flat[output.number], what)
        return self.reals([todense(flat[y.number]) for y in self.outputs])

    def near(self, steps: HostArray, what: str) -> HostArray:
        """Return the coordinates of the outputs with `steps` added to those of the inputs."""
        changed = {}
        for number, (x, part) in enumerate(zip(self.inputs, self.split(steps), strict=True)):
            if part.any():
                is_stored = not part[x.kinds == "unspecified"].any()
                changed[number] = x.moved(part) if is_stored else x.full(part)
        return self.values(changed, what)

    def split(self, steps: HostArray) -> list[HostArray]:
        """Return the coordinates of each input, from those of all."""
        return np.split(steps, self.starts[1:])

    def smooth(self, tensors: Sequence[Tensor], parts: Sequence[Parts]) -> list[jax.Array]:
        """Return the outputs as dense arrays, from parts at the positions of `tensors`."""
        rebuilt = []
        for x, (values, placeholder) in zip(tensors, parts, strict=True):
            new = with_values_of(x, values)
            rebuilt.append(new if placeholder is None else with_placeholder(new, placeholder))
        flat = jax.tree.leaves(self.run(rebuilt), is_leaf=is_tensor)
        results = []
        for output in self.outputs:
            y = todense(flat[output.number], masked_grad=self.setting.masked)
            dtype = wide(output.dtype)
            results.append(y if y.dtype == dtype else y.astype(dtype))
        return results

    def input_of(self, row: int) -> tuple[str, str]:
        """Return the input that a coordinate belongs to, and the coordinate, in words."""
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        x = self.inputs[number]
        return x.path, f"{x.path}, {x.described(int(row - self.starts[number]))}"

    def described(self, column: int) -> str:
        ends = [columns.stop for columns in self.columns]
        place = int(np.searchsorted(ends, column, side="right"))
        output = self.outputs[place]
        number, part = divmod(column - self.columns[place].start, output.parts)
        what = part_name(part, output.parts)
        return f"{output.path}, {what}{entry(output.at[number], output.shape)}"

    def _check_mask(self, output: Output, y: Tensor, what: str) -> None:
        shape = tuple(np.shape(y))
        if shape != output.shape:
            raise GradcheckError(
                f"{what} changed the shape of {output.path} from {output.shape} to {shape}: "
                "such a function has no derivative here."
            )
        mask = mask_of(y, self.setting.masked)
        if (mask != output.mask).any():
            where = entry(np.flatnonzero(mask != output.mask)[0], shape)
            raise GradcheckError(
                f"{what} changed the mask of {output.path}, at {where} first: the function has "
                f"no derivative here.{self.setting.advice_on_masks()}"
            )


def mask_of(y: Tensor, masked: bool) -> HostArray:
    """Return the entries of an output that exist."""
    if not (isinstance(y, MaskedTensor) or (masked and is_tensor(y))):
        return np.ones(np.shape(y), bool)
    mask = np.zeros(tuple(y.shape), bool)
    positions = stored_positions(y)
    mask.ravel()[positions[positions >= 0]] = True
    return mask


# --- premises ----------------------------------------------------------------------------


def check_premises(problem: Problem) -> None:
    """Raise a `GradcheckError` that names the premise that does not hold."""
    here = problem.base
    again = problem.values({}, "running the function again")
    differs = (here != again) & ~(np.isnan(here) & np.isnan(again))
    for at in np.flatnonzero(differs)[:1]:
        raise GradcheckError(
            f"{problem.described(at)} was {here[at]:.9g} and then {again[at]:.9g} for the same "
            "input: the function is not deterministic. To try: fix its random key or state."
        )
    for at in np.flatnonzero(np.isnan(here))[:1]:
        raise GradcheckError(
            f"{problem.described(at)} is nan at the given input, so it has no derivative "
            "there. To try: an input at which the function is defined."
        )
    if problem.setting.masked:
        return
    advice = problem.setting.advice_on_masks()
    for number, x in enumerate(problem.inputs):
        if not len(x.unspecified):
            continue
        what = f"storing zeros at the unspecified entries of {x.path}"
        try:
            stored = problem.values({number: x.full(np.zeros(len(x.kinds)))}, what)
        except GradcheckError:
            raise
        except Exception as reason:
            raise GradcheckError(
                f"{what} made the function raise {type(reason).__name__}: {reason}{advice}"
            ) from reason
        close = np.isclose(here, stored, rtol=1e-9, atol=1e-9, equal_nan=True)
        for at in np.flatnonzero(~close)[:1]:
            raise GradcheckError(
                f"{what} changed {problem.described(at)} from {here[at]:.9g} to "
                f"{stored[at]:.9g}: the function tells an unspecified entry from a zero, so it "
                f"has no derivative there.{advice}"
            )


# --- masked functions --------------------------------------------------------------------


def is_masked_function(fun: Function, x: PyTree) -> bool:
    """Decide by trying whether f(x + dx) = f(sparse_mask(x + dx, x)) for small dx.

    Args:
        fun: takes `x`, returns any pytree.
        x: a sparse or masked tensor, or a pytree with some; floating or complex.

    Returns:
        False if a random dx of size 0.01 or 0.0001 shows a difference. Entries that do not
        exist in either result are not compared.

    Raises:
        ValueError: if `x` or the result holds no floating or complex numbers.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> from jax.experimental.sparse import BCOO
        >>> x = BCOO.fromdense(jnp.array([[0., 1.], [2., 3.]]))
        >>> jmask.is_masked_function(lambda y: y @ jnp.ones(2), x)
        False
        >>> jmask.is_masked_function(lambda y: jmask.sparse_mask(y, x) @ jnp.ones(2), x)
        True

    References:
        Nikita Vedeneev's definition in pytorch/pytorch#95405.
    """
    if not callable(fun):
        raise TypeError(
            f"`fun` must be a function, got {shown(fun)}: write "
            "jmask.is_masked_function(fun, x)."
        )
    check_leaves("x", x)
    setting = Setting(False, 1.0, 0.0, 0.0, 1, lambda: False)
    with jax.enable_x64(True):
        problem = Problem(fun, (x,), setting)
        rng = np.random.default_rng(0)
        return all(_agree(problem, rng, size) for size in (1e-2, 1e-4) for _ in range(2))


def _agree(problem: Problem, rng: np.random.Generator, size: float) -> bool:
    near, projected = [], []
    for x in problem.inputs:
        steps = size * random_reals(rng, x.kinds.shape)
        moved = x.moved(steps)
        projected.append(moved)
        if isinstance(x.tensor, MaskedTensor):
            values, placeholder = x.tangent(steps, with_placeholder=True)
            # Values under the mask are replaced: they may be nan, and stay so in a sum.
            values = jnp.where(x.positions < 0, values, values_of(moved))
            moved = with_placeholder(with_values_of(moved, values), placeholder)
        elif is_tensor(x.tensor):
            moved = x.full(steps)
        near.append(moved)
    pairs = [
        jax.tree.leaves(problem.run(tensors), is_leaf=is_tensor)
        for tensors in (near, projected)
    ]
    return all(_equal(pairs[0][y.number], pairs[1][y.number]) for y in problem.outputs)


def _equal(x: Tensor, y: Tensor) -> bool:
    mask = mask_of(x, False)
    if not np.array_equal(mask, mask_of(y, False)):
        return False
    first, second = (np.asarray(todense(z))[mask] for z in (x, y))
    scale = np.max(np.abs(second), initial=1, where=np.isfinite(second))
    return bool(np.allclose(first, second, rtol=1e-11, atol=1e-12 * scale, equal_nan=True))
