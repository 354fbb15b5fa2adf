"""Tables in large pages of memory, on CPUs.

A lookup reads rows at random, and so the processor must find out anew for each where its page
of memory is. In pages of 4 KiB a table of 10**7 rows of 64 is 625,000 pages, and finding one
takes longer than reading the row; in pages of 2 MiB it is 1,221:

    params, state = {"table": jnp.zeros((10_000_000, 64))}, ...
    jmask.huge_pages((params, state))          7,680,000,000

Linux keeps memory in large pages where it is asked to, or everywhere, as it is set up; see
https://docs.kernel.org/admin-guide/mm/transhuge.html. What arrays hold does not change.
"""

import ctypes
import mmap
import sys

import jax

from jmask._base.types import PyTree

_HUGE = 2**21
# Of linux/mman.h; the second, since Linux 6.1, does immediately what the first asks for.
_ADVICE = (14, 25)


def huge_pages(tree: PyTree) -> int:
    """Ask the operating system to keep large arrays of a tree in large pages.

    Call it once, on parameters and optimizer state as they are before the first step: a step
    that is given them as donated arguments writes to the same memory. It pays where tables are
    much larger than the processor's caches.

    Args:
        tree: of arrays; those in the memory of a CPU, of 2 MiB and more, are moved.

    Returns:
        How many bytes the operating system was asked for, and did not refuse: 0 on others than
        Linux, and on GPUs and TPUs, where there is nothing to do.

    Raises:
        TypeError: if it is called while a function is traced.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> params = {"table": jnp.ones((1000, 4))}
        >>> jmask.huge_pages(params)                        # too small
        0
    """
    total = 0
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                "`huge_pages` is about memory, and there is none while a function is traced: "
                "call it outside jit, before the first step."
            )
        if not isinstance(leaf, jax.Array) or sys.platform != "linux":
            continue
        is_numbers = not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
        if is_numbers and not leaf.is_deleted() and leaf.size > 0:
            total += sum(_advise(shard.data) for shard in leaf.addressable_shards)
    return total


def _advise(block: jax.Array) -> int:
    """Ask for the pages of one array on one device; the bytes that were granted."""
    (device,) = block.devices()
    if device.platform != "cpu" or block.nbytes < _HUGE:
        return 0
    start, page = block.unsafe_buffer_pointer(), mmap.PAGESIZE
    first, last = -(-start // page) * page, (start + block.nbytes) // page * page
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    granted = [advise(first, last - first, advice) == 0 for advice in _ADVICE]
    return last - first if any(granted) else 0
