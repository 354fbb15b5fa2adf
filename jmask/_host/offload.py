"""`offload`: the object that a training loop talks to.

    loop            step k              step k + 1          step k + 2
    reader          load, read k + 1    load, read k + 2    load, read k + 3
    writer                              write k             write k + 1

Rows of batch k + 1 are read before the result of step k is written: what both batches look up
is taken from that result, on the device.
"""

import concurrent.futures
import sys
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmask._base.array_types import trailing
from jmask._base.types import HostArray, PyTree, PyTreeDef
from jmask._base.validation import check_leaves, leaf_name, shown
from jmask._host import snapshots
from jmask._host.batch_rows import BatchRows, Finder, checked_finders, positions_in, source_of
from jmask._host.host_rows import HostRows
from jmask._host.slots import state_on_host
from jmask._lazy.checks import check_transformation

_T = TypeVar("_T")


class _Step(NamedTuple):
    """A step: its rows of each table, and all leaves, as it was given or has returned them."""

    rows: list[BatchRows]
    leaves: list[PyTree]


def offload(
    params: PyTree,
    tx: optax.GradientTransformation,
    *,
    directory: str | PathLike[str] | None = None,
) -> "Offloaded":
    """Keep the tables among the parameters, and their slots, in host memory or on disk.

    Args:
        params: a tree whose NumPy leaves (V, *row) are tables, `np.ndarray` in memory or
            `np.memmap` in a file, written in place. All other leaves are on the device.
        tx: `jmask.lazy` of an optax transformation, or an optimizer by name.
        directory: a folder for files with the slots of `tx` that have rows of these tables. By
            default the slots of an `np.ndarray` are in memory, and an `np.memmap` has them in
            files next to its own, `table.bin.1-state-0-mu-table.slot`, which are overwritten.

    Returns:
        An `Offloaded`, whose `steps` feeds a training loop.

    Raises:
        TypeError: if a leaf is no array, `tx` no transformation, or `directory` no path.
        ValueError: if no leaf is NumPy's; if one cannot be written in place, or has a dtype
            that JAX would cast; or if a step of `tx` on the rows of a batch is not its step on
            the table, with the reason: `jmask.deferred`, `jmask.multi_steps`, dense optimizers.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, jmask
        >>> params = {"table": np.ones((1000, 2), np.float32), "w": jnp.ones(2)}
        >>> tx = jmask.sgd(0.25)
        >>> @jax.jit
        ... def train_step(params, state, batch):
        ...     loss = lambda p: jnp.sum(p["table"][batch["ids"]] @ p["w"])
        ...     value, grads = jmask.value_and_grad(loss)(params)
        ...     return *jmask.apply_gradients(tx, grads, state, params), value
        >>> host = jmask.host.offload(params, tx)
        >>> loader = [{"ids": np.array([3, 999, 3])}, {"ids": np.array([3])}]
        >>> ids = {"table": lambda batch: batch["ids"]}
        >>> for batch, rows, state in host.steps(loader, ids=ids):
        ...     new, state, loss = train_step(rows, state, batch)
        ...     print(batch["ids"], rows["table"].shape, loss)
        ...     host.commit(new, state)
        [0 1 0] (2, 2) 6.0
        [0] (1, 2) 0.25
        >>> host.flush()
        >>> print(params["table"][[0, 3, 999]])
        [[1.     1.    ]
         [0.4375 0.4375]
         [0.75   0.75  ]]
    """
    check_transformation("tx", tx, "jmask.host.offload(params, jmask.lazy(optax.adam(1e-3)))")
    check_leaves("params", params)
    if not isinstance(directory, str | PathLike | None):
        raise TypeError(f"`directory` must be the path of a folder, got {shown(directory)}.")
    paths = jax.tree.leaves_with_path(params)
    tables = [(path, x) for path, x in paths if isinstance(x, np.ndarray)]
    if not tables:
        raise ValueError(
            "`params` has no NumPy leaf, np.ndarray or np.memmap: a table to stay on the host."
        )
    for path, x in tables:
        advice = _why_no_table(x, [y for _, y in tables])
        if advice is not None:
            raise ValueError(f"{leaf_name('params', path)} is to stay on the host, {advice}.")
    return Offloaded(params, *state_on_host(tx, params, directory))


