"""Lift functions of `jax.numpy` to masked tensors, by four words.

| word         | data of the result          | an entry of the result exists where           |
|--------------|-----------------------------|-----------------------------------------------|
| `entrywise`  | f(where(valid, x, safe))    | the entries of all operands do                |
| `reduces`    | a formula of valid entries  | one entry of its group does (`reduce.py`)     |
| `moves`      | f(x)                        | what is moved there does, or f brings it in   |
| `contracts`  | f(where(valid, x, 0))       | one term of its sum of products does          |

Entries are selected before f, and results after it, by the mask: the derivative of a selection
sends exactly 0 to what was not selected, in both modes and at every order. `safe` only matters
to `jax_debug_nans`: ½ lies in the domain of all functions of `jax.numpy` but arccosh.

Functions of entries are applied to stored values if all sparse operands share the index arrays
of one; dense operands are sampled there. In all other cases they become dense, with a warning.
"""

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.fallback import report_fallback
from jmask._base.types import Argument, Function, PyTree, PyTreeDef, Storage, Tensor, TensorLike
from jmask._base.validation import refuse_other_tensors
from jmask._ops.rows import ZeroRules, on_stored_values, where_or
from jmask._tensors.conversions import from_numpy_ma
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    any_masked,
    as_tensor,
    common_shape,
    is_tensor,
    joined,
)
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import (
    array_if_none_sparse,
    as_dense,
    is_sparse,
    same_index_arrays,
    sampled,
    stored_values,
    with_stored_values,
)


def adopted(x: Argument) -> Argument:
    """Convert arrays of numpy.ma, and a BCOO that is all dense; refuse tensors of SciPy."""
    if isinstance(x, np.ma.MaskedArray):
        return from_numpy_ma(x)
    refuse_other_tensors("x", x)
    return array_if_none_sparse(x)


def dense(x: Tensor, name: str, why: str = "") -> jax.Array | MaskedTensor:
    """Return `x` on dense storage; report that the function `name` made a sparse one dense."""
    storage = data_of(x)
    if not is_sparse(storage):
        return x if isinstance(x, MaskedTensor) else storage
    if isinstance(storage, RowSparse):
        storage.check_single()
    text = f"`{name}` made a sparse tensor of shape {np.shape(x)} dense, at O(size) cost"
    report_fallback(f"{text}: {why}" if why else text)
    return x.to_dense() if isinstance(x, MaskedTensor) else as_dense(storage)


def data_of(x: Tensor) -> Storage:
    """Return the data of a masked tensor, and anything else as it is."""
    return x.storage if isinstance(x, MaskedTensor) else x


def is_hidden(x: Argument) -> jax.Array:
    """Find where a dense masked tensor is masked: nowhere for an array."""
    return ~x.valid if isinstance(x, MaskedTensor) else jnp.zeros(jnp.shape(x), bool)


def each(word: Function, *functions: Function) -> list[Function]:
    """Lift several functions by one word."""
    return [word(function) for function in functions]


def bound_to(
    signature: inspect.Signature,
    name: str,
    args: Sequence[Argument],
    kwargs: dict[str, Argument],
) -> inspect.BoundArguments:
    """Bind arguments to the signature of the function `name`, which an error names."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None


def refuse_output(options: dict[str, Argument]) -> None:
    """Drop NumPy's arguments about memory; refuse them, as JAX does, if they ask for it."""
    for name in ("out", "overwrite_input"):
        value = options.pop(name, None)
        if value is not None and value is not False:  # an array may be of zeros
            raise NotImplementedError(f"`{name}` is not supported: results are new arrays.")


