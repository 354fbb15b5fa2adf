"""A function as a gradient check sees it: from the entries of inputs to those of outputs.

    fun: {"x": BCOO, "n": 3} -> (MaskedTensor, {"loss": array})
    inputs   args[0]['x']                       (n is an integer: it stays)
    outputs  output[0], at its valid entries    output[1]['loss']

The function is evaluated in two ways. `values` runs it eagerly near the input and compares the
masks of its outputs with those at the input. `smooth` is the function of stored values and
phantoms that JAX differentiates: the same run, read as dense arrays.

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.doors import check_leaves, shown
from jmask._gradcheck.entries import (
    Input,
    entry,
    in_double_precision,
    is_differentiable,
    numbers_of,
    random_reals,
    reals_of,
    stored_positions,
    wide,
)
from jmask._gradcheck.message import GradcheckError, Setting
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor
from jmask._tensors.phantom import with_phantom, with_values_of
from jmask._tensors.specified import todense


@dataclasses.dataclass(frozen=True)
class Output:
    """One differentiable leaf of what the function returns.

    Attributes:
        path: how messages call it.
        number: among all leaves.
        shape, dtype: of the tensor; the dtype as the function gives it.
        mask: the entries that are compared, or None for all.
    """

    path: str
    number: int
    shape: tuple[int, ...]
    dtype: Any
    mask: np.ndarray | None

    @functools.cached_property
    def at(self) -> np.ndarray:
        """The numbers of the entries that are compared."""
        mask = np.ones(self.shape, bool) if self.mask is None else self.mask
        return np.flatnonzero(mask)

    @property
    def parts(self) -> int:
        """How many real numbers a number is."""
        return 2 if jnp.issubdtype(self.dtype, jnp.complexfloating) else 1

    def reals(self, dense: Any) -> np.ndarray:
        """The compared entries of a dense array as real coordinates (m, parts)."""
        return reals_of(np.asarray(dense).astype(wide(self.dtype)).ravel()[self.at])

    def cotangent(self, weights: np.ndarray) -> jax.Array:
        """The cotangent that weighs the real coordinates with `weights` (m, parts)."""
        dense = np.zeros(self.shape, wide(self.dtype))
        # JAX pairs a cotangent c with a tangent t as the real part of c * t.
        dense.ravel()[self.at] = np.conj(numbers_of(weights))
        return jnp.asarray(dense)

    def described(self, number: int) -> str:
        """The real coordinate with this number in words."""
        number, part = divmod(number, self.parts)
        what = ("real part of ", "imaginary part of ")[part] if self.parts == 2 else ""
        return f"{self.path}, {what}{entry(self.at[number], self.shape)}"


class Problem:
    """A function with its arguments, in double precision.

    Args:
        fun: the function.
        args: its positional arguments.
        setting: what is checked.
        name: the name of an input, given its path in `args`.

    Attributes:
        inputs: the differentiable leaves of the arguments.
        outputs: the differentiable leaves of the result.
        base: the compared entries of the outputs at the arguments.
        with_phantoms: whether the function takes tensors with phantoms.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        setting: Setting,
        name: Callable[[Any], str] = lambda path: f"args{jax.tree_util.keystr(path)}",
    ):
        self.fun, self.setting = fun, setting
        self.with_phantoms = True
        flat, self.treedef = jax.tree_util.tree_flatten_with_path(args, is_leaf=is_tensor)
        self.leaves = [x for _, x in flat]
        self.numbers = [i for i, x in enumerate(self.leaves) if is_differentiable(x)]
        self.inputs = [
            Input(name(flat[i][0]), in_double_precision(self.leaves[i])) for i in self.numbers
        ]
        for x, number in zip(self.inputs, self.numbers, strict=True):
            self.leaves[number] = x.tensor
        result = self.run([x.tensor for x in self.inputs])
        flat, structure = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_tensor)
        self.structure: Any = structure
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
        self._check_not_vacuous()
        self.base = self._read([y for _, y in flat])

    @property
    def args(self) -> Any:
        """The arguments in double precision."""
        return jax.tree.unflatten(self.treedef, self.leaves)

    def values(self, changed: dict[int, Any], what: str) -> list[np.ndarray]:
        """The compared entries of the outputs (m, parts) with some inputs changed.

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
        return self._read(flat)

    def smooth(self, tensors: Sequence[Any], parts: Sequence[Any]) -> list[jax.Array]:
        """The outputs as dense arrays, as a function of stored values and phantoms.

        Args:
            tensors: one for each input; their positions are used.
            parts: pairs of stored values and a phantom (or None), one for each input.
        """
        rebuilt = []
        for x, (values, phantom) in zip(tensors, parts, strict=True):
            new = with_values_of(x, values)
            rebuilt.append(new if phantom is None else with_phantom(new, phantom))
        flat = jax.tree.leaves(self.run(rebuilt), is_leaf=is_tensor)
        results = []
        for output in self.outputs:
            y = todense(flat[output.number], masked_grad=self.setting.masked)
            dtype = wide(output.dtype)
            results.append(y if y.dtype == dtype else y.astype(dtype))
        return results

    def of_parts(self, parts: Sequence[Any]) -> list[jax.Array]:
        """`smooth` at the inputs."""
        return self.smooth([x.tensor for x in self.inputs], parts)

    def primals(self) -> list[tuple[Any, Any]]:
        """Where `of_parts` is differentiated."""
        return [x.primal(self.with_phantoms) for x in self.inputs]

    def run(self, tensors: Sequence[Any]) -> Any:
        """What the function returns for these inputs."""
        leaves = list(self.leaves)
        for number, x in zip(self.numbers, tensors, strict=True):
            leaves[number] = x
        return self.fun(*jax.tree.unflatten(self.treedef, leaves))

    def _read(self, flat: Sequence[Any]) -> list[np.ndarray]:
        return [output.reals(todense(flat[output.number])) for output in self.outputs]

    def _check_mask(self, output: Output, y: Any, what: str) -> None:
        shape = tuple(np.shape(y))
        if shape != output.shape:
            raise GradcheckError(
                f"{what} changed the shape of {output.path} from {output.shape} to {shape}: "
                "such a function has no derivative here."
            )
        mask = mask_of(y, self.setting.masked)
        if (mask is None) != (output.mask is None):
            raise GradcheckError(f"{what} changed whether {output.path} is masked.")
        if mask is not None and (mask != output.mask).any():
            where = entry(np.flatnonzero(mask != output.mask)[0], shape)
            raise GradcheckError(
                f"{what} changed the mask of {output.path}, at {where} first: the function has "
                f"no derivative here.\n  semantics   {self.setting.semantics()}\n  to try      "
                + self.setting.advice_on_masks()
            )

    def _check_not_vacuous(self) -> None:
        for leaves, what in ((self.inputs, "`args` hold"), (self.outputs, "`fun` returns")):
            if not leaves:
                raise ValueError(
                    f"{what} no floating or complex numbers, so there is no gradient to check."
                )


def mask_of(y: Any, masked: bool) -> np.ndarray | None:
    """The entries of an output that exist, or None for all."""
    if not (isinstance(y, MaskedTensor) or (masked and is_tensor(y))):
        return None
    mask = np.zeros(tuple(y.shape), bool)
    positions = stored_positions(y)
    mask.ravel()[positions[positions >= 0]] = True
    return mask


# --- premises ----------------------------------------------------------------------------


def check_premises(problem: Problem) -> None:
    """Raise a `GradcheckError` that names what is missing for a check."""
    again = problem.values({}, "running the function again")
    for output, first, second in zip(problem.outputs, problem.base, again, strict=True):
        if not np.array_equal(first, second, equal_nan=True):
            at = np.flatnonzero(first.ravel() != second.ravel())[0]
            raise GradcheckError(
                f"{output.described(int(at))} was {first.flat[at]:.9g} and then "
                f"{second.flat[at]:.9g} for the same input: the function is not deterministic. "
                "To try: fix its random key or state."
            )
        if np.isnan(first).any():
            at = np.flatnonzero(np.isnan(first).ravel())[0]
            raise GradcheckError(
                f"{output.described(int(at))} is nan at the given input, so it has no "
                "derivative there. To try: an input at which the function is defined."
            )
    if not problem.setting.masked:
        _check_stored_zeros(problem)


def _check_stored_zeros(problem: Problem) -> None:
    for number, x in enumerate(problem.inputs):
        if not len(x.unspecified):
            continue
        what = f"storing zeros at the unspecified entries of {x.path}"
        advice = (
            f"\n  semantics   {problem.setting.semantics()}"
            f"\n  to try      {problem.setting.advice_on_masks()}"
        )
        try:
            stored = problem.values({number: x.full()}, what)
        except GradcheckError:
            raise
        except Exception as reason:
            raise GradcheckError(
                f"{what} made the function raise {type(reason).__name__}: {reason}{advice}"
            ) from reason
        for output, here, there in zip(problem.outputs, problem.base, stored, strict=True):
            close = np.isclose(here, there, rtol=1e-9, atol=1e-9, equal_nan=True)
            if not close.all():
                at = int(np.flatnonzero(~close.ravel())[0])
                raise GradcheckError(
                    f"{what} changed {output.described(at)} from {here.flat[at]:.9g} to "
                    f"{there.flat[at]:.9g}: the function tells an unspecified entry from a "
                    f"zero, so it has no derivative there.{advice}"
                )


# --- masked functions --------------------------------------------------------------------


_SIZES = (1e-2, 1e-4)


def is_masked_function(fun: Callable[[Any], Any], x: Any) -> bool:
    """Whether f(x + dx) = f(sparse_mask(x + dx, x)) for small dx, by trying.

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
        return all(_agree(problem, rng, size) for size in _SIZES for _ in range(2))


