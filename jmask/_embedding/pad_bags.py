"""Pad ragged bags to arrays of a few sizes, so that a step is compiled a few times.

    [[2, 0], [], [1, 1, 3]]      ids      2 0 1 1 3 -1        -1 is padding
                                 offsets  0 2 2 5             the last is where bags end

The number of ids is rounded up to a power of √2: of 100 to 10,000 ids there are 14 sizes. What
is added lies behind the last bag, where `embedding_bag` looks nothing up.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.types import Argument, HostArray, Ids, Numbers, PyTree, Shaped
from jmask._base.validation import check_flag, checked_integer, refuse_other_tensors
from jmask._embedding.lookup import checked_integers, clipped

Key = TypeVar("Key", bound=Hashable)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class PaddedBags:
    """Bags as `pad_bags` makes them: a pytree of arrays, for `embedding_bag` in place of ids.

    Attributes:
        ids (n,): integers; -1 behind the last bag.
        offsets (b + 1,): int32, where each bag begins, and where the last one ends.
        weights (n,): of the ids, 0 behind the last bag; or None.
        bag_of_entry (n,): int32, the bag of each id as `offsets` have it; b behind the last
            one. Set by `pad_bags`, so that no step computes it; None in bags made otherwise.

    Example:
        >>> import jmask
        >>> jmask.pad_bags([[2, 0], [1]], at_least=4).bag_of_entry
        array([0, 0, 1, 2], dtype=int32)
    """

    ids: Ids
    offsets: Ids
    weights: Ids | None = None
    # No argument, so that `dataclasses.replace` drops it: it is wrong with other offsets.
    bag_of_entry: Ids | None = dataclasses.field(init=False, default=None)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[PyTree, PyTree]], None]:
        keys = [field.name for field in dataclasses.fields(self)]
        return [(jax.tree_util.GetAttrKey(key), getattr(self, key)) for key in keys], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[PyTree]) -> "PaddedBags":
        *arguments, bag_of_entry = children
        bags = cls(*arguments)
        object.__setattr__(bags, "bag_of_entry", bag_of_entry)
        return bags


class _Options(TypedDict, total=False):
    include_last_offset: bool
    weights: Numbers | Mapping[Argument, Numbers] | None
    num_bags: int | None
    at_least: int


@overload
def pad_bags(
    ids: Mapping[Key, Numbers],
    offsets: Mapping[Key, Numbers] | None = ...,
    **options: Unpack[_Options],
) -> dict[Key, PaddedBags]: ...
@overload
def pad_bags(
    ids: Numbers, offsets: Numbers | None = ..., **options: Unpack[_Options]
) -> PaddedBags: ...
def pad_bags(
    ids: Argument,
    offsets: Argument | None = None,
    *,
    include_last_offset: bool = False,
    weights: Argument | None = None,
    num_bags: int | None = None,
    at_least: int = 0,
) -> PaddedBags | dict[Key, PaddedBags]:
    """Pad ragged bags to one of a few sizes, on the host.

    Under jit each number of ids compiles another program. It is rounded up to a power of √2,
    the same for all tables of a dict. A new size is logged once, as INFO of the logger "jmask".

    Args:
        ids: a list of bags, each a list of integers; or with `offsets` integers (n,). Or a
            dict of such, one for each table. Ids of more than 32 bits stay out of range,
            unless 64-bit types are enabled in JAX.
        offsets, include_last_offset: where bags begin, as in `embedding_bag`; in a dict if
            `ids` are.
        weights: floating, of the form of `ids`.
        num_bags: how many bags to make of them, with empty ones at the end: for a last batch
            that has fewer.
        at_least: the least capacity, in ids.

    Returns:
        `PaddedBags` of NumPy arrays, or a dict of them.

    Raises:
        TypeError: if an argument is traced, or not of the type above.
        ValueError: if offsets are not ascending from 0 to n at most, weights do not fit the
            ids, keys of dicts differ, or there are more bags than `num_bags`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> bags = jmask.pad_bags([[2, 0], [], [1, 1, 3]])
        >>> bags.ids, bags.offsets
        (array([ 2,  0,  1,  1,  3, -1], dtype=int32), array([0, 2, 2, 5], dtype=int32))
        >>> jmask.embedding_bag(jnp.arange(4.), bags)
        Array([2., 0., 5.], dtype=float32)
    """
    check_flag("include_last_offset", include_last_offset)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((ids, offsets, weights))):
        raise TypeError(
            "`pad_bags` chooses the sizes of arrays, and works on numbers: call it before the "
            "jitted function, and pass on what it returns."
        )
    is_one = not isinstance(ids, Mapping)
    tables: Argument = {"": ids} if is_one else ids
    extra: dict[str, Argument] = {"offsets": offsets, "weights": weights}
    for name, x in extra.items():
        if x is None or is_one:
            extra[name] = dict.fromkeys(tables, x)
        elif not isinstance(x, Mapping):
            raise TypeError(
                f"`{name}` must be a dict with the keys of `ids`; got {type(x).__name__}."
            )
        elif x.keys() != tables.keys():
            raise ValueError(
                f"`{name}` must have the keys of `ids`, {list(tables)}; got {list(x)}."
            )
    flat = {
        table: _flat(x, extra["offsets"][table], include_last_offset, extra["weights"][table])
        for table, x in tables.items()
    }
    most = max((int(starts[-1]) for _, starts, _ in flat.values()), default=0)
    size = rounded_up(max(most, checked_integer("at_least", at_least)))
    padded = {table: _padded_bags(size, *bags, num_bags) for table, bags in flat.items()}
    if padded:
        _say_once(size, *sorted({len(bags.offsets) - 1 for bags in padded.values()}))
    return padded[""] if is_one else padded


def _flat(
    ids: Argument, offsets: Argument, include_last_offset: bool, weights: Argument
) -> tuple[HostArray, HostArray, HostArray | None]:
    """Return the ids, where each bag begins and the last one ends, and the weights."""
    if offsets is None:
        ids, starts = _joined("ids", ids)
        if weights is not None:
            weights, weight_starts = _joined("weights", weights)
            if not np.array_equal(starts, weight_starts):
                raise ValueError("`weights` must have as many numbers in each bag as `ids`.")
    ids = checked_integers("ids", ids, "raise")
    if offsets is not None:
        starts = np.asarray(checked_offsets(offsets, ids, include_last_offset, "raise"))
        starts = starts if include_last_offset else np.append(starts, ids.size)
    if weights is not None:
        refuse_other_tensors("weights", weights)
        weights = np.asarray(weights)
        weights = weights if weights.size else weights.astype(np.float32)
        check_weights(weights, ids)
    return ids, starts.astype(np.int32), weights


def _padded_bags(
    size: int,
    ids: HostArray,
    starts: HostArray,
    weights: HostArray | None,
    num_bags: int | None,
) -> PaddedBags:
    count, number = int(starts[-1]), len(starts) - 1
    if num_bags is not None:
        empty = checked_integer("num_bags", num_bags) - number
        if empty < 0:
            raise ValueError(
                f"`num_bags` is {num_bags}, and there are {number} bags: give the most that a "
                "batch has."
            )
        starts, number = np.pad(starts, (0, empty), mode="edge"), num_bags
    bag_of_entry = np.repeat(np.arange(number, dtype=np.int32), np.diff(starts))
    ids, limits = ids[:count], np.iinfo(np.int32)
    fits = count == 0 or (ids.max() <= limits.max and ids.min() >= limits.min)
    if not fits and not jax.config.read("jax_enable_x64"):
        # Steps would get the lower 32 bits, which may be a row. The ends are in no table.
        ids, fits = clipped(ids, limits.min, limits.max), True
    ids = ids.astype(np.int32 if fits else np.int64)  # padding is -1, of either

    def padded(x: HostArray, value: int) -> HostArray:
        return np.pad(x, (0, size - count), constant_values=value)

    weights = None if weights is None else padded(weights[:count], 0)
    leaves = padded(ids, -1), starts, weights, padded(bag_of_entry, number)
    return PaddedBags.tree_unflatten(None, leaves)


def _joined(name: str, bags: Argument) -> tuple[HostArray, HostArray]:
    """Return the numbers of a list of bags, and where each bag begins."""
    numbers: HostArray | None = None
    are_lists = isinstance(bags, Sequence) and all(isinstance(x, list | tuple) for x in bags)
    if are_lists:
        # One conversion for all lists: each costs as much as a hundred of its numbers.
        with contextlib.suppress(ValueError):  # lists of different lengths in a bag
            numbers = np.asarray(list(itertools.chain.from_iterable(bags)))
    elif isinstance(bags, Sequence | np.ndarray) and all(np.ndim(x) == 1 for x in bags):
        if any(isinstance(x, np.ma.MaskedArray) for x in bags):
            raise TypeError(
                f"`{name}` has bags that are numpy.ma arrays: give `bag.compressed()`, the "
                "numbers that are not masked."
            )
        numbers = np.concatenate([np.asarray(x) for x in bags if len(x)] or [np.zeros(0)])
    if numbers is None or numbers.ndim != 1:
        raise TypeError(
            f"`{name}` must be a list of bags, each a list of numbers, where no `offsets` are "
            f"given; got {type(bags).__name__}."
        )
    return numbers, np.cumsum([0, *map(len, bags)]).astype(np.int32)


def rounded_up(count: int) -> int:
    """Return the first of 1, 2, 3, 4, 6, 8, 12, 16, 23, 32, ... that is not less."""
    sizes = (math.ceil(2 ** (k / 2)) for k in itertools.count())
    return next(size for size in sizes if size >= count)


@functools.cache
def _say_once(ids: int, *bags: int) -> None:
    text = "pad_bags: room for %d ids in %s bags. A step is compiled for it."
    logging.getLogger("jmask").info(text, ids, " or ".join(map(str, bags)))


def checked_offsets(offsets: Numbers, ids: Ids, include_last_offset: bool, mode: str) -> Ids:
    """Return integers (b,), ascending from 0 to n at most unless they are traced."""
    offsets = checked_integers("offsets", offsets, mode)
    if ids.ndim != 1 or offsets.ndim != 1:
        raise ValueError(
            "`offsets` (b,) say where each bag begins in `ids` (n,): got `offsets` of shape "
            f"{offsets.shape} and `ids` of shape {ids.shape}."
        )
    count = ids.shape[0]
    if not offsets.size and (include_last_offset or count):
        raise ValueError(f"`offsets` are empty, and `ids` has {count} entries.")
    if not isinstance(offsets, jax.core.Tracer):
        starts = np.asarray(offsets)
        wrong = (starts < np.append(0, starts[:-1])) | (starts > count)
        wrong[:1] |= starts[:1] != 0
        for at in np.flatnonzero(wrong)[:1]:
            raise ValueError(
                f"`offsets` must ascend from 0 to {count} at most, the number of `ids`: got "
                f"{starts[at]} at {at}."
            )
    return offsets


def check_weights(weights: Shaped, ids: Shaped) -> None:
    """Refuse weights that are no floating numbers, one for each id."""
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(
            f"`weights` must be floating, got {weights.dtype}: cast them, or sum with the real "
            "and with the imaginary part of complex ones."
        )
    if weights.shape != ids.shape:
        raise ValueError(
            f"`weights` of shape {weights.shape} must have the shape of `ids`, {ids.shape}."
        )
