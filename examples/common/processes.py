"""Several processes of one JAX program, on one machine or on many.

    run(["train.py", "--epochs", "3"], processes=2)      starts both here, and watches them
    with member(address, processes=2, process=1): ...    in each: all their devices are one mesh

Processes that train together cannot go on when one of them is gone: each waits for all in
every collective. So none may wait for ever.

    who notices              what                            how soon
    the one that started     a process ended                 at once; ends the others
    another process          its connection is closed        in its next collective
    another process          the other says no more          SILENCE seconds
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten

import jax

from common.program import STOPPED

START, SILENCE, GRACE = 60, 20, 40  # seconds; longer than silence: others end by then


class ProcessError(Exception):
    """A process ended otherwise than well; the message says which one, and how.

    Attributes:
        code: its exit code, negative if it was killed by a signal.
    """

    def __init__(self, number: int, processes: int, code: int, stopped: Sequence[int]):
        how = f"failed (exit code {code})"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name} (exit code {code})"
        others = f"; {list(stopped)} did not end by themselves and were stopped"
        super().__init__(f"process {number} of {processes} {how}{others if stopped else ''}")
        self.code = code


def run(command: Sequence[str], processes: int) -> None:
    """Run a Python program as several processes on this machine, to their end.

    What process 0 writes is written here, and what others write with their number before it.

    Args:
        command: the program and its arguments; each process gets `--coordinator ADDRESS
            --process NUMBER` beside them.
        processes: how many.

    Raises:
        ProcessError: if one ends with an error or is killed. All others are ended by then.
    """
    address = f"127.0.0.1:{_free_port()}"
    started: list[subprocess.Popen[str]] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    before = {
        # Not without `finally`.
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)),
        # Once for each process, which a terminal would not tell: they are groups of their own.
        signal.SIGINT: signal.signal(
            signal.SIGINT, lambda *_: [x.send_signal(signal.SIGINT) for x in started]
        ),
    }
    try:
        for number in range(processes):
            of_process = ["--coordinator", address, "--process", str(number)]
            process = subprocess.Popen(
                [sys.executable, *command, *of_process],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
            )
            started.append(process)
            threading.Thread(target=_follow, args=(process, number, ended), daemon=True).start()
        print("process ids:", *(process.pid for process in started), flush=True)
        for _ in started:
            number = ended.get()
            if code := started[number].returncode:
                _wait(ended, processes - 1)
                if code == STOPPED:
                    raise SystemExit(STOPPED)
                others = [i for i in range(processes) if started[i].poll() is None]
                raise ProcessError(number, processes, code, others)
    finally:
        for process in started:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def member(address: str, processes: int, process: int) -> Iterator[None]:
    """Be one of several processes: `jax.devices()` are those of all of them.

    An error ends the process at once: an ordinary exit would wait for all the others.

    Args:
        address: "HOST:PORT" of process 0; the port must be free there.
        processes: how many there are.
        process: which of them this is.
    """
    _keep_stdout_for_python()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address,
            processes,
            process,
            initialization_timeout=START,
            heartbeat_timeout_seconds=SILENCE,
            shutdown_timeout_seconds=SILENCE,
            coordinator_bind_address=address if process == 0 else None,
        )
        yield
        jax.distributed.shutdown()
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == STOPPED:
            jax.distributed.shutdown()  # all of them stop
            raise
        _say_why(error, process)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _keep_stdout_for_python() -> None:
    """Turn Gloo's messages about connections away, which would break other lines."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def _say_why(error: BaseException, process: int) -> None:
    if isinstance(error, SystemExit):
        if process == 0:  # the others stop for the same reason
            print(error, file=sys.stderr)
    elif isinstance(error, jax.errors.JaxRuntimeError) and "Connection" in str(error):
        why = shorten(str(error), 300)
        print(f"process {process} stops, since another is gone: {why}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _follow(
    process: subprocess.Popen[str], number: int, ended: "queue.SimpleQueue[int]"
) -> None:
    """Pass on what a process writes, and its end."""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(f"[{number}] {line}" if number else line, end="", flush=True)
    except OSError:  # nobody reads it any more
        process.kill()
    process.wait()
    ended.put(number)


def _wait(ended: "queue.SimpleQueue[int]", count: int) -> None:
    """Give others time to say what they see."""
    try:
        for _ in range(count):
            ended.get(timeout=GRACE)
    except queue.Empty:
        pass
