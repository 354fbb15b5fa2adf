"""Contenders that cannot be imported here: a worker in an environment of its own.

    interpreter = Interpreter(".venv-mxnet", "mxnet_worker.py")
    interpreter.build(work="step", optimizer="Adam", rows=1_000_000, width=64, rate=0.001)
    seconds, loss = interpreter.run(ids)

`worker.py` says what passes between the two processes. Threads of another process may go on
waiting for work for a while after its turn, as those of torch do: `PAUSE` is for them.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Seconds after the turn of another process.
PAUSE = 0.4


class Interpreter:
    """A worker, which has one contender at a time; it starts when it is first needed.

    Args:
        environment: a folder beside this one that holds a virtual environment, or None for
            the one that this runs in.
        script: a file of this folder that calls `worker.serve`.
        cores: how many it may use, by Linux's `taskset`; all if None.
        arguments: of the script.

    Attributes:
        version: of its library and of Python, once it has started.
    """

    def __init__(
        self,
        environment: str | None,
        script: str,
        cores: int | None = None,
        arguments: Sequence[str] = (),
    ):
        python = Path(sys.executable)
        if environment is not None:
            python = Path(__file__).parents[1] / environment / "bin" / "python"
        self._python = python
        pinned = [] if cores is None else ["taskset", "--cpu-list", f"0-{cores - 1}"]
        self._command = [*pinned, str(python), str(Path(__file__).parent / script), *arguments]
        self._process: subprocess.Popen | None = None
        self.version: str | None = None

    def build(self, **what: Any) -> None:
        """Make the tables; those of the contender before are let go.

        Args:
            what: the arguments of the worker's `build`.

        Raises:
            ImportError: if the worker does not start, cannot import its library, or fails.
        """
        if self._process is None:
            self._start()
        self.drop()
        self._ask(what)

    def run(self, ids: np.ndarray) -> tuple[float, float | None]:
        """Do the work once: seconds, and the loss if there is one."""
        answer = self._ask({"ids": ids.size}, np.ascontiguousarray(ids, np.int32).tobytes())
        return answer["seconds"], answer["loss"]

    def drop(self) -> None:
        """Let go of the tables."""
        self._ask(None)

    def close(self) -> None:
        """End the worker; the next `build` starts another."""
        if self._process is not None:
            self._process.communicate()
            self._noise.close()
            self._process = None

    def _start(self) -> None:
        # Not a pipe, which would fill up since nobody reads it.
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=self._noise
            )
        except OSError as error:
            raise ImportError(f"{self._python} does not start: {error}") from error
        self.version = self._answer()["version"]

    def _ask(self, message: Any, binary: bytes = b"") -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n" + binary)
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._noise.seek(0)
            said = self._noise.read().decode(errors="replace").strip().splitlines()
            last = said[-1] if said else f"ended with status {self._process.returncode}"
            raise ImportError(f"{self._python}: {last}")
        answer = json.loads(line)
        if "error" in answer:
            raise ImportError(f"{self._python}: {answer['error']}")
        return answer
