"""Rules of the gradient program for programs over several devices.

| equation                        | becomes                                              |
|---------------------------------|------------------------------------------------------|
| psum of a table cotangent       | all-gather of the ids and the rows: n * D numbers    |
|                                 | cross the network and not V * D; dense in a branch   |
|                                 | that not all devices take, where n may differ        |
| pvary, pcast, reshard           | on the ids and the rows                              |
| shard_map, table replicated     | its equations, with ids and rows as replicated       |
|                                 | outputs in place of the table                        |
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from jmask._autodiff.interpreter import (
    Flags,
    Interpreter,
    Outputs,
    Rule,
    Values,
    nothing_to_do,
    report_dense,
)
from jmask._autodiff.rules import none_wanted, same_wanted
from jmask._autodiff.values import RowSum
from jmask._base.fallback import muted
from jmask._base.forms import parameter, shard_map_of, summed_axes


def _on_parts(inputs: Values, function: Callable[[jax.Array], jax.Array]) -> Outputs:
    """The function on ids and rows of every input, if all of them are rows and no carry."""
    if not all(isinstance(x, RowSum) and x.carry is None for x in inputs):
        return None
    return [
        dataclasses.replace(x, parts=tuple((function(i), function(r)) for i, r in x.parts))
        for x in inputs
    ]


def _psum(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    axes = summed_axes(eqn)
    if axes is None:
        return None
    if interpreter.branching.intersection(axes):
        for x in inputs:
            if isinstance(x, RowSum) and x.looked_up:
                report_dense(x, eqn, "devices may take different branches of a `cond`")
        with muted():
            return interpreter.run_dense(eqn, inputs)
    to = "invarying" if eqn.primitive.name == "psum_invariant" else "varying"

    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, axes, tiled=True, to=to)

    return _on_parts(inputs, gather)


def _cast(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    params = eqn.primitive.get_bind_params(eqn.params)

    def bind(x: jax.Array) -> jax.Array:
        result = eqn.primitive.bind(x, **params)
        return result[0] if eqn.primitive.multiple_results else result

    return _on_parts(inputs, bind)


def _reshard(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    """Of a table that is to be spread by rows, ids and rows are on every device."""
    params = eqn.primitive.get_bind_params(eqn.params)
    sharding = parameter(eqn, "dst_sharding")
    mesh, (_, *row) = sharding.mesh, sharding.spec

    def bind(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(None, *(row if x.ndim > 1 else ()))
        return eqn.primitive.bind(x, **params | {"dst_sharding": NamedSharding(mesh, spec)})

    return _on_parts(inputs, bind)


def _shard_map(
    eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter
) -> Outputs:
    form = shard_map_of(eqn)
    body, consts = form.body
    if nothing_to_do(body, inputs):
        return None
    specs = form.out_specs
    # Rows of a table that is itself sharded by rows stay an array.
    sparse = [w and spec == PartitionSpec() for w, spec in zip(wanted, specs, strict=True)]
    kinds: list[RowSum | None] = []

    def run(*arrays: jax.Array) -> list[Any]:
        outputs = interpreter.run(body, consts, arrays, sparse)
        kinds[:] = [
            dataclasses.replace(x, parts=()) if isinstance(x, RowSum) and keep else None
            for x, keep in zip(outputs, sparse, strict=True)
        ]
        return [
            interpreter.dense(x, eqn) if kind is None else x.parts
            for x, kind in zip(outputs, kinds, strict=True)
        ]

    results = jax.shard_map(
        run,
        in_specs=tuple(form.in_specs),
        out_specs=list(specs),
        **form.how,
    )(*(interpreter.dense(x, eqn) for x in inputs))
    return [
        x if kind is None else dataclasses.replace(kind, parts=tuple(x))
        for x, kind in zip(results, kinds, strict=True)
    ]


COLLECTIVE_RULES: dict[str, Rule] = {
    "psum": Rule(same_wanted, _psum),
    "psum_invariant": Rule(same_wanted, _psum),
    "pvary": Rule(same_wanted, _cast),
    "pcast": Rule(same_wanted, _cast),
    "reshard": Rule(same_wanted, _reshard),
    # What comes in is a table on every device or a part of one: it is an array.
    "shard_map": Rule(none_wanted, _shard_map),
}
