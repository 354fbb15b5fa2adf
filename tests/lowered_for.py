"""The CPU runs what jmask gives to another platform.

    JMASK_LOWERED_FOR=cuda pytest tests        or tpu

Where jmask computes differently on each platform, this chooses the way of the named one, for
the rest of the process: its results are tested without such a device, by another compiler.
"""

from jax import lax

from jmask._kernels import update_rows as _update_rows

_UPDATES = {"cuda": _update_rows._by_definition, "tpu": _update_rows._on_cpus}


def lower_for(platform):
    """Choose the way of `platform`, "cuda" or "tpu", on CPUs."""
    chosen = lambda *args, default=None, **of: of.get(platform, default)(*args)
    lax.platform_dependent = chosen
    _update_rows._update_rows.lower(_UPDATES[platform], platform="cpu")
