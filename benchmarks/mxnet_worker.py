"""MXNet's row_sparse gradients with its lazy updates; written against MXNet 1.9's API.

MXNet ended with Python 3.11 and NumPy 1.23. Run by `other_interpreter.py`.
"""

import mxnet as mx
import numpy as np
from worker import serve

_OPTIMIZERS = {
    "SGD": ("sgd", {}),
    "momentum": ("sgd", {"momentum": 0.9}),
    "Adagrad": ("adagrad", {}),
    "row-wise Adagrad": ("groupadagrad", {}),
    "Adam": ("adam", {}),
}


def build(work, optimizer, rows, width, rate):
    name, settings = _OPTIMIZERS[optimizer]
    rule = mx.optimizer.create(name, learning_rate=rate, **settings)
    table = mx.nd.ones((rows, width))
    table.attach_grad(stype="row_sparse")
    state = rule.create_state(0, table)
    mx.nd.waitall()

    def step(ids):
        with mx.autograd.record():
            looked_up = mx.nd.Embedding(
                mx.nd.array(ids, dtype="int32"), table, rows, width, sparse_grad=True
            )
            loss = looked_up.square().sum()
        loss.backward()
        rule.update(0, table, table.grad, state)
        mx.nd.waitall()  # MXNet returns before the work is done
        return float(loss.asscalar())

    def update(gradient):
        rule.update(0, table, gradient, state)
        mx.nd.waitall()

    def prepare(ids):
        if work == "step":
            return lambda: step(ids)
        values = np.ones((ids.size, width), np.float32)
        gradient = mx.nd.sparse.row_sparse_array((values, ids), shape=table.shape)
        mx.nd.waitall()
        return lambda: update(gradient)

    return prepare


if __name__ == "__main__":
    serve(build, mx.__version__)
