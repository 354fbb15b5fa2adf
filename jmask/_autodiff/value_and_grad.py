"""`jmask.value_and_grad`: `jax.value_and_grad` with row-sparse gradients for tables.

    loss, grads = jmask.value_and_grad(lambda table: table[ids].sum())(table)
    grads       RowSparse(ids, ones), and not an array as large as the table

The function is written as always. Its gradient program, the jaxpr of
`jax.value_and_grad(f)`, is interpreted with rules that keep what a lookup contributes to
a table's gradient as (ids, rows); see `interpreter`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, ParamSpec, overload

import jax
import jax.numpy as jnp
import numpy as np

from jmask._autodiff.arguments import (
    after_all_reads,
    after_reading,
    argument_name,
    checked_loss,
    reads_late,
    tensor_gradients,
)
from jmask._autodiff.control_flow import COLLECTIVE_RULES, CONTROL_FLOW_RULES
from jmask._autodiff.interpreter import Interpreter
from jmask._autodiff.rules import EQUATION_RULES
from jmask._autodiff.uses import refined_reports
from jmask._autodiff.values import Filled, RowSum, dense, is_symbolic
from jmask._autodiff.views import note_tables
from jmask._base.array_types import on_explicit_mesh
from jmask._base.fallback import collected, expect_dense, report_fallback
from jmask._base.types import Function, Gradients, Options, PyTree, PyTreeDef, Value
from jmask._base.validation import (
    KEEP_ARRAYS,
    Model,
    abstract_leaf,
    check_flag,
    leaf_name,
    not_an_array,
)
from jmask._tensors.masked_tensor import is_tensor

_KEEP_ARRAYS = (
    f"{KEEP_ARRAYS}; jmask.nnx.value_and_grad and jmask.nnx.grad take a whole model of flax nnx"
)
P = ParamSpec("P")
_INTERPRETER = Interpreter({**EQUATION_RULES, **CONTROL_FLOW_RULES, **COLLECTIVE_RULES})


@overload
def value_and_grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = ...,
    has_aux: Literal[False] = ...,
    holomorphic: bool = ...,
    allow_int: bool = ...,
) -> Callable[P, tuple[jax.Array, Gradients]]: ...
@overload
def value_and_grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = ...,
    *,
    has_aux: Literal[True],
    holomorphic: bool = ...,
    allow_int: bool = ...,
) -> Callable[P, tuple[tuple[jax.Array, PyTree], Gradients]]: ...
@overload
def value_and_grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = ...,
    has_aux: bool = ...,
    holomorphic: bool = ...,
    allow_int: bool = ...,
) -> Callable[P, tuple[PyTree, Gradients]]: ...
def value_and_grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[PyTree, Gradients]]:
    """Differentiate as `jax.value_and_grad`, with row-sparse gradients of looked-up tables.

    A parameter whose gradient is a sum of lookups (`t[ids]`, `jnp.take`, flax and equinox
    embeddings, under jit, vmap, remat, scan, cond) gets a `RowSparse` gradient with one
    stored row for each lookup. Every other parameter gets what JAX gives. Made dense, the
    result equals JAX's, out-of-range ids included.

    Args:
        fun: a function returning a scalar, or (scalar, aux) with `has_aux`.
        argnums: the positional argument(s) to differentiate: pytrees of float arrays, and of
            `RowSparse`, BCOO, BCSR and `MaskedTensor`, whose gradients have the same
            positions or mask. Where entries count that are not there (`jmask.todense`), the
            gradient of such a tensor is a dense array. In a tree that holds functions or flags
            (a model of equinox) what is no floating array is no parameter: its gradient is
            None, as in `eqx.filter_value_and_grad`.
        has_aux: whether `fun` returns auxiliary data with the scalar.
        holomorphic: whether `fun` is complex and holomorphic, of complex arguments.
        allow_int: whether arguments may hold integers; their gradient is of dtype float0.

    Returns:
        A function with the arguments of `fun` that returns (value, gradient), as
        `jax.value_and_grad` does.

    Raises:
        TypeError: if `fun` is no function; from the returned function, if its result is no
            scalar, or an argument that is differentiated has leaves that are no arrays, or
            integers, naming the leaf.

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

    if not callable(fun):
        raise TypeError(
            f"`fun` must be a function, got {type(fun).__name__}: write "
            "jmask.value_and_grad(loss_fn)(params, batch)."
        )
    check_flag("has_aux", has_aux)
    check_flag("holomorphic", holomorphic)
    check_flag("allow_int", allow_int)

    @functools.wraps(fun, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def value_and_grad_of_fun(*args: P.args, **kwargs: P.kwargs) -> tuple[PyTree, Gradients]:
        numbers = _positions(argnums, args)
        value, gradients = value_and_gradients(
            fun, numbers, has_aux, args, kwargs, holomorphic=holomorphic, allow_int=allow_int
        )
        gradients = after_reading(value[0] if has_aux else value, gradients)
        return value, gradients if isinstance(argnums, Sequence) else gradients[0]

    return value_and_grad_of_fun


@overload
def grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = ...,
    *,
    has_aux: Literal[True],
    holomorphic: bool = ...,
    allow_int: bool = ...,
) -> Callable[P, tuple[Gradients, PyTree]]: ...
@overload
def grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = ...,
    has_aux: bool = ...,
    holomorphic: bool = ...,
    allow_int: bool = ...,
) -> Callable[P, Gradients]: ...
def grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Gradients]:
    """Differentiate as `jax.grad`, with row-sparse gradients of looked-up tables.

    See `value_and_grad` for arguments, errors and warnings.

    Returns:
        A function that returns the gradient, or (gradient, aux) with `has_aux`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.grad(lambda t: jnp.sum(t[jnp.array([1, 1])] ** 2))(jnp.ones((3, 2)))
        RowSparse(float32[3, 2], nse=2)
    """
    # The value orders reads and writes of tables in a step, whether it is returned or not.
    run = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)

    @functools.wraps(fun, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def grad_of_fun(*args: P.args, **kwargs: P.kwargs) -> Gradients:
        value, gradient = run(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return grad_of_fun


def value_and_gradients(
    fun: Function,
    numbers: tuple[int, ...],
    has_aux: bool,
    args: tuple[PyTree, ...],
    kwargs: Options,
    finished: Callable[[Value], PyTree] | None = None,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> tuple[PyTree, tuple[Gradients, ...]]:
    """Return the value (and aux), and a gradient for each of the positions `numbers`.

    `finished` makes what is returned of each result of the gradient program: by default an
    array or a `RowSparse`.
    """
    finished = finished or _finished
    with on_explicit_mesh([args[i] for i in numbers]):
        models = {number: Model(args[number], is_tensor, allow_int) for number in numbers}
        fun = function_of_parameters(fun, models)
        args = tuple(models[i].parameters if i in models else x for i, x in enumerate(args))
        for number in numbers:
            _check_argument(fun, number, args[number])
        differentiate = functools.partial(_value_and_results, has_aux, kwargs, holomorphic)
        finish = functools.partial(jax.tree.map, finished, is_leaf=is_symbolic)
        given = jax.tree.leaves([args[n] for n in numbers], is_leaf=is_tensor)
        if any(map(is_tensor, given)):
            value, results = tensor_gradients(fun, numbers, args, differentiate, finish)
        else:
            value, results = differentiate(fun, numbers, args)
            results = finish(results)
        pairs = zip(numbers, results, strict=True)
        return value, tuple(models[number].gradient(x) for number, x in pairs)


def function_of_parameters(fun: Function, models: dict[int, Model]) -> Function:
    """Return `fun` as a function of the parameters of models, by their position."""
    if not any(model.others for model in models.values()):
        return fun

    @functools.wraps(fun)
    def parameter_function(*args: PyTree, **kwargs: PyTree) -> PyTree:
        whole = (models[i].with_parameters(x) if i in models else x for i, x in enumerate(args))
        return fun(*whole, **kwargs)

    return parameter_function


def _value_and_results(
    has_aux: bool,
    kwargs: Options,
    holomorphic: bool,
    fun: Function,
    numbers: tuple[int, ...],
    args: tuple[PyTree, ...],
) -> tuple[PyTree, tuple[Gradients, ...]]:
    """Return the value (and aux), and the gradients as the gradient program leaves them."""
    loss = checked_loss(fun, numbers, has_aux)
    stock = jax.value_and_grad(loss, numbers, has_aux, holomorphic=holomorphic)
    differentiated = tuple(args[number] for number in numbers)
    structure: PyTreeDef | None = None
    static: dict[int, PyTree] = {}

    # The gradient program is a function of the differentiated arguments alone. All others are
    # closed over, so they may be anything, as in JAX. What `fun` returns without having
    # computed it (strings and numbers in `aux`) does not go through the program: it is
    # remembered here.
    def trace(*differentiated: PyTree) -> tuple[list[jax.Array], tuple[Gradients, ...]]:
        nonlocal structure, static
        new = dict(zip(numbers, differentiated, strict=True))
        value, gradients = stock(*(new.get(i, x) for i, x in enumerate(args)), **kwargs)
        leaves, structure = jax.tree.flatten(value)
        static = {i: x for i, x in enumerate(leaves) if not isinstance(x, jax.core.Tracer)}
        return [x for i, x in enumerate(leaves) if i not in static], gradients

    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Filled) else x,
        differentiated,
        is_leaf=is_symbolic,
    )
    program, outputs = jax.make_jaxpr(trace, return_shape=True)(*given)
    computed, gradients = outputs
    count = len(computed)
    wanted = [False] * count + [x.ndim > 0 for x in jax.tree.leaves(gradients)]

    def names() -> list[str]:
        return [
            leaf_name(argument_name(fun, number), path)
            for number, tree in zip(numbers, differentiated, strict=True)
            for path, _ in jax.tree.leaves_with_path(tree)
        ]

    # What became dense on the way is said when it is known what came of it.
    inputs = jax.tree.leaves(differentiated, is_leaf=is_symbolic)
    note_tables([*program.consts, *inputs])
    with collected() as reports, jax.named_scope("jmask.value_and_grad"):
        results = _INTERPRETER.run(program.jaxpr, program.consts, inputs, wanted)
    if isinstance(results[0], jax.core.Tracer) and reads_late(program.jaxpr, results):
        results = after_all_reads(results)
    sums = results[count:]
    rows = [x.nse if isinstance(x, RowSum) and x.is_rows else None for x in sums]
    for report in refined_reports(program.jaxpr, names, rows, reports):
        report_fallback(*report)
    remaining = map(_finished, results[:count])
    every = range(count + len(static))
    leaves = [static[i] if i in static else next(remaining) for i in every]
    tree: PyTreeDef = jax.tree.structure(gradients)
    return jax.tree.unflatten(structure, leaves), tree.unflatten(sums)


def _finished(result: PyTree) -> PyTree:
    """Return a result of the program as users see it."""
    if isinstance(result, RowSum) and result.is_rows:
        return result.to_row_sparse()
    result = dense(result)
    if isinstance(result, jax.Array) and result.ndim > 1:
        expect_dense(result)
    return result


def _positions(argnums: int | Sequence[int], args: tuple[PyTree, ...]) -> tuple[int, ...]:
    numbers: tuple[Value, ...]
    numbers = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    for number in numbers:
        if not isinstance(number, int | np.integer):
            # Of flax.nnx: a position, and a filter of what is differentiated there.
            is_filter = hasattr(number, "argnum") and hasattr(number, "filter")
            instead = "; jmask.nnx.value_and_grad takes it" if is_filter else ""
            raise TypeError(f"`argnums` must be integers, got {argnums!r}{instead}.")
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"`argnums` names argument {number}, but the function was called with "
                f"{len(args)} positional arguments."
            )
    return tuple(int(number) % len(args) for number in numbers)


def _check_argument(fun: Function, number: int, argument: PyTree) -> None:
    """Refuse a differentiated argument with leaves that have no gradient, by name."""
    for path, leaf in jax.tree.leaves_with_path(argument, is_leaf=is_tensor):
        if is_tensor(leaf):
            continue
        array = abstract_leaf(leaf)
        if array is None:
            raise not_an_array(leaf_name(argument_name(fun, number), path), leaf, _KEEP_ARRAYS)
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            raise TypeError(
                f"{leaf_name(argument_name(fun, number), path)} is {array.dtype}, and grad "
                "requires real- or complex-valued inputs: pass it as another argument, or "
                f"{_KEEP_ARRAYS}."
            )
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{leaf_name(argument_name(fun, number), path)} is a ShapeDtypeStruct, which "
                "holds no numbers: use jmask.explain, or jax.eval_shape(jmask.grad(f), ...)."
            )
