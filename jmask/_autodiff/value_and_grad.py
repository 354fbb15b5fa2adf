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

from jmask._autodiff.arguments import (
    Leaves,
    after_reading,
    argument_name,
    argument_positions,
    check_argnums,
    check_argument,
    checked_result,
)
from jmask._autodiff.forward import Forward, Need
from jmask._autodiff.nested import Needed
from jmask._autodiff.taps import Taps, gradients_of_tables
from jmask._autodiff.uses import report_dense
from jmask._autodiff.views import view_of_table
from jmask._base.array_types import at_most, is_known
from jmask._base.fallback import LARGE
from jmask._base.forms import aval_of
from jmask._base.jaxprs import forwarded, origins
from jmask._base.row_ids import is_opaque
from jmask._base.shardings import on_explicit_mesh
from jmask._base.types import Argument, Function, Options, PyTree, PyTreeDef
from jmask._base.validation import Model, check_flag, leaf_name
from jmask._tables.quantized import refuse_quantized
from jmask._tensors.masked_tensor import is_tensor
from jmask._tensors.specified import counts_everywhere

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
) -> Callable[P, tuple[jax.Array, PyTree]]: ...
@overload
def value_and_grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = ...,
    *,
    has_aux: Literal[True],
    holomorphic: bool = ...,
    allow_int: bool = ...,
) -> Callable[P, tuple[tuple[jax.Array, PyTree], PyTree]]: ...
@overload
def value_and_grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = ...,
    has_aux: bool = ...,
    holomorphic: bool = ...,
    allow_int: bool = ...,
) -> Callable[P, tuple[PyTree, PyTree]]: ...
def value_and_grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[PyTree, PyTree]]:
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
    check_argnums(argnums)
    check_flag("has_aux", has_aux)
    check_flag("holomorphic", holomorphic)
    check_flag("allow_int", allow_int)

    @functools.wraps(fun, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def value_and_grad_of_fun(*args: P.args, **kwargs: P.kwargs) -> tuple[PyTree, PyTree]:
        numbers = argument_positions(argnums, args)
        for n in numbers:
            refuse_quantized(args[n])
        with on_explicit_mesh([args[i] for i in numbers]):
            # 1. The loss, traced forwards as a program of the leaves. It says which are tables.
            models = {n: Model(args[n], is_tensor, allow_int) for n in numbers}
            program = LossProgram(fun, models, args, kwargs, has_aux)
            program.report_dense()

            # 2. The program with a tap at each lookup. Tables are constants of it.
            arrays = program.leaves.arrays(program.jaxpr)

            def tapped_loss(
                zeros: PyTree, others: dict[int, jax.Array]
            ) -> tuple[jax.Array, PyTree]:
                taps, inputs = Taps(program.taps, zeros), enumerate(arrays)
                (loss, *rest), _ = program.run([others.get(i, x) for i, x in inputs], taps)
                return loss, (rest, taps.record)

            # 3. JAX differentiates: in the taps, and in each leaf that is no table.
            zeros = jax.tree.map(lambda tap: tap.zeros(), program.taps)
            others = {i: arrays[i] for i in sorted(program.real - program.tables)}
            differentiated = jax.value_and_grad(
                tapped_loss, (0, 1), has_aux=True, holomorphic=holomorphic
            )
            with jax.named_scope("jmask.value_and_grad"):
                (loss, (rest, ids)), (cotangents, dense) = differentiated(zeros, others)

                # 4. The cotangents of a table's taps are the rows of its gradient.
                sparse = gradients_of_tables(arrays, program.taps, ids, cotangents)

                # 5. All reads of the tables come before what writes them.
                beside = {k: rest[k] for k in program.beside}
                beside, dense, sparse = after_reading(loss, beside, dense, sparse)
            every = [(dense | sparse).get(i) for i in range(len(arrays))]
            pairs = zip(models.values(), program.leaves.gradients(every), strict=True)
            gradients = tuple(m.gradient(x) for m, x in pairs)
            value = program.result([beside.get(k, x) for k, x in enumerate(rest)])
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
) -> Callable[P, tuple[PyTree, PyTree]]: ...
@overload
def grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = ...,
    has_aux: bool = ...,
    holomorphic: bool = ...,
    allow_int: bool = ...,
) -> Callable[P, PyTree]: ...
def grad(
    fun: Callable[P, PyTree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, PyTree]:
    """Differentiate as `jax.grad`, with row-sparse gradients of looked-up tables.

    See `value_and_grad` for arguments, errors and warnings.

    Returns:
        A function that returns the gradient, or (gradient, aux) with `has_aux`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.grad(lambda t: jnp.sum(t[jnp.array([1, 1])] ** 2))(jnp.ones((3, 2)))
        RowSparse(float32[3, 2], nse=2)
    """
    return without_value(
        value_and_grad(fun, argnums, has_aux, holomorphic, allow_int), fun, has_aux
    )


def without_value(run: Function, fun: Function, has_aux: bool) -> Function:
    """Return `run`, a `value_and_grad` of `fun`, without the value; `aux` stays."""

    # The value orders reads and writes of tables in a step, whether it is returned or not.
    @functools.wraps(fun, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def grad_of_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
        value, gradient = run(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return grad_of_fun


class LossProgram:
    """A loss as a program of the leaves that are differentiated, and what is found in it.

    The program returns the loss, then all that is computed of what the function returns. What
    is not (strings and numbers in `aux`) is kept here.

    Attributes:
        leaves, jaxpr: the inputs of the program, and the program.
        live: the inputs that a gradient comes to.
        real: the inputs to differentiate: all but placeholders without a gradient.
        tables: the inputs in `real` whose gradient is row-sparse.
        taps: of the lookups of tables, as the record of `Taps`.
        needs: of each input that might have been a table.
        beside: which parts of `aux`, numbered from the output after the loss, are computed of
            tables; not a table that is returned unchanged.
    """

    def __init__(
        self,
        fun: Function,
        models: dict[int, Model],
        args: tuple[PyTree, ...],
        kwargs: Options,
        has_aux: bool,
    ) -> None:
        self._fun, self._models, self._args, self._kwargs = fun, models, args, kwargs
        self._parameters = {n: model.parameters for n, model in models.items()}
        for number, parameters in self._parameters.items():
            check_argument(fun, number, parameters)
        self._has_aux = has_aux
        self.leaves = Leaves(list(self._parameters.values()))
        self._structure: PyTreeDef
        self._static: dict[int, PyTree] = {}
        program = jax.make_jaxpr(self)(*self.leaves.given)
        asks = self.leaves.of_tensors and not self.leaves.everywhere
        if asks and counts_everywhere(program.jaxpr):  # for placeholders of tensors
            self.leaves.everywhere = True
            try:  # another function, since JAX remembers what it has traced
                program = jax.make_jaxpr(lambda *arrays: self(*arrays))(*self.leaves.given)
            except TypeError as error:
                raise TypeError(
                    "the gradient of `jmask.todense(x)` is at all entries of `x`, and `fun` "
                    "gives it a tensor that is `x` in one case and another one in others, as "
                    "in two branches of a `cond`: call todense where `x` is, or with "
                    "masked_grad=True."
                ) from error
        self.jaxpr, self._consts = program.jaxpr, program.consts

        avals = [aval_of(v) for v in self.jaxpr.invars]
        self._avals, self._needed = avals, Needed()
        self._wanted = [True] + [False] * (len(self.jaxpr.outvars) - 1)
        needed = self._needed.within(self.jaxpr, self._wanted)
        self.live = {i for i, v in enumerate(self.jaxpr.invars) if v in needed}
        self.real = set(range(len(avals))) - (self.leaves.placeholders - self.live)
        self.needs: dict[int, list[Need]] = {}
        self.tables = {i for i in self.real - self.leaves.of_tensors if avals[i].shape}
        # Whether a table is sparse may depend on others: one that is dense is an array in the
        # next round. The last round drops none.
        self.taps: PyTree = []
        dense = self.tables
        while dense:
            taps, needs = Taps(), {i: list[Need]() for i in self.tables}
            for need in self.run(avals, taps)[1]:
                needs[need.table].append(need)
            self.taps = taps.record
            self.needs |= needs
            dense = {i for i in self.tables if not self._is_sparse(i, needs[i])}
            self.tables = self.tables - dense
        self.beside: list[int] = []
        if has_aux:
            loss, *rest = self.jaxpr.outvars
            is_table = [i in self.tables for i in range(len(avals))]
            reads, sources = origins(self.jaxpr, is_table)[1:], forwarded(self.jaxpr)[1:]
            for k, (v, is_read, source) in enumerate(zip(rest, reads, sources, strict=True)):
                is_computed = source is None and v is not loss and not is_opaque(aval_of(v))
                if is_read and is_computed:
                    self.beside.append(k)

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        # All other arguments are closed over, so they may be anything, as in JAX.
        trees = zip(self._models.items(), self.leaves.rebuilt(arrays), strict=True)
        models = {n: model.with_parameters(tree) for (n, model), tree in trees}
        args = [models.get(i, x) for i, x in enumerate(self._args)]
        # A model with functions or flags is copied anyway: writes to it are not checked.
        whole = [n for n, model in self._models.items() if not model.others]
        result = checked_result(self._fun, args, self._kwargs, whole, self._has_aux)
        results, self._structure = jax.tree.flatten(result)
        is_static = [not isinstance(x, jax.core.Tracer) for x in results]
        self._static = {i: x for i, x in enumerate(results) if is_static[i]}
        computed = [x for i, x in enumerate(results) if not is_static[i]]
        return [jnp.asarray(result[0] if self._has_aux else result), *computed]

    def run(self, inputs: Sequence[Argument], taps: Taps) -> tuple[list[jax.Array], list[Need]]:
        """Return all outputs of the program, and of a trial what it needs of tables."""
        views = [view_of_table(i, x) if i in self.tables else x for i, x in enumerate(inputs)]
        forward = Forward(self._avals, taps, self._needed)
        outs = forward.arrays((self.jaxpr, self._consts), views, self._wanted)
        return outs, forward.needs

    def _is_sparse(self, number: int, needs: Sequence[Need]) -> bool:
        """Decide by its uses whether the gradient of an input is rows."""
        table = self._avals[number]
        sharding = getattr(table, "sharding", None)
        if getattr(sharding and sharding.spec, "reduced", None):
            return False  # its gradient is a sum over devices, each of which has a summand
        if any(need.rows is None for need in needs):
            return False
        slices = [need for need in needs if not need.is_lookup]
        known = [need for need in slices if is_known(need.total)]  # else it is a small share
        share = sum((need.rows or 0) / max(need.total, 1) for need in known)
        if len(slices) < len(needs):  # `table[1:]` is a use of the whole table
            return share < 0.5
        size = math.prod(table.shape) * table.dtype.itemsize
        is_large = at_most(LARGE, size) and at_most(_MANY, table.shape[0])
        return bool(slices) and is_large and 8 * share <= 1

    def result(self, computed: Sequence[jax.Array]) -> PyTree:
        """Rebuild the result of the function from the outputs that follow the loss."""
        rest, count = iter(computed), len(computed) + len(self._static)
        results = [self._static[i] if i in self._static else next(rest) for i in range(count)]
        return self.leaves.without_placeholders(self._structure.unflatten(results))

    def report_dense(self) -> None:
        """Warn of tables whose gradients are dense."""

        @functools.cache
        def names() -> list[str]:
            return [
                leaf_name(argument_name(self._fun, number), path)
                for number, tree in self._parameters.items()
                for path, _ in jax.tree.leaves_with_path(tree, is_leaf=is_tensor)
            ]

        dense = {i: needs for i, needs in self.needs.items() if i not in self.tables}
        report_dense(self.jaxpr, lambda i: names()[self.leaves.owners[i]], dense)
