"""The loop of a contender that lives in an interpreter of its own.

On stdin come lines of JSON, one of them followed by ids in binary; each is answered by a line:

    {"work": "step", "optimizer": "Adam", "rows": 10, "width": 4, "rate": 0.001}    {}
    {"ids": 3} and 3 int32                        {"seconds": 0.0012, "loss": 12.0}
    null                                          {}        after the tables are let go

The first line is whatever the worker's `build` takes; `masked_elementwise.py` has no ids.

The seconds are measured here, so that what passes between the processes is not in them. Runs
on Python 3.7 and later, for libraries that ended there; needs NumPy only.
"""

import gc
import json
import os
import platform
import sys
import time

import numpy as np


def serve(build, version):
    """Answer until stdin ends.

    Args:
        build: what the message says, by name -> prepare, where `prepare(ids)` gives a function
            without arguments that does the work and returns the loss, or None for an update.
            Only this function is timed.
        version: of the library.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is not an answer

    def answer(**contents):
        print(json.dumps(contents), file=answers, flush=True)

    answer(version=f"{version}, Python {platform.python_version()}")
    prepare = None
    for line in iter(sys.stdin.buffer.readline, b""):
        message = json.loads(line)
        try:
            if message is None:
                prepare = run = None
                gc.collect()
                answer()
            elif "ids" in message:
                ids = np.frombuffer(sys.stdin.buffer.read(4 * message["ids"]), np.int32)
                run = prepare(ids)
                start = time.perf_counter()
                loss = run()
                seconds = time.perf_counter() - start
                answer(seconds=seconds, loss=loss)
            else:
                prepare = build(**message)
                answer()
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")