def extends(
    of_jax: Function, *tensors: str, more: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Extend a function of JAX to masked tensors, with its arguments and documentation.

    The decorated function is called if a tensor is masked, or an argument in `more` is given:
    with the tensors by position and other arguments by name. Otherwise the function of JAX is.
    Sparse storage becomes dense.

    Args:
        tensors: names of the arguments that are tensors; by default the first.
        more: names of arguments that JAX does not have.
    """
    signature = inspect.signature(of_jax)
    tensors = tensors or tuple(signature.parameters)[:1]

    def extend(function: Function) -> Function:
        @functools.wraps(of_jax)
        def extended(*args: Argument, **kwargs: Argument) -> PyTree:
            extra = {name: kwargs.pop(name) for name in more if name in kwargs}
            bound = bound_to(signature, of_jax.__name__, args, kwargs)
            options = bound.arguments
            for name in tensors:
                if options.get(name) is not None:
                    x = as_tensor(adopted(options[name]))
                    options[name] = dense(x, of_jax.__name__)
            operands = [options.get(name) for name in tensors]
            if not extra and not any_masked(*operands):
                return of_jax(*bound.args, **bound.kwargs)
            refuse_output(options)
            options = {name: x for name, x in options.items() if name not in tensors}
            return function(*operands, **options, **extra)

        extended.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{of_jax.__doc__}"
        return extended

    return extend


# --- entrywise ---------------------------------------------------------------------------


def entrywise(
    function: Function,
    safe: float = 0.5,
    *,
    adds: bool = False,
    scales: Sequence[tuple[int, ...]] = (),
    vanishes: Sequence[tuple[int, ...]] = (),
    by_arrays: bool = True,
) -> Function:
    """Lift a function whose result at an entry depends on the operands at this entry alone.

    Args:
        safe: what floating operands are where an entry does not exist; the function and its
            first two derivatives should be finite there. Integers are 1 there.
        adds, scales, vanishes, by_arrays: what it makes of zeros that are not stored, as
            `rows.py` says.
    """

    @functools.wraps(function)
    def lifted(*args: Argument, **kwargs: Argument) -> Tensor:
        # None is an argument, as in clip(x, None, 1).
        leaves, structure = jax.tree.flatten(
            (args, kwargs), is_leaf=lambda x: not isinstance(x, tuple | dict)
        )
        leaves = [adopted(x) for x in leaves]
        # Python's numbers are options of all entries.
        is_operand = lambda x: is_tensor(x) or isinstance(x, jax.Array | np.ndarray | list)
        places = [i for i, x in enumerate(leaves) if is_operand(x)]
        operands = [leaves[i] for i in places]

        def on_arrays(*operands: jax.Array) -> jax.Array:
            arguments = dict(enumerate(leaves)) | dict(zip(places, operands, strict=True))
            args, kwargs = jax.tree.unflatten(structure, arguments.values())
            return function(*args, **kwargs)

        if not any(map(is_tensor, operands)):
            return on_arrays(*operands)
        name = getattr(function, "__name__", "a function")
        if any_masked(*operands):
            like, values, masks = aligned(operands, name)
            # Operands made from one tensor share its mask, which is then not read twice.
            distinct = {id(mask): mask for mask in masks if mask is not _ALL}
            valid = functools.reduce(operator.and_, distinct.values())
            return masked_at(
                like, on_arrays(*[where_or(valid, x, safe) for x in values]), valid
            )

        def among_operands(several: Sequence[tuple[int, ...]]) -> list[set[int]]:
            # Arguments are numbered by position. A set of them counts if each is an operand, or
            # an option that is 0, as in where(c, 0, x).
            counts = lambda i: i < len(args) and (i in places or not leaves[i])
            counted = [one for one in several if all(map(counts, one))]
            return [{places.index(i) for i in one if i in places} for one in counted]

        rules = ZeroRules(adds, among_operands(scales), among_operands(vanishes), by_arrays)
        return on_stored_values(on_arrays, operands, name, safe, rules)

    return lifted


def elementwise(function: Function, safe: float = 0.5) -> Function:
    """Lift an elementwise JAX function to masked and sparse tensors.

    Args:
        function: takes one or more arrays that broadcast, by position or by name, and
            options; each entry of its result depends on that entry of the arrays alone.
        safe: a number at which the function and its derivatives are finite: floating
            operands have it where entries do not exist. Only `jax_debug_nans` sees it.

    Returns:
        A function that takes `MaskedTensor`, `RowSparse`, BCOO, BCSR and arrays in place of
        arrays: masks intersect, plain operands broadcast, masked entries get no gradient.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([-1., 4.]), jnp.array([False, True]))
        >>> jmask.numpy.elementwise(lambda x: jnp.sqrt(x) + 1)(x)
        MaskedTensor([--, 3.0], dtype=float32)
    """
    return entrywise(function, safe)


# The mask of an operand that is not masked.
_ALL: Argument = np.ones((), bool)


def aligned(
    operands: Sequence[TensorLike], name: str
) -> tuple[Storage | None, list[jax.Array], list[jax.Array]]:
    """Bring operands to the stored positions of one of them.

    Returns:
        The sparse storage whose positions these are, None if all is dense; the values of each
        operand there; and the mask of each, a scalar True if it is not masked.
    """
    tensors: list[Tensor] = [x if is_tensor(x) else jnp.asarray(x) for x in operands]
    shape = common_shape([x.shape for x in tensors])
    storages = [data_of(x) for x in tensors]
    masked = [x.storage for x in tensors if isinstance(x, MaskedTensor)]
    like = next((s for s in masked if is_sparse(s) and s.shape == shape), None)
    if like is None or not all(same_index_arrays(s, like) for s in filter(is_sparse, storages)):
        like, tensors = None, [dense(x, name) for x in tensors]

    def at_positions(x: Tensor, part: jax.Array) -> jax.Array:
        if like is None or is_sparse(data_of(x)) or not jnp.ndim(part):
            return part
        return sampled(part, like, shape)

    masks = [x.valid if isinstance(x, MaskedTensor) else _ALL for x in tensors]
    values = list(map(at_positions, tensors, map(stored_values, tensors)))
    return like, values, list(map(at_positions, tensors, masks))


def masked_at(like: Storage | None, values: jax.Array, valid: jax.Array) -> MaskedTensor:
    """Join values and a mask, which broadcast, at the positions of `like`; None is dense."""
    shape = jnp.broadcast_shapes(values.shape, valid.shape)
    values, valid = jnp.broadcast_to(values, shape), jnp.broadcast_to(valid, shape)
    return joined(values if like is None else with_stored_values(like, values), valid)


def by_name(of_jax: Function, number: int) -> Callable[[Function], Function]:
    """Let the first arguments of a function, `number` of them, be given by JAX's names too."""
    names = list(inspect.signature(of_jax).parameters)[:number]

    def decorated(function: Function) -> Function:
        @functools.wraps(of_jax)
        def named(*args: Argument, **kwargs: Argument) -> PyTree:
            given = itertools.takewhile(kwargs.__contains__, names[len(args) :])
            return function(*args, *[kwargs.pop(name) for name in given], **kwargs)

        return named

    return decorated


