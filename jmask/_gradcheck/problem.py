"""A function as a gradient check sees it: from the entries of inputs to those of outputs.

    fun: {"x": BCOO, "n": 3} -> (MaskedTensor, {"loss": array})
    inputs   args[0]['x']                       (n is an integer: it stays)
    outputs  output[0], at its valid entries    output[1]['loss']

It is evaluated in two ways. `values` runs it eagerly near the input and compares the masks
of its outputs with those at the input. `smooth` is the function of stored values and phantoms
that JAX differentiates: the same run, read as dense arrays.

In masked semantics a sparse output is compared at the positions it stores, in plain
semantics everywhere. A `MaskedTensor` is compared at its valid entries in both.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._gradcheck.entries import (
    Input,
    entry,
    in_double_precision,
    is_differentiable,
    numbers_of,
    reals_of,
    stored_positions,
    wide,
)
from jmask._gradcheck.message import GradcheckError, Setting
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor
from jmask._tensors.placeholders import with_phantom, with_values_of
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
