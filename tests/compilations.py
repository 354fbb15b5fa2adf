"""What JAX compiles, counted as it does it; and tracers that are left behind.

with compilations() as compiled:
    jax.jit(jnp.sin)(x)
assert compiled == ["jit(sin)"]
"""

import contextlib
import gc

import jax


@contextlib.contextmanager
def compilations():
    """The names of the programs compiled, in their order; read from files, they count as well.

    A function's own cache does not tell: JAX empties that of functions it drops when thousands
    are alive.
    """
    found = []

    def note(event, _, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(kwargs["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


# --- tracers left behind --------------------------------------------------------------


@contextlib.contextmanager
def no_tracer_is_kept():
    """`jax.checking_leaks`: what is traced in here and leaves a tracer behind is refused.

    The check looks through all objects, after each trace. Those that are older hold no tracer
    of it, and after thousands of tests they are most of them: they are frozen, and left out.
    """
    gc.freeze()
    with jax.checking_leaks():
        yield
