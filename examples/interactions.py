"""Who took which item: made up, with a structure that a recommender has to find.

Every user and every item belongs to one of some groups. A user takes items of their own
group, or, now and then, of any other; within a group, items are taken by Zipf's law: the
second half as often as the first, the third a third as often. Ids say nothing about groups.
"""

from typing import NamedTuple

import numpy as np

OF_EACH_USER = 10  # items taken, of which one is held out
OF_OTHER_GROUPS = 0.2
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
        """Lines drawn at random, the same for the same step."""
        rng = np.random.default_rng((seed, step))
        lines = rng.integers(len(self.items), size=BATCH)
        items = self.items[lines]
        return {
            "users": self.users[lines],
            "items": items,
            "frequency": self.frequency[items],
        }


def make_interactions(users: int, items: int, groups: int, k: int, seed: int) -> Interactions:
    """Interactions of so many users with so many items."""
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
