"""How much memory a program may still take, before it asks for more than there is."""

from contextlib import suppress
from pathlib import Path


def free_bytes() -> float:
    """Return memory that is left to the system and to the container, where they say so."""
    left = [float("inf")]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        left += [1024.0 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable")]
    with suppress(OSError, ValueError):  # without a limit the file says "max"
        group = Path("/sys/fs/cgroup")
        limit, used = (
            int((group / f"memory.{name}").read_text()) for name in ("max", "current")
        )
        left.append(limit - used)
    return min(left)
