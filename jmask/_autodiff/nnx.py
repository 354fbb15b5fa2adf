"""Gradients of flax nnx modules: `jmask.nnx`, which says what is written back."""

import functools
import inspect
from collections.abc import Sequence
from types import ModuleType

import jax

from jmask._autodiff import value_and_grad as autodiff
from jmask._base.types import Argument, Function, KeyPath, Options, PyTree, PyTreeDef
from jmask._base.validation import check_flag, shown


def value_and_grad(
    f: Function | None = None,
    *,
    argnums: Argument = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Function:
    """Differentiate as `nnx.value_and_grad`, with row-sparse gradients of looked-up tables.

    Args:
        f: a function of modules, of other graph nodes (`nnx.Rngs`, `nnx.Variable`) and of
            trees of arrays, returning a scalar, or (scalar, aux) with `has_aux`. Without it
            the result is a decorator.
        argnums: the positional argument(s) to differentiate: positions, or
            `nnx.DiffState(position, filter)`. In modules an `nnx.Param` is differentiated, or
            what the filter says; all else that `f` writes to is updated in place, as by nnx.
            A module that is in another argument too is differentiated in both places, where
            nnx raises.
        has_aux: whether `f` returns auxiliary data with the scalar.
        holomorphic: whether `f` is complex and holomorphic, of complex arguments.
        allow_int: whether arguments may hold integers; their gradient is of dtype float0.

    Returns:
        A function with the arguments of `f` that returns (value, gradient). The gradient of a
        module is an `nnx.State`, as `nnx.Optimizer.update` takes it.

    Raises:
        ImportError: if flax is not installed.
        TypeError: if `f` is no function or `argnums` holds neither positions nor
            `nnx.DiffState`; and as of `jmask.value_and_grad`.
        ValueError: if a position is repeated, or the call has no such argument.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> from flax import nnx
        >>> class Model(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.embed = nnx.Embed(1000, 2, rngs=rngs)
        ...         self.norm = nnx.BatchNorm(2, rngs=rngs)
        ...     def __call__(self, ids):
        ...         return self.norm(self.embed(ids))
        >>> model = Model(nnx.Rngs(0))
        >>> loss = lambda model, ids: jnp.mean(model(ids) ** 3)
        >>> value, grads = jmask.nnx.value_and_grad(loss)(model, jnp.array([7, 5, 7]))
        >>> grads["embed"]["embedding"][...]
        RowSparse(float32[1000, 2], nse=3)
        >>> bool((model.norm.mean[...] != 0).all())
        True
    """
    nnx = _flax_nnx()
    check_flag("has_aux", has_aux)
    wanted = _filters(nnx, argnums)
    options: Options = {"argnums": argnums, "has_aux": has_aux}
    options |= {"holomorphic": holomorphic, "allow_int": allow_int}
    if f is None:
        return functools.partial(value_and_grad, **options)
    if not callable(f):
        raise TypeError(f"`f` must be a function, got {shown(f)}.")

    @functools.wraps(f)
    def value_and_grad_of_f(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if any(n >= len(args) for n in wanted):  # by position, as nnx takes them
            bound = inspect.signature(f).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if wanted and max(wanted) >= len(args):
            raise ValueError(
                f"`argnums` holds {max(wanted)}, and the function was called with {len(args)} "
                "positional arguments."
            )
        with nnx.update_context(_TAG):
            arguments = _Arguments(nnx, args, kwargs, wanted)

            @functools.wraps(f)
            def with_state(*parameters: PyTree) -> PyTree:
                nodes, (args, kwargs) = arguments.merged(parameters)
                result = f(*args, **kwargs)
                is_pair = has_aux and isinstance(result, tuple) and len(result) == 2
                loss, aux = result if is_pair else (result, None)
                if has_aux and not is_pair:
                    raise TypeError(
                        f"`f` must return (loss, aux) with has_aux=True, got {shown(result)}."
                    )
                return loss, (aux, arguments.written(nodes, parameters))

            numbers = tuple(wanted) if isinstance(argnums, Sequence) else next(iter(wanted))
            run = autodiff.value_and_grad(with_state, numbers, True, holomorphic, allow_int)
            (value, (aux, state)), gradient = run(*arguments.parameters)
            arguments.write(state)
            return ((value, aux) if has_aux else value), gradient

    return value_and_grad_of_f


def grad(
    f: Function | None = None,
    *,
    argnums: Argument = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Function:
    """Differentiate as `nnx.grad`, with row-sparse gradients of looked-up tables.

    See `value_and_grad` for arguments, errors and what is updated in place.

    Returns:
        A function that returns the gradient, or (gradient, aux) with `has_aux`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> from flax import nnx
        >>> embed = nnx.Embed(1000, 2, rngs=nnx.Rngs(0))
        >>> jmask.nnx.grad(lambda m: jnp.sum(m(jnp.array([1, 1]))))(embed)["embedding"][...]
        RowSparse(float32[1000, 2], nse=2)
    """
    options: Options = {"argnums": argnums, "has_aux": has_aux}
    options |= {"holomorphic": holomorphic, "allow_int": allow_int}
    run = value_and_grad(f, **options)
    if f is None:
        return functools.partial(grad, **options)

    return autodiff.without_value(run, f, has_aux)


# Of the context in which nnx knows the nodes inside of a function as those outside of it.
_TAG = "jmask"


class _Arguments:
    """The arguments of a call: graph nodes in them, their parameters and their other state.

    Attributes:
        parameters: the arguments; in those that are differentiated with the parameters of
            each graph node, an `nnx.State`, in its place. None for the others.
    """

    def __init__(
        self,
        nnx: ModuleType,
        args: tuple[PyTree, ...],
        kwargs: Options,
        wanted: dict[int, object],
    ) -> None:
        self.nnx, self.wanted, self.args, self.kwargs = nnx, wanted, args, kwargs
        self.is_node = lambda x: isinstance(x, nnx.Pytree | nnx.Variable)
        self.tree: PyTreeDef
        self.structure: PyTreeDef
        self.unchanged: dict[int, int]
        paths, self.tree = jax.tree.flatten_with_path((args, kwargs), is_leaf=self.is_node)
        self.leaves = [leaf for _, leaf in paths]
        # The argument that each leaf is of; -1 is for those by keyword.
        self.owners = [path[1].idx if path[0].idx == 0 else -1 for path, _ in paths]
        self.places = [i for i, x in enumerate(self.leaves) if self.is_node(x)]
        # Where a variable is in two nodes, it is a parameter if one of them is differentiated.
        self.places.sort(key=lambda i: self.owners[i] not in wanted)
        self.nodes = [self.leaves[i] for i in self.places]
        predicates = {
            n: nnx.filterlib.to_predicate(nnx.Param if kind is None else kind)
            for n, kind in wanted.items()
        }

        def is_parameter(path: KeyPath, x: object) -> bool:
            place: Argument = path[0]
            owner = self.owners[self.places[place]]
            if owner not in wanted:
                return False
            # A variable that is an argument itself is one, whatever its type.
            is_argument = len(path) == 1 and wanted[owner] is None
            return is_argument or predicates[owner](path[1:], x)

        self.is_parameter = is_parameter
        with nnx.split_context(_TAG) as context:
            self.graph, params, self.rest = context.split(self.nodes, is_parameter, ...)
        leaves = list(self.leaves)
        for number, place in enumerate(self.places):
            leaves[place] = params[number] if number in params else nnx.State({})
        whole, _ = self.tree.unflatten(leaves)
        self.parameters = [x if i in wanted else None for i, x in enumerate(whole)]

    def merged(
        self, parameters: Sequence[PyTree]
    ) -> tuple[PyTree, tuple[Sequence[PyTree], Options]]:
        """Return the nodes of parameters, new objects, and (args, kwargs) with them."""
        parts = zip(parameters, self.args, strict=True)
        args = tuple(x if part is None else part for part, x in parts)
        leaves = self.tree.flatten_up_to((args, self.kwargs))
        states = self.nnx.State(
            {
                number: leaves[i]
                for number, i in enumerate(self.places)
                if self.owners[i] in self.wanted
            }
        )
        with self.nnx.merge_context(_TAG, inner=True) as context:
            nodes = context.merge(self.graph, states, self.rest)
        for i, node in zip(self.places, nodes, strict=True):
            leaves[i] = node
        return nodes, self.tree.unflatten(leaves)

    def written(self, nodes: PyTree, parameters: Sequence[PyTree]) -> list[jax.Array]:
        """Return what nodes have now: all arrays but parameters that are as they were given."""
        given = {id(x): i for i, x in enumerate(jax.tree.leaves(parameters))}
        with self.nnx.split_context(_TAG) as context:
            self.graph, state = context.split(nodes)
        leaves, self.structure = jax.tree.flatten(state)
        self.unchanged = {i: given[id(x)] for i, x in enumerate(leaves) if id(x) in given}
        return [x for i, x in enumerate(leaves) if i not in self.unchanged]

    def write(self, state: Sequence[jax.Array]) -> None:
        """Update the graph nodes of the call in place: arrays, attributes, submodules."""
        given, rest = jax.tree.leaves(self.parameters), iter(state)
        count = len(state) + len(self.unchanged)
        leaves = [
            given[self.unchanged[i]] if i in self.unchanged else next(rest)
            for i in range(count)
        ]
        with self.nnx.merge_context(_TAG, inner=False) as context:
            context.merge(self.graph, self.structure.unflatten(leaves))


def _filters(nnx: ModuleType, argnums: Argument) -> dict[int, object]:
    """Return the filter of each argument to differentiate, or None for `nnx.Param`."""
    wanted: dict[int, object] = {}
    for x in argnums if isinstance(argnums, Sequence) else (argnums,):
        number, kind = (x.argnum, x.filter) if isinstance(x, nnx.DiffState) else (x, None)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise TypeError(
                "`argnums` must be positions from 0 or nnx.DiffState(position, filter), got "
                f"{shown(number)}."
            )
        if number in wanted:
            raise ValueError(f"`argnums` holds {number} twice.")
        wanted[number] = kind
    return wanted


def _flax_nnx() -> ModuleType:
    try:
        from flax import nnx
    except ImportError as error:
        raise ImportError("jmask.nnx needs flax: pip install flax") from error
    return nnx
