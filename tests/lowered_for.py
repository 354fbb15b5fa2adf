"""The CPU runs what jmask gives to another platform.

    JMASK_LOWERED_FOR=cuda pytest tests        or tpu

Where jmask computes differently on each platform, this chooses the way of the named one, for
the rest of the process: its results are tested without such a device, by another compiler.
"""

import functools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.interpreters import mlir

from jmask._kernels import scatter_update as _fused_update

_UPDATES = {
    "cuda": _fused_update._by_parts,
    "tpu": functools.partial(_fused_update._at_once, on_cpu=True),
}


def lower_for(platform: str) -> None:
    """Choose the way of `platform`, "cuda" or "tpu", on CPUs."""

    def chosen(*args: Any, default: Any = None, **of: Callable[..., Any]) -> Any:
        return of.get(platform, default)(*args)

    lax.platform_dependent = chosen
    rule = mlir.lower_fun(_UPDATES[platform], multiple_results=True)
    mlir.register_lowering(_fused_update._update_rows_p, rule, platform="cpu")
