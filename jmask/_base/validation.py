"""Validate public arguments; each error names the argument and what to pass instead.

jmask.adam(0.1, lazy_update="no")     `lazy_update` must be True or False, got 'no'.
x.coalesce(nse=1.5)                   `nse` must be an integer that is known ..., got 1.5.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import SupportsIndex, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmask._base.types import DType, Function, KeyPath, PyTree, PyTreeDef, Shaped

_F = TypeVar("_F", bound=Function)
_T = TypeVar("_T")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False: the string "no" is true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be True or False, got {shown(value)}.")


def checked_array(name: str, value: object) -> jax.Array:
    """Return `value` as an array of numbers.

    A tensor of another framework is none, even if NumPy would make it one: where its numbers
    lie is for the caller to say.
    """
    refuse_other_tensors(name, value)
    array = _array(value)
    if array is None:
        raise TypeError(f"`{name}` must be an array of numbers, got {shown(value)}.")
    return array


def _array(value: object) -> jax.Array | None:
    """Return numbers, or nested lists of them, as an array; None for anything else."""
    try:
        if isinstance(value, list | tuple) or abstract_leaf(value) is not None:
            return jnp.asarray(value)
    except (TypeError, ValueError):
        pass
    return None


def checked_scalar(name: str, value: object, dtype: DTypeLike) -> jax.Array:
    """Return `value` as a number of `dtype`; refuse arrays with dimensions."""
    array = abstract_leaf(value)
    if array is not None and array.shape == ():
        is_complex = [jnp.issubdtype(x, jnp.complexfloating) for x in (array.dtype, dtype)]
        if is_complex != [True, False]:  # a cast may lose a fraction, but no imaginary part
            return jnp.asarray(value, dtype)
    raise TypeError(f"`{name}` must be a number of {jnp.dtype(dtype)}, got {shown(value)}.")


def checked_integer(name: str, value: object) -> int:
    """Return `value` as an integer that is known while tracing."""
    try:
        if isinstance(value, SupportsIndex) and not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(
        f"`{name}` must be an integer that is known while tracing, got {shown(value)}."
    )


def checked_dtype(name: str, value: DTypeLike | None, *, floating: bool = False) -> DType:
    try:
        dtype = None if value is None else jnp.dtype(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or (floating and not jnp.issubdtype(dtype, jnp.floating)):
        kind, got = "floating " * floating, dtype or shown(value)
        raise TypeError(f"`{name}` must be a {kind}dtype, such as jnp.float32, got {got}.")
    return dtype


def checked_choice(name: str, value: _T, choices: tuple[_T, ...]) -> _T:
    if not (isinstance(value, str) or value is None) or value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"`{name}` must be one of {known}, got {shown(value)}.")
    return value


def refuse_other_tensors(name: str, value: object) -> None:
    """Refuse tensors of SciPy and numpy.ma, which JAX and jmask have types of their own for."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"`{name}` is a numpy.ma array: pass jmask.from_numpy_ma({name}).")
    if type(value).__module__.startswith("scipy.sparse"):
        raise TypeError(
            f"`{name}` is a {type(value).__name__} of scipy.sparse: pass "
            "BCSR.from_scipy_sparse(x) or BCOO.from_scipy_sparse(x), of "
            "jax.experimental.sparse."
        )


def naming_arguments(**instead: str) -> Callable[[_F], _F]:
    """Make a decorator that refuses other libraries' names of arguments and says why."""

    def decorated(function: _F) -> _F:
        refused = instead.keys() - inspect.signature(function).parameters.keys()

        @functools.wraps(function)
        def checked(*args: PyTree, **kwargs: PyTree) -> PyTree:
            for name in kwargs:
                if name in refused:
                    message = f"{function.__name__}() has no argument `{name}`"
                    raise TypeError(f"{message}: {instead[name]}.")
            return function(*args, **kwargs)

        return cast(_F, checked)

    return decorated


def check_leaves(name: str, tree: PyTree) -> None:
    """Refuse leaves that are no arrays, sparse or masked tensors."""
    for path, x in jax.tree.leaves_with_path(tree):
        if abstract_leaf(x) is None:
            advice = "expected arrays, sparse and masked tensors"
            raise not_an_array(leaf_name(name, path), x, advice)


def shown(value: object) -> str:
    """Describe a value in a message: arrays and models may be large."""
    if value is None or isinstance(value, str | bool | int | float | complex):
        return repr(value)
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of shape {value.shape}, {value.dtype}"
    return type(value).__name__


# --- leaves -------------------------------------------------------------------------------
#
# What among the leaves of a tree is no array, and how an error names it.
#
#     {"table": jnp.ones((3, 2)), "activation": jax.nn.relu}     `params['activation']`
#     eqx.nn.MLP(...)                                            `params.activation`
#
# Models of equinox and flax nnx are trees that hold functions, names and counters next to
# their parameters. In a tree with a function or a flag only floating arrays are parameters, as
# in `eqx.filter_value_and_grad`. For other leaves JAX says that one is no array, but not which.

KEEP_ARRAYS = (
    "keep the parameters apart from what else a model holds, with eqx.partition(model, "
    "eqx.is_inexact_array) or nnx.split(model, nnx.Param, ...)"
)


def leaf_name(tree: str, path: KeyPath) -> str:
    """Write the leaf at `path` of the tree called `tree`, in backticks."""
    return f"`{tree}{jax.tree_util.keystr(path)}`"


