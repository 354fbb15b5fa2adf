"""The places of keys: `create` makes a vocabulary, a pytree of arrays.

    set 0    row 0   row 1   row 2   row 3  |  waiting   waiting   waiting   waiting
    set 1    row 4   ...

A key belongs to one set, by its hash. It has one of the rows of its set; or it waits in one of
as many places more, which have no rows, until it was seen often enough; or nothing is kept of
it.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import Mesh

from jmask._base.row_ids import id_dtype
from jmask._base.shardings import by_rows, entry
from jmask._base.validation import checked_choice, checked_integer
from jmask._tables.sharded import checked_axes
from jmask._tensors.flax_state import register_in_flax

_COUNTERS = ("hits", "new", "evicted", "waiting")
# More would be slow: places of a set are ranked by comparing all pairs of them.
_MOST_WAYS = 128


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["lines", "clock", "counts"],
    meta_fields=["ways", "admit_after", "evict", "shared_rows"],
)
@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Keys and the rows that they have; a pytree of arrays. Made by `create`.

    Attributes:
        lines (sets, 4 * places): uint32. For all places of a set the high words of their keys,
            then the low words, the batches that used them last, and how often they were seen, 0
            in a free place. The first `ways` places have rows.
        clock: how many batches there were, modulo 2³².
        counts (4, 2): what `counters` returns, in words.
        ways, admit_after, evict, shared_rows: as given to `create`.
    """

    lines: jax.Array
    clock: jax.Array
    counts: jax.Array
    ways: int
    admit_after: int
    evict: str
    shared_rows: int

    def __post_init__(self) -> None:
        register_in_flax(Vocabulary)

    @property
    def places(self) -> int:
        """How many keys a set holds, those with rows and those that wait for one."""
        return self.lines.shape[1] // 4

    @property
    def capacity(self) -> int:
        """How many keys can have a row of their own."""
        return self.lines.shape[0] * self.ways

    @property
    def table_rows(self) -> int:
        """The number of rows of the tables: `capacity`, and the shared rows behind them."""
        return self.capacity + self.shared_rows

    def counters(self) -> dict[str, int]:
        """Return what was counted since `create`.

        `hits`: lookups of keys that had a row; `new`: keys that got one; `evicted`: keys that
        lost theirs; `waiting`: lookups answered by a shared row.
        """
        counts = ((high << 32) + low for high, low in np.asarray(self.counts).tolist())
        return dict(zip(_COUNTERS, counts, strict=True))


export.register_pytree_node_serialization(
    Vocabulary,
    serialized_name="jmask.vocabulary.Vocabulary",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda text: tuple(json.loads(text)),
)


def create(
    capacity: int,
    ways: int = 16,
    admit_after: int = 2,
    evict: str = "lru",
    *,
    shared_rows: int = 16,
    mesh: Mesh | None = None,
    axis: str | Sequence[str] | None = None,
) -> Vocabulary:
    """Return an empty vocabulary.

    It takes 16 bytes for each key that has a row, and as many for one that waits for a row.

    Args:
        capacity: how many keys may have a row of their own, rounded up to whole sets.
        ways: rows of a set, 1 to 128: a key has one row of the set that its hash names.
            With more of them eviction is nearer to that among all rows, and takes longer. On a
            TPU a multiple of 16, or of 32 if `admit_after=1`, or all is copied in each step.
        admit_after: how often a key must have been seen, in one batch or in several, to get a
            row. As many keys are remembered until then as there are rows, those seen last.
        evict: whose row a new key gets: "lru", of the key of its set that was used longest
            ago; "lfu", of the one seen least often, of several the one used longest ago. Keys
            of the batch keep their rows.
        shared_rows: how many rows those keys share, by their hash, that have none.
        mesh, axis: where to shard the sets, as in `jmask.sharded`. Each device looks for all
            keys of a batch among its own.

    Returns:
        A `Vocabulary`, whose tables are to have `vocab.table_rows` rows.

    Raises:
        TypeError: if a number is no integer, `mesh` no mesh, or `axis` no name.
        ValueError: if `capacity` is less than `ways`, a number is less than 1, or `evict` is
            unknown.

    References:
        HierarchicalKV (NVIDIA Merlin), whose buckets are the sets here.

    Example:
        >>> import jmask
        >>> vocab = jmask.vocabulary.create(capacity=1000, ways=16)
        >>> vocab.capacity, vocab.table_rows
        (1008, 1024)
    """
    given = {"capacity": capacity, "ways": ways, "admit_after": admit_after}
    given["shared_rows"] = shared_rows
    # Python's: products of NumPy's int8 are int8, and no program that holds one is exported.
    numbers = {name: checked_integer(name, x) for name, x in given.items()}
    for name, x in numbers.items():
        if not 1 <= x < 2**31:
            raise ValueError(f"`{name}` must be from 1 to 2³¹ - 1, got {x}.")
    capacity, ways, admit_after, shared_rows = numbers.values()
    if not ways <= min(capacity, _MOST_WAYS):
        raise ValueError(
            f"`ways`={ways} must be at most {_MOST_WAYS}, and at most `capacity`={capacity}."
        )
    checked_choice("evict", evict, ("lru", "lfu"))
    shards, sharding = 1, None
    if mesh is not None:
        axes = checked_axes(mesh, axis)
        shards = math.prod(mesh.shape[name] for name in axes)
        sharding = by_rows(mesh, entry(axes), 2)
    sets = shards * -(-capacity // (ways * shards))
    id_dtype(sets * ways + shared_rows)  # or it raises
    shape = (sets, 4 * (ways if admit_after == 1 else 2 * ways))
    lines = jnp.zeros(shape, jnp.uint32, device=sharding)
    clock, counts = jnp.zeros((), jnp.uint32), jnp.zeros((len(_COUNTERS), 2), jnp.uint32)
    return Vocabulary(lines, clock, counts, ways, admit_after, evict, shared_rows)
