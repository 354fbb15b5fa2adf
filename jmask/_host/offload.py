"""`offload`: the object that a training loop talks to.

    loop            step k              step k + 1          step k + 2
    other thread    load, read k + 1    write k, read k+2   write k+1, read k+3

The other thread does one thing after the other. It has read the rows of batch k + 1 before the
result of step k is written: rows of both batches are taken from that result, on the device.
"""

import concurrent.futures
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmask._base.array_types import trailing
from jmask._base.types import HostArray, OptState, Params, PyTree, PyTreeDef, TensorLike
from jmask._base.validation import check_leaves, leaf_name, shown
from jmask._host import snapshots
from jmask._host.batch_rows import BatchRows, Finder, finders, positions_in, source_of
from jmask._host.host_rows import HostRows
from jmask._host.slots import state_on_host
from jmask._updates.checks import check_transformation


class _Fetched(NamedTuple):
    """A batch with positions for ids, the rows it looks up, and these as they were read.

    `sources` say for each row which one of the batch before it is, or -1.
    """

    batch: PyTree
    rows: list[BatchRows]
    arrays: list[list[HostArray]]
    sources: list[HostArray]


class _Step(NamedTuple):
    """A step that was committed: its rows, and what it made of them."""

    rows: list[BatchRows]
    arrays: list[list[jax.Array]]


def offload(
    params: Params,
    tx: optax.GradientTransformation,
    *,
    directory: str | PathLike[str] | None = None,
) -> "Offloaded":
    """Keep the tables among the parameters, and their slots, in host memory or on disk.

    Args:
        params: a tree whose NumPy leaves (V, *row) are tables, `np.ndarray` in memory or
            `np.memmap` in a file: they are written in place. All other leaves are on the device.
        tx: `jmask.lazy` of an optax transformation, or an optimizer by name.
        directory: a folder for files with the slots of `tx` that have rows of these tables. By
            default slots of an `np.ndarray` are in memory, and those of an `np.memmap` in files
            beside its own, as `table.bin.state-0-mu-table.slot`. What has such a name is
            overwritten.

    Returns:
        An `Offloaded`, whose `steps` feeds a training loop.

    Raises:
        TypeError: if a leaf is no array, or `tx` no transformation.
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
    leaves, tree = jax.tree.flatten(params)
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    is_table = [isinstance(x, np.ndarray) for x in leaves]
    if not any(is_table):
        raise ValueError(
            "`params` has no NumPy leaf: tables that stay on the host are np.ndarray or "
            "np.memmap, and everything else is for the device."
        )
    for i, x in enumerate(leaves):
        others = [y for j, y in enumerate(leaves) if i != j and is_table[j]]
        advice = _why_no_table(x, others) if is_table[i] else None
        if advice is not None:
            raise ValueError(
                f"{leaf_name('params', paths[i])} is to stay on the host, {advice}."
            )
    folder = None if directory is None else Path(directory)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return Offloaded(params, *state_on_host(tx, leaves, tree, folder))


def _why_no_table(x: HostArray, others: Sequence[HostArray]) -> str | None:
    """Return why an array cannot be trained in place, and what to do."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if type(x) not in (np.ndarray, np.memmap) or not x.ndim or not x.size:
        return f"and is a {type(x).__name__} of shape {x.shape}: give a plain array of rows"
    if not jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype != dtype:
        return f"and is {x.dtype}, which JAX does not train as it is: x.astype(np.float32)"
    if not x.flags.writeable or not x.flags.c_contiguous:
        return (
            "and cannot be written row by row: it must be C-contiguous, np.ascontiguousarray(x), "
            'and writeable, a file opened with mode "r+"'
        )
    if any(np.may_share_memory(x, y) for y in others):
        return "and shares memory with another leaf: give each table its own"
    return None


