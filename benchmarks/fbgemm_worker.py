"""FBGEMM's table-batched embedding on CPU, with a bag for each id: what a lookup is.

Its update is a part of its backward pass. Run by `other_interpreter.py`; written against
fbgemm-gpu-cpu 1.8 with torch 2.13.
"""

from importlib.metadata import version

import numpy as np
import torch
from dlrm_layers import split, start_of_tables
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch_dlrm import build_loss
from worker import serve
from works import OFFERS


def build(work, optimizer, rows, width, rate, tables=1, bags=0):
    assert work != "update"
    embedding = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU)] * tables,
        optimizer=EmbOptimType[OFFERS["FBGEMM"][optimizer]],
        learning_rate=rate,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )
    for weights in embedding.split_embedding_weights():
        weights.fill_(start_of_tables(work))

    loss_of, after = build_loss(work, tables, width) if bags else (None, None)

    def step_of_bags(ids, lengths):
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        found = embedding(torch.from_numpy(ids), torch.from_numpy(offsets))
        loss = loss_of(found.split(width, dim=1))
        loss.backward()
        after()
        return loss.item()

    def step(ids, offsets):
        loss = embedding(torch.from_numpy(ids.astype(np.int64)), offsets).square().sum()
        loss.backward()
        return loss.item()

    def prepare(ids):
        if bags:
            lengths, each = split(ids.astype(np.int64), tables, bags)
            joined = np.concatenate(each)
            return lambda: step_of_bags(joined, lengths.ravel())
        offsets = torch.arange(ids.size + 1)
        return lambda: step(ids, offsets)

    return prepare


if __name__ == "__main__":
    serve(build, version("fbgemm-gpu-cpu"))
