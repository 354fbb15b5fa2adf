"""Primitives that become what suits the devices, where a program is lowered for these.

A trace does not know where it will run. A primitive is one equation of it, with a definition in
other operations, and at lowering it becomes what suits the devices:

    twice = primitive("twice", lambda x: [2 * x], shapes=lambda x: [x])
    lower(twice, on_one=lambda x: [x + x], on_several=lambda x: [2 * x], platform="cpu")

An equation of a `CallPrimitive` is a pytree: its static fields are parameters of the equation.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jmask._base.shardings import varying_alike
from jmask._base.types import (
    Argument,
    Arrays,
    ArraysFunction,
    Function,
    Options,
    PyTreeDef,
    Shaped,
)


class _Alike(Primitive):
    """A primitive whose operands may vary over different axes of a `shard_map`, as JAX's."""

    def bind(self, *operands: jax.Array, **how: Argument) -> Argument:
        return super().bind(*varying_alike(*operands), **how)


def primitive(
    name: str,
    definition: ArraysFunction,
    shapes: Function,
    kind: type[Primitive] = _Alike,
    *,
    is_lookup: bool = False,
) -> Primitive:
    """Make a primitive with several results, and hashable parameters that are given by name.

    Args:
        definition: its results outside jit, under vmap and to derivatives, and on devices
            that no lowering is registered for.
        shapes: the abstract results, of abstract operands.
        kind: `Primitive`, if each result varies as an operand does.
        is_lookup: whether its operands are a table and ids of any shape. Under vmap over ids
            alone it is one lookup still.
    """
    made = kind(name)
    made.multiple_results = True
    made.def_abstract_eval(shapes)

    # Outside jit a definition is compiled once for each set of parameters, not run by
    # operations.
    @functools.partial(jax.jit, static_argnums=0)
    def run(how: tuple[tuple[str, Argument], ...], *operands: jax.Array) -> Sequence[jax.Array]:
        return definition(*operands, **dict(how))

    def evaluated(*operands: jax.Array, **how: Argument) -> Sequence[jax.Array]:
        return run(tuple(how.items()), *operands)

    def batched(
        operands: Sequence[jax.Array], dims: Sequence[int | None], **how: Argument
    ) -> tuple[Sequence[jax.Array], list[int]]:
        if is_lookup and dims[0] is None and dims[1] is not None:
            table, ids = operands
            return made.bind(table, jnp.moveaxis(ids, dims[1], 0), **how), [0]
        # The definition is made of operations that have batching rules; the forms for devices
        # (a scatter with a combiner, a kernel) have none.
        mapped = jax.vmap(functools.partial(definition, **how), in_axes=tuple(dims))
        results = mapped(*operands)
        return results, [0] * len(results)

    def derivative(primals: Arrays, tangents: Arrays, **how: Argument) -> Arrays:
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        defined = functools.partial(definition, **how)
        return made.bind(*primals, **how), jax.jvp(defined, tuple(primals), tangents)[1]

    made.def_impl(evaluated)
    batching.primitive_batchers[made] = batched
    ad.primitive_jvps[made] = derivative
    lower(made, definition)
    return made


def lower(
    made: Primitive,
    on_one: ArraysFunction,
    on_several: ArraysFunction | None = None,
    platform: str | None = None,
) -> None:
    """Register a lowering of a primitive, for one platform or for all others.

    Args:
        on_several: on several devices, over which arrays may be sharded; None if as `on_one`,
            as in a `shard_map` over all axes.
        platform: a name of JAX's, or "gpu" for all GPUs.
    """

    def rule(
        ctx: mlir.LoweringRuleContext, *operands: Argument, **how: Argument
    ) -> Sequence[Argument]:
        context: Argument = ctx.module_context.axis_context
        mesh = getattr(context, "mesh", None)
        if mesh is None:
            is_for_one = getattr(context, "num_devices", None) == 1
        else:  # or for what one device does in a `shard_map`
            is_for_one = set(context.manual_axes) == set(mesh.axis_names)
        definition = on_one if on_several is None or is_for_one else on_several
        return mlir.lower_fun(definition, multiple_results=True)(ctx, *operands, **how)

    for name in ("cuda", "rocm") if platform == "gpu" else (platform,):
        mlir.register_lowering(made, rule, platform=name)


def switched_on() -> bool:
    """Decide whether to use the kernels of TPUs and GPUs: not with `JMASK_KERNELS=0`.

    It is read from the environment when a program is lowered: a program that is compiled
    already stays as it is.
    """
    return os.environ.get("JMASK_KERNELS", "1") != "0"


Call = TypeVar("Call")
CallDefinition = Callable[[Call], list[jax.Array]]


class CallPrimitive(Generic[Call]):
    """A primitive whose operands are the arrays of a call, a pytree; see `primitive`.

    Its one parameter is the structure of the call.
    """

    def __init__(
        self,
        name: str,
        definition: CallDefinition[Call],
        shapes: Callable[[Call], list[Shaped]],
    ) -> None:
        self.primitive = primitive(name, _flat(definition), _flat(shapes))

    def __call__(self, call: Call) -> list[jax.Array]:
        # A parameter must be hashable and an array is not: the structure goes there.
        tree: PyTreeDef
        operands, tree = jax.tree.flatten(call)
        results: list[jax.Array] = self.primitive.bind(*operands, tree=tree)
        return results

    def call(self, params: Options, operands: Sequence[Argument]) -> Call:
        """Return the call of an equation with these parameters."""
        call: Call = params["tree"].unflatten(operands)
        return call

    def lower(
        self,
        on_one: CallDefinition[Call],
        on_several: CallDefinition[Call] | None = None,
        platform: str | None = None,
    ) -> None:
        """Lower calls as `lower` lowers one."""
        several = None if on_several is None else _flat(on_several)
        lower(self.primitive, _flat(on_one), several, platform)


def _flat(definition: Function) -> Function:
    return lambda *operands, tree: definition(tree.unflatten(operands))
