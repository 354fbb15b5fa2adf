"""What torch and FBGEMM compute of bags: a sum of squares, or the rest of a DLRM.

    build_loss("bags", tables, width)        bags (T, B, D) -> their squares, summed
    build_loss("DLRM", tables, width)        layers, interactions, and the loss of a click

The layers are those of `dlrm_layers.py`, from the same numbers, and learn by plain SGD.
"""

import numpy as np
import torch
from dlrm_layers import RATE_OF_LAYERS, examples, start_of_layers


def build_loss(work, tables, width):
    """(bags, number of examples) -> loss; and what is to be called after its `backward`."""
    if work == "bags":
        return lambda bags: sum(bag.square().sum() for bag in bags), lambda: None
    layers = [
        [(_parameter(w), _parameter(b)) for w, b in part]
        for part in start_of_layers(tables, width)
    ]
    parameters = [x for part in layers for pair in part for x in pair]
    learn = torch.optim.SGD(parameters, RATE_OF_LAYERS)

    def loss(bags):
        dense, clicks = map(torch.from_numpy, examples(bags[0].shape[0]))
        x = _through(layers[0], dense, last=torch.relu)
        rows = torch.stack([x, *bags], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))
        below = torch.tril_indices(tables + 1, tables + 1, -1)
        features = torch.cat([x, products[:, below[0], below[1]]], 1)
        logits = _through(layers[1], features, last=lambda x: x)[:, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, clicks)

    def after():
        learn.step()
        learn.zero_grad()

    return loss, after


def _parameter(x):
    return torch.nn.Parameter(torch.from_numpy(np.array(x)))


def _through(layers, x, last):
    for number, (w, b) in enumerate(layers):
        x = x @ w + b
        x = last(x) if number == len(layers) - 1 else torch.relu(x)
    return x
