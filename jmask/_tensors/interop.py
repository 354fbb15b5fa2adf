"""Tensors in code of other packages, which takes a `RowSparse` for a tree of arrays.

    optax.adam(0.1).update(grads, state)        put it inside jmask.lazy
    optax.tree.norm(grads)                      jmask.tree.norm(grads)
    eqx.apply_updates(params, grads)            jmask.apply_updates
    flax.serialization.to_bytes(grads)          ids as integers

Such code fails inside JAX, which does not know the way out. But JAX flattens a `RowSparse`, or
prints its type, where it finds that trees differ, and so code of jmask runs there: it looks at
who called, and says what to do. Where a version of JAX or of optax names its functions
otherwise, JAX's own error stands.
"""

import sys
from collections.abc import Callable, Sequence
from types import FrameType

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmask._base.row_ids import hide, is_opaque, reveal
from jmask._base.types import PyTree, Table, Tensor

_LAZY = (
    "put the optimizer inside jmask.lazy, as in jmask.lazy(optax.adam(1e-3)), with all that is "
    "chained to it"
)

# What optax.partition and optax.masked do with a function, and what to give them instead.
OF_LABELS = (
    "a function of labels, which optax calls with the gradients, row-sparse ones too: make the "
    "tree once, labels = labels_of(params), and write optax.partition(transforms, lambda _: "
    "labels), or put it inside jmask.lazy"
)

_PER_EXAMPLE = (
    "jmask.tree.scale(jnp.minimum(1, clip / jmask.tree.norm(grads)), grads) of each example, "
    "under jax.vmap, and sum them by jmask.tree.merge, as in docs/privacy.md"
)

# Functions of packages, and what to write instead of them.
_INSTEAD = {
    ("optax", "per_example_global_norm_clip"): _PER_EXAMPLE,
    ("optax", "per_example_layer_norm_clip"): _PER_EXAMPLE,
    ("optax", "differentially_private_aggregate"): _PER_EXAMPLE,
    ("optax", "MultiSteps"): "jmask.multi_steps(jmask.lazy(optax.adam(1e-3)), k, like=grads)",
    ("optax", "apply_if_finite"): "jmask.skip_nonfinite(jmask.lazy(optax.adam(1e-3)))",
    ("equinox", "apply_updates"): "jmask.apply_updates(model, updates)",
}
# The same, unless an optimizer of optax has called them. They call methods of every leaf, which
# name nothing where they fail, so they are told apart before.
_OF_LEAVES = {
    "tree_norm": "jmask.tree.norm(grads)",
    "tree_cast": "grads['table'].astype(dtype)",
    "tree_cast_like": "grads['table'].astype(dtype)",
}


def refuse_misuse() -> None:
    """Raise where the one who flattens will fail on a `RowSparse`, or has failed.

    Called in each flattening, so it looks at names of functions alone, and far only then.
    """
    frame = sys._getframe(2)
    name = frame.f_code.co_name
    if name == "tree_flatten" and frame.f_back is not None:  # of JAX, called in `tree_map`
        frame = frame.f_back
        name = frame.f_code.co_name
    if name == "flatten":  # by a transformation that calculates with the leaves themselves
        is_update = _nth_caller(frame, 1) == "update_fn"
        if is_update and "differentially_private_aggregate" in _advice(frame):
            raise TypeError(_message(frame)) from None
    elif name == "tree_map":
        if _nth_caller(frame, 2) in _OF_LEAVES:
            raise TypeError(_message(frame)) from None
    elif name == "tree_structure":
        by = _nth_caller(frame, 1)
        if by == "_prefix_error" and _nth_caller(frame, 2) == "tree_map":
            raise ValueError(_message(frame)) from None
        if by == "_equality_errors" and "apply_if_finite" in _advice(frame):
            raise TypeError(_message(frame)) from None


