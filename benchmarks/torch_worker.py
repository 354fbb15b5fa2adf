"""torch's `Embedding(sparse=True)` with its optimizers for sparse gradients.

Run by `other_interpreter.py`, since torch's builds are for other versions of Python than the
newest JAX's; written against torch 2.13.
"""

import numpy as np
import torch
from worker import serve
from works import OFFERS


def build(work, optimizer, rows, width, rate):
    start = torch.ones(rows, width)
    embedding = torch.nn.Embedding.from_pretrained(start, freeze=False, sparse=True)
    table = embedding.weight
    rule = getattr(torch.optim, OFFERS["torch"][optimizer])([table], lr=rate)

    def step(ids):
        rule.zero_grad()
        loss = embedding(torch.from_numpy(ids)).square().sum()
        loss.backward()
        rule.step()
        return loss.item()

    def prepare(ids):
        if work == "step":
            return lambda: step(ids)
        indices = torch.from_numpy(ids.astype(np.int64))[None]
        values = torch.ones(ids.size, width)
        table.grad = torch.sparse_coo_tensor(indices, values, table.shape, is_coalesced=True)
        return rule.step

    return prepare


if __name__ == "__main__":
    serve(build, torch.__version__)
