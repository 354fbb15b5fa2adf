"""`jmask.value_and_grad`: `jax.value_and_grad` with row-sparse gradients for tables.

    loss, grads = jmask.value_and_grad(lambda table: table[ids].sum())(table)
    grads       RowSparse(ids, ones), and not an array as large as the table

The function is written as always. Its gradient program, the jaxpr of
`jax.value_and_grad(f)`, is interpreted with rules that keep what a lookup contributes to
a table's gradient as (ids, rows); see `_gradient_program`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmask._cotangents import Filled, Rows
from jmask._gradient_collectives import COLLECTIVE_RULES
from jmask._gradient_control_flow import CONTROL_FLOW_RULES
from jmask._gradient_program import Interpreter
from jmask._gradient_rules import EQUATION_RULES
from jmask._masked_tensor import MaskedTensor
from jmask._row_sparse import is_row_sparse
from jmask._storage import stored_values

_INTERPRETER = Interpreter({**EQUATION_RULES, **CONTROL_FLOW_RULES, **COLLECTIVE_RULES})


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`; the gradient of a table that is only looked up is sparse.

    A parameter whose gradient is a sum of lookups (`t[ids]`, `jnp.take`, flax and equinox
    embeddings, under jit, vmap, remat, scan, cond) gets a `RowSparse` gradient with one
    stored row for each lookup. Every other parameter gets what JAX gives. Made dense, the
    result equals that of `jax.value_and_grad`, out-of-range ids included.

    Args:
        fun: a function returning a scalar, or (scalar, aux) with `has_aux`.
        argnums: the positional argument(s) to differentiate: pytrees of float arrays. The
            gradient of a `MaskedTensor` among them is one with the same mask.
        has_aux: whether `fun` returns auxiliary data beside the scalar.

    Returns:
        A function with the arguments of `fun` that returns (value, gradient), as
        `jax.value_and_grad` does.

    Raises:
        TypeError: when called, if a differentiated argument is a `RowSparse`.

    Warns:
        StorageFallbackWarning: if the gradient of a table had to be made dense because
            the table is used otherwise too (a tied softmax).

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> def loss(params, ids):
        ...     return jnp.sum(params["table"][ids] * params["scale"])
        >>> params = {"table": jnp.ones((1000, 2)), "scale": jnp.float32(3)}
        >>> value, grads = jmask.value_and_grad(loss)(params, jnp.array([7, 5, 7]))
        >>> value
        Array(18., dtype=float32)
        >>> grads
        {'scale': Array(6., dtype=float32), 'table': RowSparse(float32[1000, 2], nse=3)}
    """

    @functools.wraps(fun, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def value_and_grad_of_fun(*args: Any, **kwargs: Any) -> Any:
        numbers = _positions(argnums, args)
        if any(_holds_masked(args[number]) for number in numbers):
            return _of_masked(fun, numbers, has_aux, args, kwargs, isinstance(argnums, int))
        stock = jax.value_and_grad(fun, numbers, has_aux)
        trace = _Trace(stock, args, kwargs, numbers)
        differentiated = tuple(args[number] for number in numbers)
        _check_differentiable(differentiated, numbers)
        program, outputs = jax.make_jaxpr(trace, return_shape=True)(*differentiated)
        computed, gradients = outputs
        wanted = (
            jax.tree.map(lambda x: False, computed),
            jax.tree.map(lambda x: x.ndim > 0, gradients),
        )
        results = _INTERPRETER.run(
            program.jaxpr,
            program.consts,
            jax.tree.leaves(differentiated),
            jax.tree.leaves(wanted),
        )
        computed, gradients = jax.tree.unflatten(
            jax.tree.structure(outputs), map(_finished, results)
        )
        gradient = gradients if isinstance(argnums, Sequence) else gradients[0]
        return trace.with_static(computed), gradient

    return value_and_grad_of_fun


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Like `jax.grad`; the gradient of a table that is only looked up is sparse.

    Arguments, errors and warnings are those of `value_and_grad`.

    Returns:
        A function that returns the gradient, or (gradient, aux) with `has_aux`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.grad(lambda t: jnp.sum(t[jnp.array([1, 1])] ** 2))(jnp.ones((3, 2)))
        RowSparse(float32[3, 2], nse=2)
    """
    both = value_and_grad(fun, argnums, has_aux)

    @functools.wraps(both)
    def grad_of_fun(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return grad_of_fun


def _is_masked(x: Any) -> bool:
    return isinstance(x, MaskedTensor)


def _holds_masked(argument: Any) -> bool:
    return any(map(_is_masked, jax.tree.leaves(argument, is_leaf=_is_masked)))


def _of_masked(
    fun: Callable[..., Any],
    numbers: tuple[int, ...],
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    one: bool,
) -> Any:
    """Differentiate in the stored values of `MaskedTensor`s; gradients have their masks."""

    def values(x: Any) -> Any:
        return stored_values(x.storage) if _is_masked(x) else x

    def with_values(x: Any, new: Any) -> Any:
        if not _is_masked(x):
            return new
        # The stored values are no table: looked up or not, their gradient is an array.
        return x.with_values(new.todense() if is_row_sparse(new) else new)

    def mapped(function: Callable[..., Any], *trees: Any) -> Any:
        return jax.tree.map(function, *trees, is_leaf=_is_masked)

    def of_values(*plain: Any, **kwargs: Any) -> Any:
        rebuilt = list(plain)
        for number in numbers:
            rebuilt[number] = mapped(with_values, args[number], plain[number])
        return fun(*rebuilt, **kwargs)

    plain = list(args)
    for number in numbers:
        plain[number] = mapped(values, args[number])
    value, gradients = value_and_grad(of_values, numbers, has_aux)(*plain, **kwargs)
    gradients = tuple(
        mapped(with_values, args[number], gradient)
        for number, gradient in zip(numbers, gradients, strict=True)
    )
    return value, gradients[0] if one else gradients


class _Trace:
    """The gradient program as a function of the differentiated arguments alone.

    All other arguments are closed over, so they may be anything, as in JAX. What the
    function returns without having computed it (strings and numbers in `aux`) does not
    go through the program: it is remembered here.
    """

    def __init__(
        self,
        stock: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        numbers: tuple[int, ...],
    ):
        self.stock, self.args, self.kwargs, self.numbers = stock, args, kwargs, numbers
        self.structure: Any = None
        self.static: dict[int, Any] = {}

    def __call__(self, *differentiated: Any) -> tuple[list[Any], tuple[Any, ...]]:
        args = list(self.args)
        for number, argument in zip(self.numbers, differentiated, strict=True):
            args[number] = argument
        value, gradients = self.stock(*args, **self.kwargs)
        leaves, self.structure = jax.tree.flatten(value)
        self.static = {i: x for i, x in enumerate(leaves) if not isinstance(x, jax.core.Tracer)}
        return [x for i, x in enumerate(leaves) if i not in self.static], gradients

    def with_static(self, computed: list[Any]) -> Any:
        """The value (and aux) from its computed leaves and the remembered ones."""
        remaining = iter(computed)
        count = len(computed) + len(self.static)
        leaves = [self.static[i] if i in self.static else next(remaining) for i in range(count)]
        return jax.tree.unflatten(self.structure, leaves)


def _finished(result: Any) -> Any:
    """A result of the program as users see it."""
    if isinstance(result, Rows) and result.looked_up:
        return result.to_row_sparse()
    return result.todense() if isinstance(result, Rows | Filled) else result


def _positions(argnums: int | Sequence[int], args: tuple[Any, ...]) -> tuple[int, ...]:
    numbers = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    for number in numbers:
        if not isinstance(number, int | np.integer):
            raise TypeError(f"`argnums` must be integers, got {argnums!r}.")
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"`argnums` names argument {number}, but the function was called with "
                f"{len(args)} positional arguments."
            )
    return tuple(int(number) % len(args) for number in numbers)


def _check_differentiable(arguments: tuple[Any, ...], numbers: tuple[int, ...]) -> None:
    for argument, number in zip(arguments, numbers, strict=True):
        if any(map(is_row_sparse, jax.tree.leaves(argument, is_leaf=is_row_sparse))):
            raise TypeError(
                f"argument {number} holds a RowSparse: a parameter must be a dense array. "
                "Differentiate with respect to its `.values`, or pass `.todense()`."
            )