class Offloaded:
    """Tables on the host and their slots, everything else on the device. Made by `offload`.

    For one loop at a time. In a step `params["table"]` has the distinct rows of its batch, in
    the order of their ids, and zeros behind them up to one of a few sizes, those of
    `jmask.pad_bags`: a step is compiled for few shapes.

    Attributes:
        count: how many steps were committed, with those before a checkpoint that was restored.
    """

    def __init__(self, params: Params, state: OptState, owners: Sequence[int | None]):
        self.count = 0
        self._trees: list[PyTreeDef] = [jax.tree.structure(params), jax.tree.structure(state)]
        # Leaves of the parameters, then of the state; those of tables are NumPy's.
        named = [jax.tree.leaves_with_path(x) for x in (params, state)]
        self._leaves: list[TensorLike] = [x for leaves in named for _, x in leaves]
        self._names = [
            leaf_name(name, path)
            for name, leaves in zip(("params", "state"), named, strict=True)
            for path, _ in leaves
        ]
        owner_of = [*range(len(named[0])), *owners]
        numbers = [i for i, (_, x) in enumerate(named[0]) if isinstance(x, np.ndarray)]
        self._paths = [named[0][i][0] for i in numbers]
        self._places = [[k for k, i in enumerate(owner_of) if i == n] for n in numbers]
        self._tables = [
            HostRows(self._names[at[0]], [self._leaves[k] for k in at]) for at in self._places
        ]
        self._open: list[BatchRows] | None = None  # rows of the step that is to be committed
        self._last: _Step | None = None
        self._is_written = True  # or on its way
        self._writing: concurrent.futures.Future[None] | None = None
        self._loop: object = None
        self._folder: Path | None = None

    # --- the loop -----------------------------------------------------------------------

    def steps(
        self, loader: Iterable[PyTree], ids: PyTree, *, padding_id: int | None = -1
    ) -> Iterator[tuple[PyTree, Params, OptState]]:
        """Yield for each batch the batch, the parameters and the state of its step.

        Each step is to be committed before the next one. Another thread takes the next batch
        from the loader, finds its ids and reads its rows while the step runs; what it raises is
        raised here. When the loop ends or is left, what was committed is written.

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
        found = finders(ids, self._tables, self._paths, padding_id)
        self._write_last()
        self._open, self._last, self._loop = None, None, object()
        for name, x in zip(self._names, self._leaves, strict=True):
            if isinstance(x, jax.Array) and x.is_deleted():
                raise RuntimeError(
                    f"{name} was donated to a step that was not committed: go on from a "
                    "checkpoint, host.restore(path), or offload the parameters anew."
                )
        return self._steps(iter(loader), found, self._loop)

    def _steps(
        self, loader: Iterator[PyTree], found: list[Finder], loop: object
    ) -> Iterator[tuple[PyTree, Params, OptState]]:
        def fetch(before: list[BatchRows] | None) -> _Fetched | None:
            for batch in loader:
                batch, rows = positions_in(batch, found)
                pairs = zip(self._tables, rows, strict=True)
                arrays = [table.read(x.ids, x.capacity) for table, x in pairs]
                nothing = [BatchRows(x.ids[:0], 0) for x in rows]
                sources = list(map(source_of, rows, before or nothing))
                return _Fetched(batch, rows, arrays, sources)
            return None

        worker = concurrent.futures.ThreadPoolExecutor(1, "jmask.host")
        try:
            ahead = worker.submit(fetch, None)
            while (now := ahead.result()) is not None:
                last = now.arrays if self._last is None else self._last.arrays
                arrays = _merged(now.arrays, last, now.sources)
                if self._last is not None and not self._is_written:
                    self._writing, self._is_written = (
                        worker.submit(self._write, self._last),
                        True,
                    )
                ahead = worker.submit(fetch, now.rows)
                leaves = list(self._leaves)
                for places, rows in zip(self._places, arrays, strict=True):
                    for k, x in zip(places, rows, strict=True):
                        leaves[k] = x
                self._open = now.rows
                yield now.batch, *self._unflattened(leaves)
                if self._loop is not loop:
                    raise RuntimeError("another loop has begun, or `restore` was called.")
                if self._open is not None:
                    raise RuntimeError(
                        "a step was not committed: host.commit(params, state) takes what it "
                        "returned, or what it was given."
                    )
        finally:
            worker.shutdown(wait=False)
            if self._loop is loop:
                self._open = None
                self._write_last()

    def commit(self, params: Params, state: OptState) -> None:
        """Take parameters and state as a step returned them. They must not be donated then.

        Args:
            params, state: of the structure and the shapes that the step was given.

        Raises:
            RuntimeError: if no step waits for it.
            TypeError: under a trace.
            ValueError: if structures or shapes differ, or dtypes of rows.
        """
        if self._open is None:
            raise RuntimeError(
                "`commit` is for a step of `host.steps`, once: none waits for it."
            )
        for name, tree, new in zip(
            ("params", "state"), self._trees, (params, state), strict=True
        ):
            if jax.tree.structure(new) != tree:
                raise ValueError(
                    f"`{name}` must be as the step was given it, {tree}, got "
                    f"{jax.tree.structure(new)}. The order is host.commit(params, state)."
                )
        leaves = jax.tree.leaves((params, state))
        sizes = {
            k: rows.capacity
            for at, rows in zip(self._places, self._open, strict=True)
            for k in at
        }
        for k, (name, old, new) in enumerate(
            zip(self._names, self._leaves, leaves, strict=True)
        ):
            if isinstance(new, jax.core.Tracer):
                raise TypeError(f"{name} is traced: `commit` is called outside of jax.jit.")
            shape = (sizes[k], *old.shape[1:]) if k in sizes else np.shape(old)
            if np.shape(new) != shape or (k in sizes and new.dtype != old.dtype):
                raise ValueError(
                    f"{name} was given to the step as {old.dtype} of shape {shape}, and is "
                    f"committed as {shown(new)}."
                )
        self._last = _Step(self._open, [[leaves[k] for k in at] for at in self._places])
        for k, x in enumerate(leaves):
            if k not in sizes:
                self._leaves[k] = x
        self._open, self._is_written = None, False
        self.count += 1

    # --- arrays and files ---------------------------------------------------------------

    @property
    def params(self) -> Params:
        """The parameters as of the last commit, tables as the arrays that were given."""
        self._write_last()
        return self._unflattened(self._leaves)[0]

    @property
    def state(self) -> OptState:
        """The state as of the last commit, with slots of the tables as NumPy arrays."""
        self._write_last()
        return self._unflattened(self._leaves)[1]

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
        """
        folder = Path(path).absolute()
        if folder != self._folder and folder.exists():
            raise FileExistsError(
                f"`path` {folder} is there, and this run does not go on from it: call "
                "host.restore(path) before the first step, or name another folder."
            )
        self._write_last()
        snapshots.save(folder, self._contents())
        self._folder = folder

    def restore(self, path: str | PathLike[str]) -> None:
        """Go on from the last checkpoint: whatever the tables hold is overwritten.

        Args:
            path: the folder that was given to `checkpoint`.

        Raises:
            FileNotFoundError: if there is no checkpoint.
            ValueError: if it has arrays of other names, shapes or dtypes.
        """
        folder = Path(path).absolute()
        changes = snapshots.newest(folder)
        if changes is None:
            raise FileNotFoundError(f"`path` {folder} holds no checkpoint of jmask.host.")
        self._write_last()
        contents = snapshots.resume(folder, changes, self._contents())
        self._open, self._last, self._loop = None, None, None
        pairs = zip(self._names, self._leaves, strict=True)
        self._leaves = [contents.leaves.get(name, x) for name, x in pairs]
        self.count, self._folder = contents.count, folder

    # --- inside -------------------------------------------------------------------------

    def _unflattened(self, leaves: Sequence[TensorLike]) -> tuple[Params, OptState]:
        params, state = self._trees
        count = params.num_leaves
        return params.unflatten(leaves[:count]), state.unflatten(leaves[count:])

    def _write(self, step: _Step) -> None:
        """Write the rows of a step when it has finished."""
        # All of them before the first is written: a step that failed has none.
        arrays = [[np.asarray(x) for x in rows] for rows in step.arrays]
        for table, rows, new in zip(self._tables, step.rows, arrays, strict=True):
            table.write(rows.ids, new)

    def _write_last(self) -> None:
        """Have the rows of all committed steps written, in their order."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
        if self._last is not None and not self._is_written:
            self._write(self._last)
        self._is_written = True

    def _contents(self) -> snapshots.Contents:
        on_host = [k for at in self._places for k in at]
        leaves = enumerate(zip(self._names, self._leaves, strict=True))
        on_device = {name: x for k, (name, x) in leaves if k not in set(on_host)}
        names = [self._names[k] for k in on_host]
        return snapshots.Contents(self._tables, names, on_device, self.count)


@jax.jit
def _merged(
    read: list[list[jax.Array]], last: list[list[jax.Array]], sources: list[jax.Array]
) -> list[list[jax.Array]]:
    """Return rows as they were read, or from the last step where `sources` name one of it."""

    def merged(new: jax.Array, old: jax.Array, source: jax.Array) -> jax.Array:
        taken = old.at[jnp.maximum(source, 0)].get(mode="clip")
        return jnp.where(trailing(source >= 0, new.ndim), taken, new)

    return [
        [merged(x, y, source) for x, y in zip(*rows, strict=True)]
        for *rows, source in zip(read, last, sources, strict=True)
    ]