def named_parts(
    name: str, paths: Sequence[KeyPath], tree: PyTree, owners: str = "the parameters"
) -> dict[int, PyTree]:
    """Return what is at each path of `name`, a tree like the parameters with parts missing."""
    parts = {i: functools.reduce(_child, path, tree) for i, path in enumerate(paths)}
    parts = {i: node for i, node in parts.items() if node is not None}
    if sum(len(jax.tree.leaves(node)) for node in parts.values()) != len(jax.tree.leaves(tree)):
        names = sorted(leaf_name("params", path) for path in paths)
        raise ValueError(
            f"`{name}` names rows of something else than {owners}, {', '.join(names)}: it is a "
            f'tree like `params` with some of these and no others, as {{"table": {name}}}.'
        )
    return parts


def _child(node: PyTree, key: object) -> PyTree:
    """Return what a tree has under the key of a path, or None."""
    if isinstance(node, Mapping):
        return node.get(getattr(key, "key", None))
    index = getattr(key, "idx", None)
    if isinstance(node, list | tuple) and index is not None:
        return node[index] if index < len(node) else None
    return getattr(node, getattr(key, "name", ""), None)


def abstract_leaf(leaf: object) -> Shaped | None:
    """Return shape and dtype of what JAX takes for an array, None for anything else."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return jax.typeof(leaf)
    except TypeError:
        return None


def is_on_host(array: Shaped | None) -> bool:
    """Decide whether an array is in the memory of the host, where XLA computes nothing."""
    return getattr(array, "memory_space", None) == jax.memory.Space.Host


def not_on_device(name: str) -> ValueError:
    """Return the error for an array in the host's memory."""
    return ValueError(
        f"{name} is in the host's memory, memory_kind='pinned_host', where no row of it can be "
        "looked up or updated: jmask.host.offload takes tables as NumPy arrays, "
        "np.array(table), and gives each step the rows of its batch; or move it to the device, "
        "jax.device_put(table, jax.memory.Space.Device)."
    )


class Model:
    """A tree, and what in it is no parameter if it holds functions or flags.

    Attributes:
        parameters: the tree with None for everything that is no floating array or tensor; the
            tree itself if it holds neither functions nor flags, or no parameters.
        others: the leaves that are no parameters, by their number.
        integers: the integers among them, whose gradient has dtype float0, by their number.
    """

    def __init__(
        self, tree: PyTree, is_tensor: Callable[[PyTree], bool], allow_int: bool = False
    ):
        self.is_leaf = lambda x: x is None or is_tensor(x)
        self.structure: PyTreeDef
        leaves, self.structure = jax.tree.flatten(tree, is_leaf=self.is_leaf)
        self.integers = {
            i: x for i, x in enumerate(leaves) if allow_int and self._is_integer(x)
        }
        rest = {i: x for i, x in enumerate(leaves) if x is not None and i not in self.integers}
        self.parameters, self.others = tree, dict[int, PyTree](self.integers)
        plain = [x for x in rest.values() if not is_tensor(x)]
        is_model = any(callable(x) or isinstance(x, bool) for x in plain)
        if is_model and any(map(self._is_parameter, rest.values())):
            self.others |= {i: x for i, x in rest.items() if not self._is_parameter(x)}
        if self.others:
            kept = [None if i in self.others else x for i, x in enumerate(leaves)]
            self.parameters = self.structure.unflatten(kept)

    def _is_parameter(self, x: object) -> bool:
        if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return jnp.issubdtype(x.dtype, jnp.inexact)
        return self.is_leaf(x)

    def _is_integer(self, x: object) -> bool:
        array = None if self.is_leaf(x) else abstract_leaf(x)
        return array is not None and not jnp.issubdtype(array.dtype, jnp.inexact)

    def with_parameters(self, parameters: PyTree) -> PyTree:
        """Return the tree with other parameters, arrays or what stands for them."""
        return self._filled(parameters, self.others)

    def gradient(self, parameters: PyTree) -> PyTree:
        """Return the gradient of the tree from the gradient of its parameters."""
        zeros = {i: np.zeros(np.shape(x), jax.dtypes.float0) for i, x in self.integers.items()}
        return self._filled(parameters, zeros)

    def _filled(self, parameters: PyTree, others: dict[int, PyTree]) -> PyTree:
        if not others:
            return parameters
        leaves = jax.tree.leaves(parameters, is_leaf=self.is_leaf)
        return self.structure.unflatten([others.get(i, x) for i, x in enumerate(leaves)])


def as_table(table: object) -> jax.Array:
    refuse_other_tensors("table", table)
    array = _array(table)
    if array is None:
        raise TypeError(
            f"`table` must be an array (V, *row), got {type(table).__name__}: of a tree of "
            "parameters give the one that is looked up, as in `params['table']`."
        )
    if array.ndim == 0:
        raise ValueError("`table` must have a dimension of rows, got a scalar.")
    if is_on_host(jax.typeof(array)):
        raise not_on_device("`table`")
    return array


def not_an_array(name: str, leaf: object, advice: str) -> TypeError:
    """Return the error for a leaf that is no array."""
    kind = type(leaf).__name__
    # Of objects, texts, another byte order; and NumPy's files make |V2 of bfloat16.
    if isinstance(leaf, np.ndarray):
        kind, advice = f"NumPy array of {leaf.dtype}", f"JAX has no such dtype; {advice}"
    article = "an" if kind[0].lower() in "aeio" else "a"
    return TypeError(f"{name} is {article} {kind}, not an array: {advice}.")