_UPDATES_OF_A_TABLE = (
    "optax.apply_updates (in flax' TrainState.apply_gradients and nnx.Optimizer.update) cannot "
    "update a {}: write params, opt_state = jmask.apply_gradients(tx, grads, opt_state, "
    "params), or jmask.apply_updates(params, updates)."
)
_OVER_A_TABLE = (
    "a {0} is one table, and jax.vmap and jax.lax.scan cannot map over it: make one table of "
    "stacked ones, `stack.reshape(-1, D)`, and look row `i` of table `m` up as `m * V + i`; or "
    "make a {0} of each by jax.vmap, and map the whole step over them."
)
_OF_DEFERRED_TABLES = (
    "optax.{} maps arithmetic over the leaves of a DeferredTable, which are no numbers: "
    "calculate with `table.todense()`, or use jmask.tree.norm"
)


# Functions of JAX that map over an axis of their arguments, by their local variables: those
# arguments. What an `in_axes` of several levels says is left to JAX.
_MAPPED: dict[str, Callable[[dict[str, PyTree]], PyTree]] = {
    "vmap_f": lambda x: (_along(x.get("in_axes"), x.get("args", ())), x.get("kwargs")),
    "scan": lambda x: x.get("xs"),
}


def _along(axes: object, arguments: Sequence[object]) -> list[object]:
    each = axes if isinstance(axes, tuple | list) else [axes] * len(arguments)
    return [x for x, axis in zip(arguments, each, strict=False) if isinstance(axis, int)]


def refuse_misuse_of_table(table: Table) -> bool:
    """Raise where optax would calculate with the leaves of a table, or JAX map over them.

    Return whether optax asks for dtypes alone (`optax.inject_hyperparams`) and compares them,
    which the dtype of an opaque leaf refuses.
    """
    # Between them: `tree_flatten`, `tree_map` and JAX's own functions around them.
    kind, frame = type(table).__name__, sys._getframe(1).f_back
    for _ in range(3):
        if frame is None or not _module(frame).startswith("jax."):
            break
        mapped = _MAPPED.get(frame.f_code.co_name)
        # Axis 0 of its arrays is not that of the table, unless `jax.vmap` made them.
        if mapped is not None and not table.is_stack():
            leaves = jax.tree.leaves(mapped(frame.f_locals), is_leaf=lambda x: x is table)
            if any(x is table for x in leaves):
                raise TypeError(_OVER_A_TABLE.format(kind)) from None
        frame = frame.f_back
    if frame is None or not _module(frame).startswith("optax."):
        return False
    module, name = _module(frame), frame.f_code.co_name
    if name == "apply_updates":
        raise TypeError(_UPDATES_OF_A_TABLE.format(kind)) from None
    is_arithmetic = ".tree_utils." in module or name == "incremental_update"
    if kind == "DeferredTable" and is_arithmetic and name not in _HARMLESS:
        raise TypeError(_OF_DEFERRED_TABLES.format(name) + ".") from None
    return name == "tree_dtype"


_HARMLESS = ("tree_dtype", "tree_map_params", "tree_get", "tree_get_all_with_path", "tree_set")


# Modules that compare or store leaves as arrays of NumPy, which opaque ids are not.
_TAKES_PLAIN_IDS = ("chex._src.asserts", "orbax.checkpoint")


def takes_plain_ids() -> bool:
    """Decide whether the caller that flattens or unflattens is to see ids as integers.

    Tools that compare leaves or write them to files then work; they do not compute with them.
    """
    # Between them: functions of `jax.tree.map`, and the methods of the class.
    frame: FrameType | None = sys._getframe(1)
    for _ in range(7):
        if frame is None or not _module(frame).startswith(("jax.", "jmask._tensors.")):
            break
        frame = frame.f_back
    return frame is not None and _module(frame).startswith(_TAKES_PLAIN_IDS)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class NamesItsFunctions(type):
    """The type of a class whose name in errors of JAX says which functions take it."""

    _functions = "jmask.numpy and jmask.nn have the functions that take it"

    def __repr__(cls) -> str:
        said = cls._said(sys._getframe(1))
        return f"{super().__repr__()} ({said})" if said else super().__repr__()

    def _said(cls, frame: FrameType) -> str:
        module = _module(frame)
        is_operation = module.startswith("jax.") and not module.endswith(".tree_util")
        return cls._functions if is_operation else ""


