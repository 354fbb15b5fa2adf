"""A run that is stopped goes on where it was: orbax checkpoints in a folder.

    with Checkpoints(folder, settings) as checkpoints:
        step, state, record = checkpoints.restore(state, record)
        for step in range(step, steps):
            ...
            checkpoints.save(step + 1, state, record)

The state is any tree of arrays, jmask's optimizer states included; the record is anything
that JSON can hold. `settings` are those that the state depends on: a folder that holds a run
with others is refused. A checkpoint is there as a whole or not at all, even if the process is
killed while it is written.
"""

from pathlib import Path
from textwrap import shorten
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from common.program import ExampleError, Program

KEPT = 2


class CheckpointError(ExampleError):
    """A folder that a run cannot be kept in or go on from; the message says why."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: made if there is none; without a name nothing is kept.
        settings: names, and values that JSON can hold.
        program: told of what is written.
    """

    def __init__(
        self, folder: Path | None, settings: dict[str, Any], program: Program | None = None
    ):
        self.folder, self.settings, self.program = folder, settings, program
        self.manager: ocp.CheckpointManager | None = None
        if folder is None:
            return
        # Written before the next step, whose donation would let it overwrite the arrays.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, enable_async_checkpointing=False
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.manager = ocp.CheckpointManager(folder.absolute(), options=options)
        except OSError as error:
            raise CheckpointError(f"cannot write to {folder}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.manager is not None:
            self.manager.close()

    def restore(self, state: Any, record: Any) -> tuple[int, Any, Any]:
        """Return the last step, its state and record; 0 and the arguments if there is none."""
        step = None if self.manager is None else self.manager.latest_step()
        if step is None:
            return 0, state, record
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        try:
            args = ocp.args.Composite(run=ocp.args.JsonRestore())
            kept = self.manager.restore(step, args=args).run
            self._check(kept["settings"])
            args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            state = self.manager.restore(step, args=args).state
        except (KeyError, OSError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder} holds a checkpoint of step {step} that cannot be read "
                f"({shorten(str(error), 200)}): remove {self.folder / str(step)} to go on from "
                "the one before, or name another folder."
            ) from error
        if jax.process_index() == 0:
            print(f"{self.folder}: going on after step {step:,}", flush=True)
        return step, state, kept["record"]

    def save(self, step: int, state: Any, record: Any) -> None:
        """Keep the state after so many steps."""
        if self.manager is None or step == self.manager.latest_step():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            run=ocp.args.JsonSave({"settings": self.settings, "record": record}),
        )
        self.manager.save(step, args=args)
        if self.program is not None:
            self.program.wrote_checkpoint(self.folder / str(step))

    def _check(self, kept: dict[str, Any]) -> None:
        names = [*self.settings, *(kept.keys() - self.settings.keys())]
        different = [
            f"{name} was {kept.get(name)}, now {self.settings.get(name)}"
            for name in names
            if kept.get(name) != self.settings.get(name)
        ]
        if different:
            raise CheckpointError(
                f"{self.folder} holds a run with other settings: {'; '.join(different)}. "
                "Give the same settings to go on with it, or name another folder."
            )
