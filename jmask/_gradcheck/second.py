"""Gradients of gradients: the gradient as a function whose gradient is checked.

    f(x) = sum(x ** 3)        gradient(x, c) = c * 3 x ** 2, for a cotangent c
                              its derivatives: 6 c x in x, 3 x ** 2 in c

The gradient is read at the entries of the tensors: at every entry in plain semantics, at the
specified ones in masked semantics, where it is zero elsewhere by the check of order 1.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._gradcheck.entries import (
    Input,
    numbers_of,
    random_reals,
    stored_positions,
)
from jmask._gradcheck.problem import Problem
from jmask._tensors.masked_tensor import is_tensor
from jmask._tensors.placeholders import phantom_of, values_of, zero_phantom


def gradient_problem(problem: Problem, modes: Sequence[str]) -> Problem:
    """The gradient of a checked problem, by reverse mode if that is among the modes."""
    rng = np.random.default_rng(1)
    if "rev" in modes:
        vectors = [
            y.cotangent(random_reals(rng, (len(y.at), y.parts))) for y in problem.outputs
        ]
        gradient: Any = _pulled_back
        what = "cotangent of {}"
        paths = [y.path for y in problem.outputs]
    else:
        vectors = [_random_dense(rng, x) for x in problem.inputs]
        gradient, what = _pushed_forward, "tangent of {}"
        paths = [x.path for x in problem.inputs]

    def gradient_of(args: Any, vectors: Sequence[jax.Array]) -> dict[str, jax.Array]:
        leaves = jax.tree.leaves(args, is_leaf=is_tensor)
        tensors = [leaves[number] for number in problem.numbers]
        return gradient(problem, tensors, vectors)

    def name(path: Any) -> str:
        if path[0].idx == 0:
            return f"args{jax.tree_util.keystr(path[1:])}"
        return what.format(paths[path[1].idx])

    setting = dataclasses.replace(problem.setting, order=problem.setting.order + 1)
    return Problem(gradient_of, (problem.args, vectors), setting, name)


def _pulled_back(
    problem: Problem, tensors: Sequence[Any], cotangents: Sequence[jax.Array]
) -> dict[str, jax.Array]:
    parts = [_parts(problem, x) for x in tensors]
    _, transposed = jax.vjp(lambda parts: problem.smooth(tensors, parts), parts)
    (gradients,) = transposed(list(cotangents))
    return {
        f"gradient of {x.path}": _at_entries(problem, tensor, *gradient)
        for x, tensor, gradient in zip(problem.inputs, tensors, gradients, strict=True)
    }


def _pushed_forward(
    problem: Problem, tensors: Sequence[Any], tangents: Sequence[jax.Array]
) -> dict[str, jax.Array]:
    parts = [_parts(problem, x) for x in tensors]
    along = [_along(problem, *pair) for pair in zip(tensors, tangents, strict=True)]
    _, results = jax.jvp(lambda parts: problem.smooth(tensors, parts), (parts,), (along,))
    return {
        f"tangent of {y.path}": result
        for y, result in zip(problem.outputs, results, strict=True)
    }


def _parts(problem: Problem, x: Any) -> tuple[Any, Any]:
    if not (problem.with_phantoms and is_tensor(x)):
        return values_of(x), None
    phantom = phantom_of(x)
    return values_of(x), zero_phantom(x) if phantom is None else phantom


def _at_entries(problem: Problem, x: Any, of_values: Any, of_phantom: Any) -> jax.Array:
    """The gradient at the entries of `x`, dense."""
    if not is_tensor(x):
        return of_values
    positions, shape = stored_positions(x).ravel(), tuple(x.shape)
    plain = of_phantom is not None and not problem.setting.masked
    dense = jnp.ravel(of_phantom) if plain else jnp.zeros(math.prod(shape), x.dtype)
    stored = np.flatnonzero(positions >= 0)
    return dense.at[positions[stored]].set(jnp.ravel(of_values)[stored]).reshape(shape)


def _along(problem: Problem, x: Any, tangent: jax.Array) -> tuple[Any, Any]:
    """A dense tangent as one of stored values and phantom."""
    if not is_tensor(x):
        return tangent, None
    positions = stored_positions(x)
    values = jnp.where(positions >= 0, jnp.ravel(tangent)[positions], 0)
    if not problem.with_phantoms:
        return values, None
    counts = np.full(tangent.size, not problem.setting.masked)
    counts[positions[positions >= 0]] = False
    return values, jnp.where(counts.reshape(tangent.shape), tangent, 0)


def _random_dense(rng: np.random.Generator, x: Input) -> jax.Array:
    shape = tuple(np.shape(x.tensor))
    reals = random_reals(rng, (math.prod(shape), x.parts))
    return jnp.asarray(numbers_of(reals).reshape(shape))
