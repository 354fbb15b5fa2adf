"""`jmask.value_and_grad`: `jax.value_and_grad` with row-sparse gradients for tables.

    loss, grads = jmask.value_and_grad(lambda table: table[ids].sum())(table)
    grads       RowSparse(ids, ones), and not an array as large as the table

The function is written as always. It is traced once, forwards. Its jaxpr says which parameters
are tables, that is which are looked up and not needed as a whole; then it runs with an argument
of zeros at each lookup, in which JAX differentiates. See `taps`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, ParamSpec, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jmask._autodiff.arguments import after_reading, argument_name, checked_loss
from jmask._autodiff.forward import Forward, Need
from jmask._autodiff.taps import Taps, gradients_of_tables
from jmask._autodiff.tensors import Leaves
from jmask._autodiff.uses import report_dense
from jmask._autodiff.views import view_of_table
from jmask._base.fallback import LARGE
from jmask._base.forms import aval_of
from jmask._base.shardings import on_explicit_mesh, sharding_of_type
from jmask._base.types import Function, Gradients, Options, PyTree, PyTreeDef, Shaped, Value
from jmask._base.validation import (
    KEEP_ARRAYS,
    Model,
    abstract_leaf,
    check_flag,
    leaf_name,
    not_an_array,
    shown,
)
from jmask._tensors.masked_tensor import is_tensor
from jmask._tensors.specified import counts_everywhere

_KEEP_ARRAYS = (
    f"{KEEP_ARRAYS}; jmask.nnx.value_and_grad and jmask.nnx.grad take a whole model of flax nnx"
)
P = ParamSpec("P")
# Rows from which an array that is sliced with fixed bounds counts as a table, whose gradient is
# worth storing by rows: a stack of eight weights of layers is sliced so too, and its users
# expect an array. A judgement, not a measurement.
_MANY = 1000


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
    holomorphic: bool = False,
    allow_int: bool = False,
) -> tuple[PyTree, tuple[Gradients, ...]]:
    """Return the value (and aux), and a gradient for each of the positions `numbers`."""
    with on_explicit_mesh([args[i] for i in numbers]):
        models = {n: Model(args[n], is_tensor, allow_int) for n in numbers}
        fun = function_of_parameters(fun, models)
        args = tuple(models[i].parameters if i in models else x for i, x in enumerate(args))
        for number in numbers:
            check_argument(fun, number, args[number])

        # 1. The program of the loss, forwards, as a function of the leaves.
        leaves = Leaves([args[n] for n in numbers])
        loss = Loss(fun, numbers, args, kwargs, has_aux, leaves)
        program = loss.traced()

        # 2. Which leaves are tables is read from it: nothing is traced for that.
        read = Reading(program, leaves)
        report_dense(program.jaxpr, loss.names, read.dense())

        # 3. The program with a tap at each lookup. Tables are constants of it.
        arrays = leaves.arrays(program.jaxpr)

        def tapped_loss(zeros: PyTree, others: dict[int, Value]) -> tuple[jax.Array, PyTree]:
            taps = Taps(read.taps, zeros)
            inputs = [others.get(i, x) for i, x in enumerate(arrays)]
            computed = read.run(inputs, taps)
            return computed[0], (computed[1:], taps.record)

        # 4. JAX differentiates: in the taps, and in each leaf that is no table.
        zeros = jax.tree.map(lambda tap: tap.zeros(), read.taps)
        others = {i: arrays[i] for i in sorted(read.real - read.tables)}
        differentiated = jax.value_and_grad(
            tapped_loss, (0, 1), has_aux=True, holomorphic=holomorphic
        )
        with jax.named_scope("jmask.value_and_grad"):
            (_, (computed, ids)), (cotangents, dense) = differentiated(zeros, others)

            # 5. The cotangents of a table's taps are the rows of its gradient.
            sparse = gradients_of_tables(arrays, read.taps, ids, cotangents)
        gradients = leaves.gradients(
            [sparse[i] if i in sparse else dense.get(i) for i in range(len(arrays))]
        )
        pairs = zip(numbers, gradients, strict=True)
        return loss.result(computed), tuple(models[n].gradient(x) for n, x in pairs)


def function_of_parameters(fun: Function, models: dict[int, Model]) -> Function:
    """Return `fun` as a function of the parameters of models, by their position."""
    if not any(model.others for model in models.values()):
        return fun

    @functools.wraps(fun)
    def parameter_function(*args: PyTree, **kwargs: PyTree) -> PyTree:
        whole = (models[i].with_parameters(x) if i in models else x for i, x in enumerate(args))
        return fun(*whole, **kwargs)

    return parameter_function


class Loss:
    """The loss as a function of the leaves that are differentiated.

    It returns arrays: the loss, then all that is computed of what it returns. What is not
    (strings and numbers in `aux`) does not go through the program, and is kept here.
    """

    def __init__(
        self,
        fun: Function,
        numbers: tuple[int, ...],
        args: tuple[PyTree, ...],
        kwargs: Options,
        has_aux: bool,
        leaves: Leaves,
    ) -> None:
        self.fun, self.numbers, self.args, self.kwargs = fun, numbers, args, kwargs
        self.has_aux, self.leaves = has_aux, leaves
        self.checked = checked_loss(fun, numbers, has_aux)
        self.structure: PyTreeDef
        self.static: dict[int, PyTree] = {}

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        # All other arguments are closed over, so they may be anything, as in JAX.
        new = dict(zip(self.numbers, self.leaves.rebuilt(arrays), strict=True))
        result = self.checked(*(new.get(i, x) for i, x in enumerate(self.args)), **self.kwargs)
        if self.has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                "with has_aux=True `fun` must return a two-element tuple (loss, aux), got "
                f"{shown(result)}."
            )
        results, self.structure = jax.tree.flatten(result)
        is_static = [not isinstance(x, jax.core.Tracer) for x in results]
        self.static = {i: x for i, x in enumerate(results) if is_static[i]}
        computed = [x for i, x in enumerate(results) if not is_static[i]]
        return [jnp.asarray(result[0] if self.has_aux else result), *computed]

    def traced(self) -> ClosedJaxpr:
        """Return the program; with placeholders of tensors if it asks for them."""
        program = jax.make_jaxpr(self)(*self.leaves.given)
        if not self.leaves.of_tensors or self.leaves.everywhere:
            return program
        if not counts_everywhere(program.jaxpr):
            return program
        self.leaves.everywhere = True
        try:  # another function, since JAX remembers what it has traced
            return jax.make_jaxpr(lambda *arrays: self(*arrays))(*self.leaves.given)
        except TypeError as error:
            raise TypeError(
                "the gradient of `jmask.todense(x)` is at all entries of `x`, and `fun` gives "
                "it a tensor that is `x` in one case and another one in others, as in two "
                "branches of a `cond`: call todense where `x` is, or with masked_grad=True."
            ) from error

    def result(self, computed: Sequence[jax.Array]) -> PyTree:
        """Return what the function returned, of what was computed."""
        rest, count = iter(computed), len(computed) + len(self.static)
        results = [self.static[i] if i in self.static else next(rest) for i in range(count)]
        return self.leaves.without_placeholders(self.structure.unflatten(results))

    def names(self) -> list[str]:
        """Return the names of the leaves, in backticks."""
        names = [
            leaf_name(argument_name(self.fun, number), path)
            for number in self.numbers
            for path, _ in jax.tree.leaves_with_path(self.args[number], is_leaf=is_tensor)
        ]
        return [names[owner] for owner in self.leaves.owners]


class Reading:
    """What is read from a program about its inputs, and how it runs with taps.

    Attributes:
        real: the inputs that a gradient is taken in.
        tables: those of them whose gradient is rows.
        taps: of the lookups of tables, as `Taps.specs`.
        uses: of each input that might have been a table.
        needed: the variables that a gradient goes through.
    """

    def __init__(self, program: ClosedJaxpr, leaves: Leaves) -> None:
        self._program = program
        self._avals: list[Shaped] = [aval_of(v) for v in program.jaxpr.invars]
        self._forward = Forward(self._avals)
        self._wanted = [True] + [False] * (len(program.jaxpr.outvars) - 1)
        self.needed = self._forward.needed.within(program.jaxpr, self._wanted)
        unused = {i for i in leaves.placeholders if program.jaxpr.invars[i] not in self.needed}
        self.real = set(range(len(self._avals))) - unused
        self.uses: dict[int, list[Need]] = {}
        self.tables = {i for i in self.real - leaves.of_tensors if self._avals[i].shape}
        # Tables may be computed with each other: what is dense is an array of the next round.
        # Each round drops a table, or is the last.
        while True:
            uses, self.taps = self._trial()
            self.uses = uses | self.uses
            tables = {i for i in self.tables if self._is_sparse(i, uses[i])}
            if tables == self.tables:
                break
            self.tables = tables

    def _trial(self) -> tuple[dict[int, list[Need]], PyTree]:
        """Return the uses of tables, and the taps of their lookups."""
        uses: dict[int, list[Need]] = {i: [] for i in self.tables}
        self._forward.needs, taps = [], Taps()
        if self.tables:
            self.run(self._avals, taps)
        for use in self._forward.needs:
            uses[use.table].append(use)
        return uses, taps.record

    def run(self, inputs: Sequence[Value], taps: Taps) -> list[jax.Array]:
        """Return all outputs of the program."""
        views = [view_of_table(i, x) if i in self.tables else x for i, x in enumerate(inputs)]
        program = self._program.jaxpr, self._program.consts
        return self._forward.arrays(program, views, taps, self._wanted)

    def _is_sparse(self, number: int, uses: Sequence[Need]) -> bool:
        """Decide by its uses whether the gradient of an input is rows."""
        table, slices, share = self._avals[number], 0, 0.0
        sharding = sharding_of_type(table)
        if sharding is not None and getattr(sharding.spec, "reduced", None):
            return False  # its gradient is a sum over devices, each of which has a summand
        for use in uses:
            if use.rows is None:
                return False
            if not use.is_lookup:
                slices, share = slices + 1, share + use.rows / max(use.of, 1)
        if slices < len(uses):  # `table[1:]` is a use of the whole table
            return share < 0.5
        size = math.prod(table.shape) * table.dtype.itemsize
        return slices > 0 and size >= LARGE and table.shape[0] >= _MANY and 8 * share <= 1

    def dense(self) -> dict[int, list[Need]]:
        """Return the uses of inputs that might have been tables, and are none."""
        return {i: uses for i, uses in self.uses.items() if i not in self.tables}


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


def check_argument(fun: Function, number: int, argument: PyTree) -> None:
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
