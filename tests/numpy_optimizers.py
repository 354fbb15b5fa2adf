"""Optimizers written again, in float64 NumPy, from their formulas: those of jmask and of optax.

Independent of jmask: duplicates are summed by NumPy, and only rows in the gradient are updated
(or all, for zero semantics).
"""

import dataclasses
from typing import Any, ClassVar

import numpy as np


@dataclasses.dataclass
class Model:
    """One parameter, its state, and the number of steps done."""

    param: np.ndarray
    hyper: dict[str, Any]
    lazy: bool = True
    steps: int = 0

    def __post_init__(self):
        self.param = np.array(self.param, np.float64)
        self.state = {name: self.full(name, x) for name, x in self.slots().items()}

    per_row: ClassVar = ()

    def full(self, name, value):
        shape = self.param.shape
        if name in (*self.per_row, "row_count"):
            shape = shape[:1] + (1,) * (len(shape) - 1)
        return np.full(shape, value)

    def square(self, g):
        axes = tuple(range(1, g.ndim))
        return np.mean(g**2, axes, keepdims=True) if self.per_row else g**2

    def slots(self):
        raise NotImplementedError

    def step(self, ids, values):
        """One step with the gradient sum_i values[i] at row ids[i]."""
        self.steps += 1
        ids = np.asarray(ids, np.int64)
        inside = (ids >= 0) & (ids < len(self.param))
        summed = np.zeros(self.param.shape)
        np.add.at(summed, ids[inside], np.asarray(values, np.float64)[inside])
        rows = np.unique(ids[inside]) if self.lazy else np.arange(len(self.param))
        self.update(rows, summed[rows])

    def gradient(self, row, g, clip_after_decay=False):
        h = self.hyper
        g = g * h.get("rescale_grad", 1.0) * (-1 if h.get("maximize") else 1)
        l2 = h.get("decay_mode", "l2") == "l2"
        decay = h.get("weight_decay", 0.0) * self.param[row] * l2
        bound = h.get("clip_gradient")
        bound = np.inf if bound is None else bound
        if clip_after_decay:
            return np.clip(g + decay, -bound, bound)
        return np.clip(g, -bound, bound) + decay

    def rate(self):
        rate = self.hyper["learning_rate"]
        return rate(self.steps - 1) if callable(rate) else rate

    def decay(self, row, rate):
        """Decoupled weight decay, of the parameter as it was before the step."""
        if self.hyper.get("decay_mode") == "decoupled":
            self.param[row] -= rate * self.hyper["weight_decay"] * self.param[row]

    def update(self, row, g):
        raise NotImplementedError


class Sgd(Model):
    def slots(self):
        return {"momentum": 0.0} if self.hyper.get("momentum") else {}

    def update(self, row, g):
        mu = self.hyper.get("momentum", 0.0)
        step = self.rate() * self.gradient(row, g)
        self.decay(row, self.rate())
        if not mu:
            self.param[row] -= step
            return
        buffer = mu * self.state["momentum"][row] - step
        self.state["momentum"][row] = buffer
        nesterov = self.hyper.get("nesterov")
        self.param[row] += mu * buffer - step if nesterov else buffer


class Adam(Model):
    def slots(self):
        counts = {"row_count": 0.0} if self.hyper.get("count") == "per_row" else {}
        return {"mu": 0.0, "nu": 0.0} | counts

    def update(self, row, g):
        h = self.hyper
        b1, b2 = h.get("b1", 0.9), h.get("b2", 0.999)
        g = self.gradient(row, g, clip_after_decay=True)
        m = b1 * self.state["mu"][row] + (1 - b1) * g
        v = b2 * self.state["nu"][row] + (1 - b2) * self.square(g)
        self.state["mu"][row], self.state["nu"][row] = m, v
        self.decay(row, self.rate())
        steps = self.steps
        if "row_count" in self.state:
            self.state["row_count"][row] += 1
            steps = self.state["row_count"][row]
        scale = np.sqrt(1 - b2**steps) / (1 - b1**steps)
        root = np.sqrt(v + h.get("eps_root", 0.0)) + h.get("eps", 1e-8)
        self.param[row] -= self.rate() * scale * m / root


