"""Whether a trace leaves tracers behind."""

import contextlib
import gc
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def no_tracer_is_kept() -> Iterator[None]:
    """`jax.checking_leaks`: what is traced in here and leaves a tracer behind is refused.

    The check looks through all objects, after each trace. Those that are older hold no tracer
    of it, and after thousands of tests they are most of them: they are frozen, and left out.
    """
    gc.freeze()
    with jax.checking_leaks():
        yield
