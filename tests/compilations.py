"""What JAX compiles, counted as it does it; work of a trace; where programs are kept.

with compilations() as compiled:
    jax.jit(jnp.sin)(x)
assert compiled == ["jit(sin)"]
"""

import contextlib
import gc
import itertools
import os
import sys
import time
import zlib
from pathlib import Path

import jax

# What JAX says of a mesh with more devices than there are.
TOO_FEW_DEVICES = "must be >= the product of mesh_shape"


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


# --- the time of a trace, without the machine's -------------------------------------------


def work(function, *args):
    """How many Python functions are called and how many rounds loops take.

    A comprehension is no call. No garbage is collected meanwhile: weak references call
    functions then. Python 3.11 has no `sys.monitoring`: of calls alone, by its profiler, a loop
    in one function is not seen.
    """
    gc.collect()
    gc.disable()
    try:
        return _work(function, *args)
    finally:
        gc.enable()


def _work(function, *args):
    counted = itertools.count()
    note = lambda *_: next(counted)
    if sys.version_info < (3, 12):
        old = sys.getprofile()
        sys.setprofile(lambda frame, event, arg: event == "call" and note())
        try:
            function(*args)
        finally:
            sys.setprofile(old)
        return next(counted)
    monitor, tool = sys.monitoring, sys.monitoring.PROFILER_ID
    events = monitor.events.PY_START, monitor.events.JUMP
    monitor.use_tool_id(tool, "work")
    try:
        for event in events:
            monitor.register_callback(tool, event, note)
        monitor.set_events(tool, sum(events))
        function(*args)
    finally:
        monitor.set_events(tool, 0)
        monitor.free_tool_id(tool)
    return next(counted)


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


# --- where compiled programs are kept: ~/.cache/jmask/compiled-1a2b3c4d ------------------

# Compiling takes two thirds of the time of a first run. Programs are for one kind of processor,
# so each has its folder; what was written thirty days ago goes. `JAX_COMPILATION_CACHE_DIR`
# names another folder.
_DAYS = 30


def compiled_programs():
    """The folder, made if need be; in the checkout if it cannot be made."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "jmask" / f"compiled-{zlib.crc32(_processor()):08x}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(__file__).parent.parent / "build" / "compiled"
    return folder


def remove_old(folder):
    """Remove the programs that were written thirty days ago."""
    oldest = time.time() - _DAYS * 24 * 3600
    for entry in os.scandir(folder):
        try:
            if entry.stat().st_mtime < oldest:
                os.unlink(entry)
        except OSError:  # another process was first
            continue


def _processor():
    """What it can do, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
