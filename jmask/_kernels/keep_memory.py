"""`jmask.keep_memory`: what a step frees stays with the process, for large batches on CPUs."""

import ctypes
import sys

# M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h: what comes from the heap, and stays there.
# M_ARENA_MAX: the heap of a thread has 64 MiB, and what does not fit is mapped each time; XLA
# takes the memory of a step in threads of its own. The first heap has no such limit.
_OPTIONS = {-3: 2**30, -1: 2**30, -8: 1}


def keep_memory() -> bool:
    """Ask the C library to keep memory that is freed, for steps of large batches on CPUs.

    glibc gives arrays of more than 32 MiB back to Linux after each step, and the next one waits
    for new pages. Call it once, before JAX makes its first array: a thread that has begun stays
    with the heap that it has, and all others share one.

    Returns:
        Whether it was done: up to 1 GiB is kept now. False, and nothing is changed, where there
        is no glibc (macOS, Windows, musl), or one that refuses so much (before 2.35).

    Example:
        >>> import jmask
        >>> jmask.keep_memory() in (True, False)
        True
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(x, n) == 1 for x, n in _OPTIONS.items())