class SaysWhatToDo(NamesItsFunctions):
    """The same of a `RowSparse`, and what to do where JAX finds that trees differ."""

    _functions = (
        f"{NamesItsFunctions._functions}; to sum gradients write jmask.tree.add or "
        "jmask.multi_steps(tx, k, like=grads)"
    )

    def _said(cls, frame: FrameType) -> str:
        if _module(frame).endswith(".tree_util") and frame.f_code.co_name != "_equality_errors":
            return _advice(frame)
        return super()._said(frame)


def _nth_caller(frame: FrameType, n: int) -> str:
    caller: FrameType | None = frame
    for _ in range(n):
        caller = None if caller is None else caller.f_back
    return "" if caller is None else caller.f_code.co_name


def _message(frame: FrameType) -> str:
    return (
        f"a row-sparse gradient (RowSparse) is no array: {_advice(frame)}. More is in "
        "docs/sharp_bits.md, Transformations outside `lazy`."
    )


def instead_of(frame: FrameType) -> str | None:
    """Say what to write instead of the function that a frame runs, if it is a known one."""
    package, function = _function_of(frame)
    instead = _INSTEAD.get((package, function))
    return instead and f"for {package}.{function} write {instead}"


def _function_of(frame: FrameType) -> tuple[str, str]:
    """Return the package and the outermost function, or class, that a frame belongs to."""
    return _module(frame).partition(".")[0], frame.f_code.co_qualname.partition(".")[0]


def _advice(frame: FrameType | None) -> str:
    """Say what to do instead, by the calls of known packages that led here."""
    leaf_advice, is_optimizer = "", False
    while frame is not None:
        package, function = _function_of(frame)
        instead = instead_of(frame)
        if instead is not None:
            return instead
        if package == "optax" and frame.f_code.co_name == "mask_pytree":
            return f"optax.partition or optax.masked has {OF_LABELS}"
        if package in ("optax", "jaxopt"):
            leaf_advice = leaf_advice or _OF_LEAVES.get(function, "")
            is_optimizer = is_optimizer or function not in (*_OF_LEAVES, "global_norm")
        frame = frame.f_back
    if is_optimizer:
        return _LAZY
    if leaf_advice:
        return f"write {leaf_advice}"
    return (
        "jmask.tree has sums, means and norms of gradients, and jmask.tree.map gives "
        "functions the RowSparse itself"
    )


# --- state dicts of flax -------------------------------------------------------------------
#
#     RowSparse        {"indices": ids, "values": rows}         ids as integers
#     MaskedTensor     {"data": array, "mask": booleans}
#
# flax looks types up in a registry, and jmask does not import flax: a type is registered when
# one of its objects is made after flax was imported.

_registered: set[type] = set()


def register_in_flax(kind: type) -> None:
    """Let flax store objects of this type, if flax is there."""
    if kind in _registered:
        return
    serialization = sys.modules.get("flax.serialization")
    register = getattr(serialization, "register_serialization_state", None)
    if register is not None:
        _registered.add(kind)
        register(kind, _to_state, _from_state)


def _named(x: Tensor) -> dict[str, jax.Array]:
    leaves = jax.tree.leaves_with_path(x)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _to_state(x: Tensor) -> dict[str, jax.Array]:
    named = _named(x)
    return {name: reveal(leaf) if is_opaque(leaf) else leaf for name, leaf in named.items()}


def _from_state(like: Tensor, state: dict[str, ArrayLike]) -> Tensor:
    named = _named(like)
    if sorted(named) != sorted(state):
        raise ValueError(
            f"the state of a {type(like).__name__} has {sorted(state)}, expected "
            f"{sorted(named)}: give a tensor on the same storage as target."
        )
    leaves = [
        hide(jnp.asarray(state[name])) if is_opaque(leaf) else jnp.asarray(state[name])
        for name, leaf in named.items()
    ]
    result = jax.tree.unflatten(jax.tree.structure(like), leaves)
    storage = getattr(result, "storage", result)
    if hasattr(storage, "validate"):  # what was stored may not be what `like` promises
        storage.validate()
    return result