def _agree(problem: Problem, rng: np.random.Generator, size: float) -> bool:
    near, projected = zip(*(_points(x, rng, size) for x in problem.inputs), strict=True)
    pairs = [
        jax.tree.leaves(problem.run(tensors), is_leaf=is_tensor)
        for tensors in (near, projected)
    ]
    return all(_equal(pairs[0][y.number], pairs[1][y.number]) for y in problem.outputs)


def _points(x: Input, rng: np.random.Generator, size: float) -> tuple[Any, Any]:
    """x + dx, and its entries where x is specified."""

    def steps(kind: str) -> np.ndarray:
        return size * random_reals(rng, (len(getattr(x, kind)), x.parts))

    projected = x.moved(steps("specified"))
    if not is_tensor(x.tensor):
        return projected, projected
    moved = Input(x.path, projected)
    if not isinstance(x.tensor, MaskedTensor):
        return moved.full(steps("unspecified")), projected
    values = moved.values.copy()
    values[x.hidden] = numbers_of(steps("hidden"))
    _, phantom = x.tangent("unspecified", steps("unspecified"), with_phantom=True)
    near = with_values_of(projected, jnp.asarray(values.reshape(x.positions.shape)))
    return with_phantom(near, phantom), projected


def _equal(x: Any, y: Any) -> bool:
    masks = mask_of(x, False), mask_of(y, False)
    if (masks[0] is None) != (masks[1] is None):
        return False
    if masks[0] is not None and (masks[0] != masks[1]).any():
        return False
    first, second = (np.asarray(todense(z)) for z in (x, y))
    if masks[0] is not None:
        first, second = first[masks[0]], second[masks[0]]
    scale = np.max(np.abs(second), initial=1, where=np.isfinite(second))
    return bool(np.allclose(first, second, rtol=1e-11, atol=1e-12 * scale, equal_nan=True))
