"""The limit: the fused row update as a C loop, and the copy bandwidth of the machine.

One core, each touched row read and written once, no allocation, ids sorted and unique: what a
library that adds nothing to the arithmetic would take. Compiled when it is first needed.
"""

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

_SOURCE = r"""
#include <math.h>
#define ROWS for (long i = 0; i < n; i++) { long at = (long)ids[i] * d; \
    for (long j = 0; j < d; j++) { float g = grad[i * d + j];
#define END } }

void momentum(long n, long d, const int *ids, const float *grad, float *w, float *m, float *u)
{ ROWS float x = .9f * m[at + j] - .01f * g; m[at + j] = x; w[at + j] += x; END }

void adagrad(long n, long d, const int *ids, const float *grad, float *w, float *s, float *u)
{ ROWS float x = s[at + j] + g * g; s[at + j] = x;
       w[at + j] -= .01f * g / (sqrtf(x) + 1e-10f); END }

void adam(long n, long d, const int *ids, const float *grad, float *w, float *m, float *v)
{ ROWS float a = m[at + j] + .1f * (g - m[at + j]);
       float b = v[at + j] + .001f * (g * g - v[at + j]);
       m[at + j] = a; v[at + j] = b; w[at + j] -= .01f * a / (sqrtf(b) + 1e-8f); END }
"""
LOOPS = {"momentum": "momentum", "Adagrad": "adagrad", "Adam": "adam"}


def c_update(optimizer: str, rows: int, width: int) -> Callable[[np.ndarray], None]:
    """The update alone, of a table of ones, with a gradient of ones.

    Raises:
        ImportError: if there is no C compiler.
    """
    loop = getattr(_library(), LOOPS[optimizer])
    arrays = [np.ones((rows, width), np.float32), *np.zeros((2, rows, width), np.float32)]
    gradients: dict[int, np.ndarray] = {}

    def address(x: np.ndarray) -> ctypes.c_void_p:
        return ctypes.c_void_p(x.ctypes.data)

    def run(ids: np.ndarray) -> None:
        if ids.size not in gradients:
            gradients[ids.size] = np.ones((ids.size, width), np.float32)
        sizes = (ctypes.c_long(ids.size), ctypes.c_long(width))
        loop(*sizes, *map(address, (ids, gradients[ids.size], *arrays)))

    return run


def copy_bandwidth() -> float:
    """Bytes read and written by a copy, a second."""
    x = np.ones(2**25, np.float32)
    y, seconds = np.empty_like(x), []
    for _ in range(7):
        start = time.perf_counter()
        np.copyto(y, x)
        seconds.append(time.perf_counter() - start)
    return 2 * x.nbytes / float(np.median(seconds))


def _library() -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ImportError("no C compiler: the loop that is the limit is left out")
    folder = Path(tempfile.mkdtemp())
    source, library = folder / "loops.c", folder / "loops.so"
    source.write_text(_SOURCE)
    flags = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library), "-lm"], check=True)
    return ctypes.CDLL(str(library))
