"""jmask in a process of its own, as its peers are: for `cores.py`, which gives it cores.

With `--as-it-is` for `kept_memory.py`: what the process frees is not kept.
"""

import os
import sys

import contenders
import jax
from worker import serve
from works import Task

import jmask


def build(work, optimizer, rows, width, rate, tables=1, bags=0):
    task = Task("jmask", work, optimizer, rows, width, tables=tables, bags=bags)
    run = contenders.build(task, {})

    def prepare(ids):
        def step():
            run(ids)
            return run.loss

        return step

    return prepare


if __name__ == "__main__":
    if "--as-it-is" not in sys.argv:
        jmask.keep_memory()  # as torch does
    serve(build, f"jax {jax.__version__}, {len(os.sched_getaffinity(0))} cores")
