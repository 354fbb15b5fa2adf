"""Dense optimizers written again in float64 NumPy, for whole tables: what a row becomes.

Each is a generator function: send it a dense gradient, and it yields the parameter after the
step. `rate` is a function of the number of steps done before.
"""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

Twin = Generator[np.ndarray, np.ndarray, None]
Rate = Callable[[int], float]


def sgd(
    p: np.ndarray, rate: Rate, momentum: float = 0.0, nesterov: bool = False, l2: float = 0.0,
    decoupled: float = 0.0,
) -> Twin:  # fmt: skip
    """MXNet's: the buffer contains the rate."""
    m, t = np.zeros_like(p), 0
    while True:
        g = yield p
        lr = rate(t)
        step = lr * (g + l2 * p)
        m = momentum * m - step
        move = momentum * m - step if nesterov else m
        p, t = p + move - lr * decoupled * p, t + 1


def optax_sgd(p: np.ndarray, rate: Rate, momentum: float, nesterov: bool = False) -> Twin:
    m, t = np.zeros_like(p), 0
    while True:
        g = yield p
        m = momentum * m + g
        p, t = p - rate(t) * (momentum * m + g if nesterov else m), t + 1


def adam(
    p: np.ndarray, rate: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8,
    eps_root: float = 0.0, decay: float = 0.0, first: bool = True, nesterov: bool = False,
    rows: bool = False,
) -> Twin:  # fmt: skip
    """`first`: eps is added before the bias is corrected, as in jmask.adam."""
    m, t = np.zeros_like(p), 0
    v = np.zeros_like(p[:, :1] if rows else p)
    while True:
        g = yield p
        m = b1 * m + (1 - b1) * g
        square = g**2
        v = b2 * v + (1 - b2) * (square.mean(axis=1, keepdims=True) if rows else square)
        t += 1
        c1, c2, lr = 1 - b1**t, 1 - b2**t, rate(t - 1)
        ahead = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / c1
        top = ahead if nesterov else m / c1
        if first:
            move = np.sqrt(c2) * top / (np.sqrt(v + eps_root) + eps)
        else:
            move = top / (np.sqrt(v / c2 + eps_root) + eps)
        p = p - lr * move - lr * decay * p


def rmsprop(
    p: np.ndarray, rate: Rate, decay: float = 0.9, eps: float = 1e-8, momentum: float = 0.0
) -> Twin:
    v, m, t = np.zeros_like(p), np.zeros_like(p), 0
    while True:
        g = yield p
        v = decay * v + (1 - decay) * g**2
        m = momentum * m - rate(t) * g / np.sqrt(v + eps)
        p, t = p + m, t + 1


def lion(
    p: np.ndarray, rate: Rate, b1: float = 0.9, b2: float = 0.99, decay: float = 1e-3
) -> Twin:
    m, t = np.zeros_like(p), 0
    while True:
        g = yield p
        move = np.sign(b1 * m + (1 - b1) * g) + decay * p
        m = b2 * m + (1 - b2) * g
        p, t = p - rate(t) * move, t + 1


def adagrad(
    p: np.ndarray, rate: Rate, initial: float = 0.0, eps: float = 1e-10, root: float = 0.0,
    decoupled: float = 0.0, rows: bool = False,
) -> Twin:  # fmt: skip
    total, t = np.full_like(p[:, :1] if rows else p, initial), 0
    while True:
        g = yield p
        total = total + ((g**2).mean(axis=1, keepdims=True) if rows else g**2)
        lr = rate(t)
        p = p - lr * g / (np.sqrt(total + root) + eps) - lr * decoupled * p
        t += 1


def started(twin: Any, p: Any, rate: Rate, **settings: Any) -> Twin:
    """A twin that waits for its first gradient."""
    made: Twin = twin(np.asarray(p, np.float64), rate, **settings)
    next(made)
    return made
