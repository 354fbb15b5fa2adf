"""What is decided only where a program is lowered for its devices.

A trace does not know where it will run. A primitive is one equation of it, with a definition in
other operations, and at lowering it becomes what suits the devices:

    twice = primitive("twice", lambda x: [2 * x], shapes=lambda x: [x])
    lower(twice, on_one=lambda x: [x + x], on_several=lambda x: [2 * x], platform="cpu")
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Definition = Callable[..., list[jax.Array]]


def primitive(name: str, definition: Definition, shapes: Callable[..., list[Any]]) -> Primitive:
    """A primitive with several results, and hashable parameters that are given by name.

    Args:
        name: of its equations.
        definition: what it is outside jit, under vmap and to derivatives, and on devices that
            no lowering is registered for.
        shapes: the abstract results, of abstract operands.
    """
    made = Primitive(name)
    made.multiple_results = True
    made.def_abstract_eval(shapes)

    @functools.partial(jax.jit, static_argnums=0)
    def run(how: tuple[tuple[str, Any], ...], *operands: jax.Array) -> list[jax.Array]:
        return definition(*operands, **dict(how))

    def evaluated(*operands: jax.Array, **how: Any) -> list[jax.Array]:
        return run(tuple(how.items()), *operands)

    def batched(operands: Any, dims: Any, **how: Any) -> Any:
        mapped = jax.vmap(functools.partial(definition, **how), in_axes=tuple(dims))
        results = mapped(*operands)
        return results, [0] * len(results)

    def derivative(primals: Any, tangents: Any, **how: Any) -> Any:
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        return jax.jvp(functools.partial(definition, **how), tuple(primals), tangents)

    made.def_impl(evaluated)
    batching.primitive_batchers[made] = batched
    ad.primitive_jvps[made] = derivative
    lower(made, definition)
    return made


def lower(
    made: Primitive,
    on_one: Definition,
    on_several: Definition | None = None,
    platform: str | None = None,
) -> None:
    """Lower it as this, for one platform or for all others.

    Args:
        on_one: on one device.
        on_several: on several, over which arrays may be spread; None if it is the same.
    """

    def rule(ctx: Any, *operands: Any, **how: Any) -> Any:
        definition = on_one if on_several is None or _is_for_one(ctx) else on_several
        return _lowered(definition)(ctx, *operands, **how)

    mlir.register_lowering(made, rule, platform=platform)


def _lowered(definition: Definition) -> Any:
    return mlir.lower_fun(definition, multiple_results=True)


def _is_for_one(ctx: Any) -> bool:
    return getattr(ctx.module_context.axis_context, "num_devices", None) == 1


def in_one_device() -> bool:
    """Decide whether the part of one device is traced, in a `shard_map` over all axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) and set(mesh.manual_axes) == set(mesh.axis_names)


def switched_on() -> bool:
    """Decide whether to use forms that no device has run yet: not with `JMASK_KERNELS=0`.

    It is read from the environment when a program is lowered: a program that is compiled
    already stays as it is.
    """
    return os.environ.get("JMASK_KERNELS", "1") != "0"
