"""torch's `Embedding(sparse=True)` with its optimizers for sparse gradients.

Run by `other_interpreter.py`, since torch's builds are for other versions of Python than the
newest JAX's; written against torch 2.13.
"""

import numpy as np
import torch
from dlrm_layers import split, start_of_tables
from programs import PROGRAMS, START
from torch_dlrm import build_loss
from worker import serve
from works import OFFERS


def build(work, optimizer, rows, width, rate, tables=1, bags=0):
    if bags:
        return _bags(work, optimizer, rows, width, rate, tables, bags)
    program = PROGRAMS.get(work)
    start = torch.full((rows, width), START if program else 1.0)
    embedding = torch.nn.Embedding.from_pretrained(start, freeze=False, sparse=True)
    table = embedding.weight
    rule = getattr(torch.optim, OFFERS["torch"][optimizer])([table], lr=rate)

    def step(ids):
        rule.zero_grad()
        if program:
            loss = program.loss(embedding(torch.from_numpy(ids.reshape(-1, program.entries))))
        else:
            loss = embedding(torch.from_numpy(ids)).square().sum()
        loss.backward()
        rule.step()
        return loss.item()

    def prepare(ids):
        if work != "update":
            return lambda: step(ids)
        indices = torch.from_numpy(ids.astype(np.int64))[None]
        values = torch.ones(ids.size, width)
        table.grad = torch.sparse_coo_tensor(indices, values, table.shape, is_coalesced=True)
        return rule.step

    return prepare


def _bags(work, optimizer, rows, width, rate, tables, bags):
    embeddings = [
        torch.nn.EmbeddingBag.from_pretrained(
            torch.full((rows, width), start_of_tables(work)),
            freeze=False,
            sparse=True,
            mode="sum",
        )
        for _ in range(tables)
    ]
    rule = getattr(torch.optim, OFFERS["torch"][optimizer])(
        [embedding.weight for embedding in embeddings], lr=rate
    )
    loss_of, after = build_loss(work, tables, width)

    def step(lengths, ids):
        rule.zero_grad()
        if tables == 1:  # its bags are equally long
            bags_of = [embeddings[0](torch.from_numpy(ids[0].reshape(bags, -1)))]
        else:
            offsets = [torch.from_numpy(np.cumsum(n) - n) for n in lengths]
            inputs = zip(embeddings, ids, offsets, strict=True)
            bags_of = [embedding(torch.from_numpy(x), o) for embedding, x, o in inputs]
        loss = loss_of(bags_of)
        loss.backward()
        rule.step()
        after()
        return loss.item()

    def prepare(batch):
        lengths, ids = split(batch.astype(np.int64), tables, bags)
        return lambda: step(lengths, ids)

    return prepare


if __name__ == "__main__":
    serve(build, torch.__version__)
