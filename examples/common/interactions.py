"""Who took which item: made up, with a structure that a recommender has to find.

Every user and every item belongs to one of some groups. A user takes items of their own
group, or, now and then, of any other; within a group, items are taken by Zipf's law: the
second half as often as the first, the third a third as often. Ids say nothing about groups.
"""

from typing import NamedTuple

import numpy as np

OF_EACH_USER = 10  # items taken, of which one is held out
OF_OTHER_GROUPS = 0.2
FOLLOWS = 0.5  # of the items of a sequence, the successor of the one before
BATCH = 1024


class Interactions(NamedTuple):
    """Users and the items they took, line by line, and one item held out for each user.

    Attributes:
        users, items (n,): ids.
        held_out (users,): the item of each user that is not among these.
        frequency (items,): the share of each item in `items`.
        best (users, k): k items that whoever knows the groups would show to each user.
    """

    users: np.ndarray
    items: np.ndarray
    held_out: np.ndarray
    frequency: np.ndarray
    best: np.ndarray

    def batch(self, seed: int, step: int) -> dict[str, np.ndarray]:
        """Draw lines at random, the same for the same step."""
        rng = np.random.default_rng((seed, step))
        lines = rng.integers(len(self.items), size=BATCH)
        items = self.items[lines]
        return {"users": self.users[lines], "items": items, "frequency": self.frequency[items]}


def make_interactions(users: int, items: int, groups: int, k: int, seed: int) -> Interactions:
    """Make interactions of users with items."""
    rng = np.random.default_rng(seed)
    group_of_user = rng.integers(groups, size=users)
    in_group = items // groups
    # Ids of the items of each group, the most popular one first.
    items_of_group = rng.permutation(items)[: groups * in_group].reshape(groups, in_group)
    weights = 1 / np.arange(1, in_group + 1)
    ranks = rng.choice(in_group, size=(users, OF_EACH_USER), p=weights / weights.sum())
    other = rng.random(ranks.shape) < OF_OTHER_GROUPS
    group = np.where(other, rng.integers(groups, size=ranks.shape), group_of_user[:, None])
    taken = items_of_group[group, ranks].astype(np.int32)
    learned = taken[:, 1:].ravel()
    return Interactions(
        users=np.repeat(np.arange(users, dtype=np.int32), OF_EACH_USER - 1),
        items=learned,
        held_out=taken[:, 0],
        frequency=np.bincount(learned, minlength=items).astype(np.float32) / len(learned),
        best=items_of_group[group_of_user, :k],
    )


class Sequences(NamedTuple):
    """Items in the order in which each user took them, and the one that came next.

    Attributes:
        items (users, n): ids.
        following (users,): the next item of each user.
        successor (items,): the item that often follows each.
    """

    items: np.ndarray
    following: np.ndarray
    successor: np.ndarray


def make_sequences(users: int, items: int, groups: int, length: int, seed: int) -> Sequences:
    """Make users who take items of their group, half of the time the successor of the last.

    Some groups have more users than others; items of a group are as popular as Zipf says.
    """
    rng = np.random.default_rng(seed)
    share = np.arange(1, groups + 1) ** -0.5
    group, in_group = rng.choice(groups, size=users, p=share / share.sum()), items // groups
    # Ids of the items of each group, the most popular one first, and the successor of each.
    items_of_group = rng.permutation(items)[: groups * in_group].reshape(groups, in_group)
    successor = np.arange(items, dtype=np.int32)
    successor[items_of_group] = rng.permuted(items_of_group, axis=1)
    weights = 1 / np.arange(1, in_group + 1)
    ranks = rng.choice(in_group, size=(users, length + 1), p=weights / weights.sum())
    taken = items_of_group[group[:, None], ranks].astype(np.int32)
    follows = rng.random(taken.shape) < FOLLOWS
    for place in range(1, length + 1):
        after = successor[taken[:, place - 1]]
        taken[:, place] = np.where(follows[:, place], after, taken[:, place])
    return Sequences(taken[:, :-1], taken[:, -1], successor)
