"""TensorFlow's IndexedSlices in a compiled `tf.function`, with its sparse update operations.

Duplicates are summed before an update that is not linear, as Keras did for its sparse updates.
Adam has no sparse operation (Keras decays the moments of all rows, a dense pass): here it
gathers, computes and scatters the rows of the batch, which is the same work as the others'.
Run by `other_interpreter.py`; written against TensorFlow 2.21.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from worker import serve


def build(work, optimizer, rows, width, rate):
    table = tf.Variable(tf.ones([rows, width]))
    apply = _OPTIMIZERS[optimizer](table, rate)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.gather(table, ids)))
        gradient = tape.gradient(loss, table)
        if optimizer == "SGD":
            apply(gradient.values, gradient.indices)
        else:
            touched, place = tf.unique(gradient.indices)
            count = tf.size(touched)
            apply(tf.math.unsorted_segment_sum(gradient.values, place, count), touched)
        return loss

    @tf.function
    def update(ids):
        apply(tf.ones([ids.shape[0], width]), ids)

    def prepare(ids):
        if work == "update":
            return lambda: (update(tf.constant(ids)), None)[1]
        return lambda: float(step(tf.constant(ids)))

    return prepare


def _zeros(table):
    return tf.Variable(tf.zeros(table.shape))


def _sgd(table, rate):
    return lambda values, ids: table.scatter_sub(tf.IndexedSlices(rate * values, ids))


def _momentum(table, rate):
    slot = _zeros(table)
    return lambda values, ids: tf.raw_ops.ResourceSparseApplyKerasMomentum(
        var=table.handle, accum=slot.handle, lr=rate, grad=values, indices=ids, momentum=0.9
    )


def _adagrad(table, rate):
    slot = _zeros(table)
    return lambda values, ids: tf.raw_ops.ResourceSparseApplyAdagradV2(
        var=table.handle, accum=slot.handle, lr=rate, epsilon=1e-10, grad=values, indices=ids
    )


def _adam(table, rate, b1=0.9, b2=0.999, eps=1e-8):
    first, second, count = _zeros(table), _zeros(table), tf.Variable(0.0)

    def apply(values, ids):
        t = count.assign_add(1.0)
        m = b1 * tf.gather(first, ids) + (1 - b1) * values
        v = b2 * tf.gather(second, ids) + (1 - b2) * values * values
        size = rate * tf.sqrt(1 - b2**t) / (1 - b1**t)
        first.scatter_update(tf.IndexedSlices(m, ids))
        second.scatter_update(tf.IndexedSlices(v, ids))
        table.scatter_sub(tf.IndexedSlices(size * m / (tf.sqrt(v) + eps), ids))

    return apply


_OPTIMIZERS = {"SGD": _sgd, "momentum": _momentum, "Adagrad": _adagrad, "Adam": _adam}

if __name__ == "__main__":
    serve(build, tf.__version__)
