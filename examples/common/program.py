"""The frame of a program: its arguments, a bar that moves, Ctrl-C, and the files it writes.

    parser = Arguments("dlrm", __doc__, checkpoint=True)
    parser.number("--steps", 300, "batches")
    args = parser.parse_args()
    with Program("dlrm") as program:
        with program.bar("training", args.steps, "loss {loss:.3f}") as show:
            for step, batch in enumerate(program.until_stopped(batches), 1):
                ...
                show(step, loss=loss)
        save_curves(args.plot, ...)
        program.wrote("learning curve", args.plot)

Ctrl-C ends the loop after the step that is running: inside a step the arrays donated to it are
gone, and there would be nothing to save. The program goes on to the next `wrote` and ends there
with one line, which names the files that were written.
"""

import argparse
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Formatter
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
STOPPED = 128 + signal.SIGINT  # the exit status, as shells have it
_RAW = argparse.RawDescriptionHelpFormatter


class ExampleError(Exception):
    """An end that a user can do something about; the message says what."""


class Arguments(argparse.ArgumentParser):
    """The parser of a program: `--seed` and `--plot` are there, all defaults are shown.

    Args:
        name: the program's; its picture is `name`.png unless `--plot` says otherwise.
        doc: its docstring, which `--help` prints.
        checkpoint: whether it has `--checkpoint`.
    """

    def __init__(self, name: str, doc: str | None, checkpoint: bool = False):
        super().__init__(prog=name, description=doc, formatter_class=_RAW)
        add = self.add_argument
        add("--seed", metavar="N", type=int, default=0, help="seed of the random numbers (0)")
        plot = Path(f"{name}.png")
        add(
            "--plot",
            metavar="PNG",
            type=_new_file,
            default=plot,
            help=f"picture to write ({plot})",
        )
        if checkpoint:
            add(
                "--checkpoint",
                metavar="FOLDER",
                type=Path,
                help="keep the run in it, and go on",
            )

    def number(
        self,
        name: str,
        default: float | None,
        meaning: str,
        least: float | None = None,
        most: float = float("inf"),
    ) -> None:
        """Add an option, an integer or a float as its default: positive, or least to most.

        A default of None is for an integer that may be left out.
        """
        kind = float if isinstance(default, float) else int
        shown = meaning if default is None else f"{meaning} ({default:,})"

        def number(text: str) -> float:
            value = kind(text)
            if least is None and not value > 0:
                raise argparse.ArgumentTypeError(f"{text} is not positive")
            if least is not None and not value >= least:
                raise argparse.ArgumentTypeError(f"{text} is less than {least}")
            if value > most:
                raise argparse.ArgumentTypeError(f"{text} is more than {most}")
            return value

        self.add_argument(name, metavar="N", type=number, default=default, help=shown)


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is not a file in a directory")
    return path


def rows_from(least: int) -> Callable[[str], int]:
    """The type of an argument that is a number of rows, as 1e7."""

    def _rows(text: str) -> int:
        rows = float(text)
        if not least <= rows <= 2e9 or rows != int(rows):
            message = f"{text} is no number of rows from {least} to 2e9"
            raise argparse.ArgumentTypeError(message)
        return int(rows)

    return _rows


class _StoppedError(Exception):
    """The program was stopped, and has written its files."""


class Program:
    """A run of a program, from its arguments to its end.

    Attributes:
        console: to print on.
        stopped: whether Ctrl-C was pressed.
        written: files, in the order in which they were written.
    """

    def __init__(self, name: str):
        self.name = name
        self.console = Console(highlight=False)
        self.stopped = False
        self.written: list[str] = []
        self._in_loop = False
        self._checkpoint: Path | None = None

    def __enter__(self) -> Self:
        self._handler_before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._handler_before)
        if isinstance(error, ExampleError):
            raise SystemExit(f"{self.name}: {error}") from error
        if isinstance(error, KeyboardInterrupt | _StoppedError) or (self.stopped and not error):
            checkpoint = [f"checkpoint {self._checkpoint}"] if self._checkpoint else []
            files = ", ".join([*checkpoint, *self.written]) or "nothing"
            if not self.console.quiet:
                print(f"{self.name}: stopped; {files} written", file=sys.stderr)
            raise SystemExit(STOPPED) from None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._in_loop or self.stopped:  # pressed again: without waiting for the step
            raise KeyboardInterrupt
        self.stopped = True

    def until_stopped(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, up to the one during which Ctrl-C is pressed."""
        with self.uninterrupted():
            for item in items:
                if self.stopped:
                    return
                yield item

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Make Ctrl-C set `stopped`, and nothing else."""
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False

    def print(self, *what: Any) -> None:
        """Print text or tables of rich; long lines are not broken, so that paths stay whole."""
        self.console.print(*what, soft_wrap=True)

    def wrote(self, what: str, path: Path) -> None:
        """Say that a file was written. After Ctrl-C the program ends here."""
        self.written.append(str(path))
        if self.stopped:
            raise _StoppedError
        self.console.print(f"{what}: {path}", soft_wrap=True, markup=False)

    def wrote_checkpoint(self, path: Path) -> None:
        self._checkpoint = path

    @contextmanager
    def bar(
        self, label: str, total: float | None, fields: str = "", done: float = 0
    ) -> Iterator[Callable[..., None]]:
        """Show a bar; it is moved by calling what is yielded: (done, **fields).

        Args:
            label: written before the bar.
            total: what "done" is at the end; None if that is not known.
            fields: a format of what is shown beside it: "loss {loss:.3f}".
            done: where it begins.
        """
        columns = (
            TextColumn(label, markup=False),
            BarColumn(bar_width=None),
            TextColumn(re.sub(r"{(\w+)", r"{task.fields[\1]", fields)),
            TimeRemainingColumn(),
        )
        names = [name for _, name, _, _ in Formatter().parse(fields) if name]
        start = dict.fromkeys(names, float("nan"))
        with Progress(*columns, console=self.console, expand=True) as progress:
            task = progress.add_task("", total=total, completed=done, **start)
            yield lambda done, **fields: progress.update(task, completed=done, **fields)
