"""FBGEMM's table-batched embedding on CPU, with a bag for each id: what a lookup is.

Its update is a part of its backward pass. Run by `other_interpreter.py`; written against
fbgemm-gpu-cpu 1.8 with torch 2.13.
"""

from importlib.metadata import version

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from worker import serve
from works import OFFERS


def build(work, optimizer, rows, width, rate):
    assert work == "step"
    embedding = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType[OFFERS["FBGEMM"][optimizer]],
        learning_rate=rate,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )
    for weights in embedding.split_embedding_weights():
        weights.fill_(1)

    def step(ids, offsets):
        loss = embedding(torch.from_numpy(ids.astype(np.int64)), offsets).square().sum()
        loss.backward()
        return loss.item()

    def prepare(ids):
        offsets = torch.arange(ids.size + 1)
        return lambda: step(ids, offsets)

    return prepare


if __name__ == "__main__":
    serve(build, version("fbgemm-gpu-cpu"))