def _why_no_table(x: HostArray, tables: Sequence[HostArray]) -> str | None:
    """Return why an array cannot be trained in place, and what to do."""
    if type(x) not in (np.ndarray, np.memmap) or not x.ndim or not x.size:
        return f"and is a {type(x).__name__} of shape {x.shape}: give a plain array of rows"
    same = jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not same:
        return f"and is {x.dtype}, which JAX does not train as it is: x.astype(np.float32)"
    is_of_file = getattr(x, "mode", None) != "c"  # which writes to a copy of it in memory
    if not x.flags.writeable or not x.flags.c_contiguous or not is_of_file:
        order = "C-contiguous, np.ascontiguousarray(x)"
        return f'and must be {order}, and writeable, a file opened with mode "r+"'
    if sum(np.may_share_memory(x, y) for y in tables) > 1:
        return "and shares memory with another leaf: give each table its own"
    return None


class Offloaded:
    """Tables on the host and their slots, everything else on the device. Made by `offload`.

    For one loop at a time. In a step `params["table"]` has the distinct rows of its batch, in
    the order of their ids, and zeros behind them up to one of the sizes that
    `jmask.pad_bags` has: a step is compiled for few shapes.

    Attributes:
        count: how many steps were committed, with those before a checkpoint that was restored.
    """

    def __init__(self, params: PyTree, state: PyTree, owners: Sequence[int | None]):
        self.count = 0
        self._tree: PyTreeDef = jax.tree.structure((params, state))
        # Tables and their slots are in it as NumPy arrays (V, *row).
        self._leaves: list[PyTree] = jax.tree.leaves((params, state))
        paths = [path for path, _ in jax.tree.leaves_with_path((params, state))]
        self._names = [leaf_name(("params", "state")[x[0].idx], x[1:]) for x in paths]
        owner_of = [*range(len(paths) - len(owners)), *owners]
        # For each table the leaves with its rows, its parameter first.
        self._places = [
            [k for k, owner in enumerate(owner_of) if owner == i]
            for i, x in enumerate(jax.tree.leaves(params))
            if isinstance(x, np.ndarray)
        ]
        self._on_host = {k for at in self._places for k in at}
        names, arrays = map(self._by_table, (self._names, self._leaves))
        tables = (paths[at[0]][1:] for at in self._places)
        self._tables = list(map(HostRows, tables, names, arrays))
        self._loop: object = None
        self._open: _Step | None = None  # waits for `commit`
        self._last: _Step | None = None  # the last one committed; its rows are being written
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "jmask.host.write")
        self._writing: concurrent.futures.Future[None] | None = None
        self._folder: Path | None = None

    # --- the loop -----------------------------------------------------------------------

    def steps(
        self, loader: Iterable[PyTree], ids: PyTree, *, padding_id: int | None = -1
    ) -> Iterator[tuple[PyTree, PyTree, PyTree]]:
        """Yield for each batch the batch, the parameters and the state of its step.

        Each step is to be committed before the next one. Other threads load the next batch,
        find its ids and read its rows while the step runs; what they raise is raised here. When
        the loop ends or is left, what was committed is written.

        Args:
            loader: of batches, any trees.
            ids: a tree like `params` with a function at the place of each table: it returns the
                leaf of the batch with the ids, an array of integers, or `PaddedBags`; or a list
                of such, empty if the table is not looked up. In the batch that is yielded,
                positions (int32, NumPy) are in their place. Tables may share a leaf.
            padding_id: an id that is no row and stays as it is: what the step gives as
                `padding_id`, or the end of `PaddedBags`. None if there is no such id.

        Raises:
            IndexError: in the loop, if an id is neither a row nor `padding_id`.
            RuntimeError: if what is on the device was donated to a step that was not committed;
                in the loop, if a step was not committed, or another loop has begun.
            TypeError: if `loader` is not iterable; in the loop, if ids are no integers.
            ValueError: if `ids` has not one function for each table, or `padding_id` is a row;
                in the loop, if a function does not return one leaf of the batch.
        """
        if not isinstance(loader, Iterable):
            raise TypeError(f"`loader` must be iterable, got {shown(loader)}.")
        finders = checked_finders(ids, self._tables, padding_id)
        self._settle()
        self._check_not_lost()
        self._loop = object()
        return self._steps(iter(loader), finders, self._loop)

    def _steps(
        self, loader: Iterator[PyTree], finders: list[Finder], loop: object
    ) -> Iterator[tuple[PyTree, PyTree, PyTree]]:
        def fetch(
            before: Sequence[BatchRows | None], writing: concurrent.futures.Future[None] | None
        ) -> tuple[PyTree, list[BatchRows], list[HostArray], list[list[HostArray]]] | None:
            """Load a batch and read its rows; None at the end of the loader.

            Returns the batch with positions in place of ids; then, each for every table: its
            rows, the places of these in the batch before, and what was read of its arrays.
            """
            for batch in loader:
                batch, rows = positions_in(batch, finders)
                sources = list(map(source_of, rows, before))
                if writing is not None:  # step k - 1; rows of step k are taken from its result
                    writing.result()
                pairs = zip(self._tables, rows, strict=True)
                return batch, rows, sources, [table.read(*x) for table, x in pairs]
            return None

        reader = concurrent.futures.ThreadPoolExecutor(1, "jmask.host.read")
        is_finalizing = sys.is_finalizing  # `sys` is None when the interpreter shuts down
        try:
            ahead = reader.submit(fetch, [None] * len(finders), None)
            while (fetched := ahead.result()) is not None:
                batch, rows, sources, read = fetched
                # In the first step no source names a row.
                last = self._by_table(self._last.leaves) if self._last else read
                merged = _merged(read, last, sources)
                ahead = reader.submit(fetch, rows, self._writing)
                leaves = list(self._leaves)
                for places, arrays in zip(self._places, merged, strict=True):
                    for k, x in zip(places, arrays, strict=True):
                        leaves[k] = x
                self._open = _Step(rows, leaves)
                yield batch, *self._tree.unflatten(leaves)
                if self._loop is not loop or self._open is not None:
                    ended = "another loop has begun, or host.restore has ended this one"
                    what = ended if self._open is None else "no commit came"
                    raise RuntimeError(f"{what}: each step needs host.commit(params, state).")
        finally:
            reader.shutdown(wait=False)
            if self._loop is loop and not is_finalizing():
                self._settle()

    def commit(self, params: PyTree, state: PyTree) -> None:
        """Take parameters and state as a step returned them; do not donate them afterwards.

        Args:
            params, state: of the structure and the shapes that the step was given.

        Raises:
            RuntimeError: if no step waits for it.
            TypeError: under a trace.
            ValueError: if structures or shapes differ, or dtypes of rows.
        """
        if self._open is None:
            raise RuntimeError("`commit` is for a step of `steps`, once: none waits for it.")
        structure: PyTreeDef = jax.tree.structure((params, state))
        if structure != self._tree:
            wanted = f"in the structure that the step was given, {self._tree}"
            raise ValueError(
                f"host.commit(params, state) takes both {wanted}, got {structure}."
            )
        leaves = jax.tree.leaves((params, state))
        triples = zip(self._names, self._open.leaves, leaves, strict=True)
        for k, (name, old, new) in enumerate(triples):
            if isinstance(new, jax.core.Tracer):
                raise TypeError(f"{name} is traced: `commit` is called outside of jax.jit.")
            is_like = np.shape(new) == np.shape(old)
            if not is_like or (k in self._on_host and new.dtype != old.dtype):
                raise ValueError(f"{name} was {shown(old)} in the step, got {shown(new)}.")
        self._last = _Step(self._open.rows, leaves)
        self._leaves = [
            x if k in self._on_host else leaves[k] for k, x in enumerate(self._leaves)
        ]
        self._writing = self._writer.submit(self._write, self._last)
        self._open = None
        self.count += 1

    # --- arrays and files ---------------------------------------------------------------

    @property
    def params(self) -> PyTree:
        """The parameters as of the last commit, tables as the arrays that were given."""
        self._write_last()
        return self._tree.unflatten(self._leaves)[0]

    @property
    def state(self) -> PyTree:
        """The state as of the last commit, with slots of the tables as NumPy arrays."""
        self._write_last()
        return self._tree.unflatten(self._leaves)[1]

    def flush(self) -> None:
        """Write all rows that were committed into the arrays, and files to disk."""
        self._write_last()
        for x in self._leaves:
            if isinstance(x, np.memmap):
                x.flush()

    def checkpoint(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint: the rows that changed since the last one, and all else.

        The first one of a run writes all rows. A checkpoint is there as a whole or not at all,
        and the one before it until then.

        Args:
            path: a folder, which is made.

        Raises:
            FileExistsError: if it is there, and not from this run or the one it goes on from.
            RuntimeError: if what is on the device was donated to a step that is not committed.
        """
        folder = Path(path).absolute()
        if folder != self._folder and folder.exists():
            advice = "call host.restore(path) before the first step, or name another folder"
            raise FileExistsError(f"`path` {folder} is there, of another run: {advice}.")
        self._write_last()
        self._check_not_lost()
        snapshots.save(folder, self._contents())
        self._folder = folder

    def restore(self, path: str | PathLike[str]) -> None:
        """Go on from the last checkpoint: whatever the tables hold is overwritten.

        Args:
            path: the folder that was given to `checkpoint`.

        Raises:
            FileNotFoundError: if there is no checkpoint.
            ValueError: if it has arrays of other names or shapes, or rows of other dtypes. What
                is on the device gets the dtype that it had.
        """
        folder = Path(path).absolute()
        changes = snapshots.newest(folder)
        if changes is None:
            raise FileNotFoundError(f"`path` {folder} holds no checkpoint of jmask.host.")
        self._settle()
        contents = snapshots.resume(folder, changes, self._contents())
        pairs = zip(self._names, self._leaves, strict=True)
        self._leaves = [contents.leaves.get(name, x) for name, x in pairs]
        self.count, self._folder, self._loop = contents.done, folder, None

    # --- inside -------------------------------------------------------------------------

    def _write(self, step: _Step) -> None:
        """Write the rows of a step when it has finished."""
        # All are read before one is written: reading raises if the step failed.
        arrays = [list(map(np.asarray, rows)) for rows in self._by_table(step.leaves)]
        for table, rows, new in zip(self._tables, step.rows, arrays, strict=True):
            table.write(rows.ids, new)

    def _write_last(self) -> None:
        """Wait until the rows of all committed steps are written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _settle(self) -> None:
        """End the loop: what was not committed is lost."""
        self._write_last()
        self._open = self._last = None

    def _check_not_lost(self) -> None:
        for name, x in zip(self._names, self._leaves, strict=True):
            if isinstance(x, jax.Array) and x.is_deleted():
                raise RuntimeError(
                    f"{name} was donated to a step that was not committed: commit it, "
                    "host.restore a checkpoint, or offload the parameters anew."
                )

    def _by_table(self, leaves: Sequence[_T]) -> list[list[_T]]:
        """Return the leaves of each table: its parameter, then its slots."""
        return [[leaves[k] for k in at] for at in self._places]

    def _contents(self) -> snapshots.Contents:
        pairs = enumerate(zip(self._names, self._leaves, strict=True))
        on_device = {name: x for k, (name, x) in pairs if k not in self._on_host}
        return snapshots.Contents(self._tables, on_device, self.count)


@jax.jit
def _merged(
    read: list[list[jax.Array]], last: list[list[jax.Array]], sources: list[jax.Array]
) -> list[list[jax.Array]]:
    """Return rows as they were read, or from the last step where `sources` is not -1."""

    def merged(new: jax.Array, old: jax.Array, source: jax.Array) -> jax.Array:
        taken = jnp.asarray(old).at[jnp.maximum(source, 0)].get(mode="clip")
        return jnp.where(trailing(source >= 0, new.ndim), taken, new)

    return [
        [merged(x, y, source) for x, y in zip(*rows, strict=True)]
        for *rows, source in zip(read, last, sources, strict=True)
    ]
