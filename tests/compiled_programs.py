"""Where compiled programs of tests are kept: `~/.cache/jmask/compiled-1a2b3c4d`.

Compiling takes two thirds of the time of a first run. Programs are for one kind of processor,
so each has its folder; what was written thirty days ago goes. `JAX_COMPILATION_CACHE_DIR` names
another folder.
"""

import os
import time
import zlib
from pathlib import Path

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