# --- moves -------------------------------------------------------------------------------


def moves(function: Function, *, variadic: bool = False) -> Function:
    """Lift a function that moves entries: data and flags of masked entries move together.

    The flags say "masked", not "valid", so that zeros a function brings in (`triu`, `diag`)
    come out as valid entries. Sparse storage becomes dense.

    Args:
        function: its first argument is an array or a sequence of arrays; it returns arrays
            of their entries (and zeros).
        variadic: all positional arguments are arrays.
    """

    @by_name(function, 1)
    def lifted(*args: Argument, **kwargs: Argument) -> PyTree:
        operands, options = (args, ()) if variadic else (args[:1], args[1:])
        structure: PyTreeDef
        leaves, structure = jax.tree.flatten(operands, is_leaf=is_tensor)
        leaves = [adopted(x) for x in leaves]
        if not any(map(is_tensor, leaves)):
            return function(*args, **kwargs)
        leaves = [dense(x, function.__name__) for x in leaves]
        moved = lambda parts: function(*structure.unflatten(parts), *options, **kwargs)
        data = moved(map(data_of, leaves))
        if not any_masked(*leaves):
            return data
        hidden = moved(map(is_hidden, leaves))
        # A `dtype` is that of the data.
        return jax.tree.map(lambda x, hidden: joined(x, ~hidden.astype(bool)), data, hidden)

    return lifted


# --- contracts ---------------------------------------------------------------------------


def contracts(
    function: Function,
    places: Callable[[Sequence[Argument]], range] = lambda args: range(len(args))[:2],
) -> Function:
    """Lift a sum of products: masked entries add nothing, a sum exists where a term does.

    It is the sum of the products that exist, as `sum(a * b)`. But masked entries are zeros to
    the function of JAX, and a valid inf or nan times 0 is nan. Sparse storage becomes dense.

    Args:
        function: multiplies some of its arguments and sums the products.
        places: which of the positional arguments these are.
    """
    why = "a product of two matrices, of which one is sparse, is jmask.dot"

    @by_name(function, 2)
    def lifted(*args: Argument, **kwargs: Argument) -> Tensor:
        at = places(args)
        operands = [adopted(args[i]) for i in at]
        if not any(map(is_tensor, operands)):
            return function(*args, **kwargs)
        operands = [dense(x, function.__name__, why) for x in operands]

        def contracted(operands: Sequence[Storage], **options: Argument) -> jax.Array:
            arguments = dict(enumerate(args)) | dict(zip(at, operands, strict=True))
            return function(*arguments.values(), **{**kwargs, **options})

        if not any_masked(*operands):
            return contracted(operands)
        values = contracted([filled(x) for x in operands])
        # Terms are counted in float32, whatever the values are summed in.
        options = {"preferred_element_type": None} if "preferred_element_type" in kwargs else {}
        return joined(values, contracted([existing(x) for x in operands], **options) > 0.5)

    return lifted


def filled(x: Tensor) -> Storage:
    """Return a masked tensor's data with zeros where it is masked, on its storage."""
    if not isinstance(x, MaskedTensor):
        return x
    values = stored_values(x)
    return with_stored_values(x.storage, jnp.where(x.valid, values, jnp.zeros_like(values)))


def existing(x: Argument) -> Storage:
    """Return 1 where an entry exists and 0 elsewhere, on the storage of the tensor."""
    if isinstance(x, MaskedTensor):
        return with_stored_values(x.storage, x.valid.astype(jnp.float32))
    return jnp.ones(jnp.shape(x), jnp.float32)
