"""Checkpoints: a copy of the tables in a folder, kept current by the rows that changed.

    folder/0.rows, ...     a copy of each array that has rows, parameters and slots
    folder/changes-7/      for each table the ids of the rows that changed since the checkpoint
                           before, their rows, all that is on the device, the count of steps

A checkpoint exists once its files are on disk and their folder is renamed to `changes-N`. Then
its rows are written into the copies; if that is interrupted, the next run does it again. A run
that is resumed never reads the tables that were written in place: nothing has to be undone. The
price is the disk space of a second copy, which the first checkpoint writes as a whole.
"""

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.types import HostArray, PyTree
from jmask._host.host_rows import HostRows, as_items, blocks, copy_rows


class Contents(NamedTuple):
    """Hold what a checkpoint has: tables, all else, steps done."""

    tables: Sequence[HostRows]
    leaves: dict[str, PyTree]
    done: int

    def arrays(self) -> dict[str, HostArray]:
        pairs = (zip(x.names, x.arrays, strict=True) for x in self.tables)
        return dict(itertools.chain(*pairs))

    def listed(self) -> list[str]:
        """Describe what must be the same in a run that goes on."""
        arrays = self.arrays().items()
        rows = [f"{name}: {x.dtype}{list(x.shape)} on the host" for name, x in arrays]
        return rows + [f"{name}: {list(np.shape(x))}" for name, x in self.leaves.items()]

    def copies(self, folder: Path, mode: Literal["r", "r+", "w+"]) -> Iterator[HostArray]:
        for k, x in enumerate(self.arrays().values()):
            yield np.memmap(folder / f"{k}.rows", x.dtype, mode, shape=x.shape)

    def track_changes(self) -> None:
        for table in self.tables:
            table.changed = np.zeros(len(table), bool)


def newest(folder: Path) -> Path | None:
    """Return where the last checkpoint in a folder has its changes."""
    complete = [x for x in folder.glob("changes-*") if x.suffix != ".new"]
    return max(complete, key=lambda x: int(x.name.removeprefix("changes-")), default=None)


def save(folder: Path, contents: Contents) -> None:
    """Write a checkpoint: all rows if the folder is new, else those that changed."""
    last = newest(folder)
    if last is not None:
        number = int(last.name.removeprefix("changes-")) + 1
        changes = _written(folder / f"changes-{number}", contents)
        _apply(changes, contents)
    else:
        new = _emptied(folder)
        for copy, x in zip(contents.copies(new, "w+"), contents.arrays().values(), strict=True):
            copy_rows(x, copy)
        contents.track_changes()
        _written(new / "changes-0", contents)
        _rename(new, folder)
    contents.track_changes()  # not before: after an error they are written again


def resume(folder: Path, changes: Path, contents: Contents) -> Contents:
    """Read the last checkpoint into the tables, and return the rest of it."""
    record = json.loads((changes / "contents.json").read_text())
    kept, wanted = record["arrays"], contents.listed()
    if kept != wanted:
        pairs = (kept, wanted), (wanted, kept)
        holds, has = (", ".join(sorted({*x} - {*y})) or "nothing else" for x, y in pairs)
        raise ValueError(
            f"`path` {folder} holds {holds}, and this run has {has}: give the parameters and "
            "the optimizer that it was written with."
        )
    _apply(changes, contents)
    for copy, x in zip(contents.copies(folder, "r"), contents.arrays().values(), strict=True):
        copy_rows(copy, x)
    contents.track_changes()
    leaves: dict[str, PyTree] = {}
    for k, (name, like) in enumerate(contents.leaves.items()):
        numbers = np.fromfile(changes / f"{k}.leaf", jnp.dtype(record["dtypes"][k]))
        if _is_key(like):
            shape = jax.eval_shape(jax.random.key_data, like).shape
            data = jnp.asarray(numbers.reshape(shape))
            leaves[name] = jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
        else:
            # What JAX placed by itself may be used with any other array.
            place = like.sharding if getattr(like, "committed", False) else None
            leaves[name] = jax.device_put(numbers.reshape(np.shape(like)), place)
    return contents._replace(leaves=leaves, done=record["count"])


def _written(changes: Path, contents: Contents) -> Path:
    """Write what changed to a folder that is there as a whole or not at all."""
    new = _emptied(changes)
    for i, table in enumerate(contents.tables):
        ids = np.flatnonzero(table.changed)
        np.save(new / f"{i}.npy", ids)
        for j, x in enumerate(table.arrays):
            with (new / f"{i}-{j}.rows").open("wb") as file:
                for block in blocks(len(ids), x):
                    file.write(as_items(x)[ids[block]].tobytes())
    device = contents.leaves.values()
    numbers = [np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in device]
    for k, x in enumerate(numbers):
        (new / f"{k}.leaf").write_bytes(x.tobytes())
    record = {"count": contents.done, "arrays": contents.listed()}
    record |= {"dtypes": [str(x.dtype) for x in numbers]}
    (new / "contents.json").write_text(json.dumps(record))
    return _rename(new, changes)


def _apply(changes: Path, contents: Contents) -> None:
    """Write rows that changed into the copies; remove older changes, which are in them."""
    copies = contents.copies(changes.parent, "r+")
    for i, table in enumerate(contents.tables):
        ids = np.load(changes / f"{i}.npy")
        for j, _ in enumerate(table.arrays):
            copy = next(copies)
            with (changes / f"{i}-{j}.rows").open("rb") as file:
                for block in blocks(len(ids), copy):
                    rows = np.fromfile(file, as_items(copy).dtype, block.stop - block.start)
                    np.put(as_items(copy), ids[block], rows)
    for path in changes.parent.glob("*.rows"):
        _sync(path)
    for other in changes.parent.glob("changes-*"):
        if other != changes:
            shutil.rmtree(other)


def _is_key(x: PyTree) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _emptied(folder: Path) -> Path:
    """Make an empty folder `NAME.new`, which gets the name when it is complete."""
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    return new


def _rename(new: Path, folder: Path) -> Path:
    """Rename a folder that is on disk."""
    for path in [*new.iterdir(), new]:
        _sync(path)
    new.rename(folder)
    _sync(folder.parent)
    return folder


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk; Windows opens no folder."""
    with contextlib.suppress(PermissionError):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)