class AdamW(Model):
    """As optax computes it: `eps` is added after the bias is corrected, and the decay last."""

    def slots(self):
        return {"mu": 0.0, "nu": 0.0}

    def update(self, row, g):
        h, t = self.hyper, self.steps
        b1, b2 = h.get("b1", 0.9), h.get("b2", 0.999)
        m = self.state["mu"][row] = b1 * self.state["mu"][row] + (1 - b1) * g
        v = self.state["nu"][row] = b2 * self.state["nu"][row] + (1 - b2) * g**2
        average = m / (1 - b1**t)
        if h.get("nesterov"):
            average = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        root = np.sqrt(v / (1 - b2**t) + h.get("eps_root", 0.0)) + h.get("eps", 1e-8)
        decay = h.get("weight_decay", 1e-4) * self.param[row] * (h.get("mask") is not False)
        self.param[row] -= self.rate() * (average / root + decay)


class OptaxSgd(Model):
    """The buffer does not contain the rate."""

    def slots(self):
        return {"trace": 0.0}

    def update(self, row, g):
        mu = self.hyper["momentum"]
        m = self.state["trace"][row] = mu * self.state["trace"][row] + g
        self.param[row] -= self.rate() * (mu * m + g if self.hyper.get("nesterov") else m)


class RmsProp(Model):
    def slots(self):
        return {"nu": 0.0, "trace": 0.0}

    def update(self, row, g):
        v = self.state["nu"][row] = 0.9 * self.state["nu"][row] + 0.1 * g**2
        step = self.rate() * g / np.sqrt(v + 1e-8)
        m = self.hyper.get("momentum", 0.0) * self.state["trace"][row] - step
        self.state["trace"][row] = m
        self.param[row] += m


class Lion(Model):
    def slots(self):
        return {"mu": 0.0}

    def update(self, row, g):
        m = self.state["mu"][row]
        move = np.sign(0.9 * m + 0.1 * g) + 1e-3 * self.param[row]
        self.state["mu"][row] = 0.99 * m + 0.01 * g
        self.param[row] -= self.rate() * move


class Adagrad(Model):
    def slots(self):
        return {"sum_of_squares": self.hyper.get("initial_accumulator_value", 0.0)}

    def update(self, row, g):
        h = self.hyper
        g = self.gradient(row, g)
        self.state["sum_of_squares"][row] += self.square(g)
        total = self.state["sum_of_squares"][row]
        rate = self.rate() / (1 + (self.steps - 1) * h.get("lr_decay", 0.0))
        self.decay(row, rate)
        root = np.sqrt(total + h.get("eps_root", 0.0)) + h.get("eps", 1e-10)
        self.param[row] -= rate * g / root


class RowwiseAdam(Adam):
    per_row: ClassVar = ("nu",)


class RowwiseAdagrad(Adagrad):
    per_row: ClassVar = ("sum_of_squares",)


class Ftrl(Model):
    def slots(self):
        return {"z": 0.0, "n": 0.0}

    def update(self, row, g):
        h, lr, w = self.hyper, self.rate(), self.param[row]
        l1, beta, decay = h.get("l1", 0.01), h.get("beta", 1.0), h.get("weight_decay", 0.0)
        g = self.gradient(row, g) - decay * w  # the decay is not in FTRL's gradient
        n = self.state["n"][row]
        z = self.state["z"][row] + g - (np.sqrt(n + g**2) - np.sqrt(n)) / lr * w
        self.state["n"][row], self.state["z"][row] = n + g**2, z
        scale = (beta + np.sqrt(n + g**2)) / lr + decay
        zero, beyond = np.zeros_like(z), np.abs(z) > l1
        self.param[row] = np.divide(np.sign(z) * l1 - z, scale, out=zero, where=beyond)
