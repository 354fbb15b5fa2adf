"""The limit: the fused row update as a C loop, and a copy of as many bytes.

One core, each touched row read and written once, no allocation, ids sorted and unique: what a
library that adds nothing to the arithmetic would take. The copy is of contiguous memory: what
would be left if rows were not scattered and arithmetic were free. The loop is compiled when it
is first needed.
"""

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
from works import Task

_SOURCE = r"""
#include <math.h>
#define ROWS for (long i = 0; i < n; i++) { long at = (long)ids[i] * d;
#define EACH for (long j = 0; j < d; j++) { float g = grad[i * d + j];
#define ARGUMENTS (long n, long d, float rate, const int *ids, const float *grad, \
                   float *restrict w, float *restrict m, float *restrict v)

void sgd ARGUMENTS
{ ROWS EACH w[at + j] -= rate * g; } } }

void momentum ARGUMENTS
{ ROWS EACH float x = .9f * m[at + j] - rate * g; m[at + j] = x; w[at + j] += x; } } }

void adagrad ARGUMENTS
{ ROWS EACH float x = m[at + j] + g * g; m[at + j] = x;
            w[at + j] -= rate * g / (sqrtf(x) + 1e-10f); } } }

void rowwise_adagrad ARGUMENTS
{ ROWS float sum = 0; EACH sum += g * g; }
       float x = m[ids[i]] += sum / d, scale = rate / (sqrtf(x) + 1e-10f);
       EACH w[at + j] -= scale * g; } } }

void adam ARGUMENTS
{ ROWS EACH float a = m[at + j] + .1f * (g - m[at + j]);
            float b = v[at + j] + .001f * (g * g - v[at + j]);
            m[at + j] = a; v[at + j] = b; w[at + j] -= rate * a / (sqrtf(b) + 1e-8f); } } }

float sum_of_lines(long n, const int *ids, const float *lines)
{ float sum = 0; for (long i = 0; i < n; i++) sum += lines[(long)ids[i] * 16]; return sum; }
"""
# The loop, and the arrays of the table's shape that the optimizer keeps.
_LOOPS = {
    "SGD": ("sgd", 0),
    "momentum": ("momentum", 1),
    "Adagrad": ("adagrad", 1),
    "row-wise Adagrad": ("rowwise_adagrad", 0),
    "Adam": ("adam", 2),
}
_COPIED = 2**26  # numbers in the array that is copied from: more than any cache holds


def c_update(task: Task, rate: float) -> Callable[[np.ndarray], None]:
    """The update alone, of a table of ones, with a gradient of ones.

    Raises:
        ImportError: if there is no C compiler.
    """
    name, _ = _LOOPS[task.optimizer]
    loop = getattr(_library(), name)
    shape = (task.rows, task.width)
    # Pages of a state that the loop does not touch are never made.
    arrays = [
        np.ones(shape, np.float32),
        np.zeros(shape, np.float32),
        np.zeros(shape, np.float32),
    ]
    gradient = np.ones((task.lookups, task.width), np.float32)
    sizes = (ctypes.c_long(task.lookups), ctypes.c_long(task.width), ctypes.c_float(rate))

    def run(ids: np.ndarray) -> None:
        loop(*sizes, *(ctypes.c_void_p(x.ctypes.data) for x in (ids, gradient, *arrays)))

    return run


def memory_copy(task: Task, rate: float) -> Callable[[np.ndarray], None]:
    """A copy that reads and writes as many bytes in all as the update has to."""
    _, slots = _LOOPS[task.optimizer]
    # The gradient is read; the table and each slot are read and written.
    count = task.lookups * task.width * (1 + 2 * (1 + slots)) // 2
    source, at = np.ones(max(_COPIED, 2 * count), np.float32), 0
    target = np.ones_like(source)

    def run(ids: np.ndarray) -> None:
        nonlocal at
        at = at + count if at + 2 * count <= source.size else 0
        np.copyto(target[at : at + count], source[at : at + count])

    return run


def copy_bandwidth() -> float:
    """Bytes read and written by a copy, a second."""
    x, seconds = np.ones(_COPIED, np.float32), []
    y = np.ones_like(x)
    for _ in range(7):
        start = time.perf_counter()
        np.copyto(y, x)
        seconds.append(time.perf_counter() - start)
    return 2 * x.nbytes / float(np.median(seconds))


def seconds_of_random_reads(threads: int, count: int = 2**20) -> float:
    """To read so many lines of 64 bytes of 512 MB, at random, by so many threads at once."""
    lines = np.ones((2**23, 16), np.float32)
    ids = np.random.default_rng(0).integers(0, 2**23, count).astype(np.int32)
    read, places = _library().sum_of_lines, ctypes.c_void_p(lines.ctypes.data)

    def part(x: np.ndarray) -> None:
        read(ctypes.c_long(x.size), ctypes.c_void_p(x.ctypes.data), places)

    with ThreadPoolExecutor(threads) as pool:
        seconds = []
        for _ in range(9):
            start = time.perf_counter()
            list(pool.map(part, np.array_split(ids, threads)))
            seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


@cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ImportError("no C compiler")
    folder = Path(tempfile.mkdtemp())
    source, library = folder / "loops.c", folder / "loops.so"
    source.write_text(_SOURCE)
    flags = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library), "-lm"], check=True)
    return ctypes.CDLL(str(library))
