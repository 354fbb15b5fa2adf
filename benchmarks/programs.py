"""Models as one writes them down, of the rows of a batch alone, for JAX and for torch.

    "BPR"  3 rows for each example    x (b, 3, D)    mean of max(0, 1 - u . (i - j))

Who measures looks `x` up by ids (b, k). Whether `x` is an array of JAX or of torch these
functions do not know: they are written with what both have, sums, products and `clip`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

# Tables start so; with ones the machine's square would be large.
START = 0.01


class Program(NamedTuple):
    """A loss of looked up rows.

    Attributes:
        entries: k, the rows of an example.
        loss: x (b, k, D) -> a number.
    """

    entries: int
    loss: Callable[[Any], Any]


def _hinge(x: Any) -> Any:
    return (1 - x).clip(0).mean()


def _machine(x: Any) -> Any:
    """Rendle's, of second order."""
    products = (x.sum(1) ** 2 - (x**2).sum(1)).sum(1) / 2
    return ((products - 1) ** 2).mean()


def _skip_gram(x: Any) -> Any:
    """A word, one beside it, and ten that are not."""
    scores = (x[:, :1] * x[:, 1:]).sum(2)
    return _hinge(scores[:, 0]) + _hinge(-scores[:, 1:])


def _bpr(x: Any) -> Any:
    """Of two items the one that a user has taken."""
    return _hinge((x[:, 0] * (x[:, 1] - x[:, 2])).sum(1))


def _trans_e(x: Any) -> Any:
    """A head, a relation, its tail, and another one."""
    there = x[:, 0] + x[:, 1]
    return _hinge(abs(there - x[:, 3]).sum(1) - abs(there - x[:, 2]).sum(1))


def _mean_of_words(x: Any) -> Any:
    return ((x.mean(1) - 1) ** 2).sum(1).mean()


PROGRAMS = {
    "factorization machine": Program(39, _machine),
    "skip-gram": Program(12, _skip_gram),
    "BPR": Program(3, _bpr),
    "TransE": Program(4, _trans_e),
    "mean of words": Program(40, _mean_of_words),
}
