"""torch with `Embedding(sparse=True)`, and FBGEMM's table-batched embedding on CPU."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from works import OFFERS, Task

Step = Callable[[np.ndarray], float | None]


def torch_step(task: Task, rate: float) -> Step:
    """A full step."""
    torch = _torch()
    table = torch.ones(task.rows, task.width)
    embedding = torch.nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
    update = _optimizer(torch, task, embedding.parameters(), rate)

    def run(ids: np.ndarray) -> float:
        update.zero_grad()
        loss = embedding(torch.from_numpy(ids)).square().sum()
        loss.backward()
        update.step()
        return loss.item()

    return run


def torch_update(task: Task, rate: float) -> Step:
    """The update alone, with a coalesced gradient of ones."""
    torch = _torch()
    table = torch.nn.Parameter(torch.ones(task.rows, task.width))
    update = _optimizer(torch, task, [table], rate)
    values = torch.ones(task.lookups, task.width)

    def run(ids: np.ndarray) -> None:
        indices = torch.from_numpy(ids.astype(np.int64))[None]
        table.grad = torch.sparse_coo_tensor(indices, values, table.shape, is_coalesced=True)
        update.step()

    return run


def fbgemm_step(task: Task, rate: float) -> Step:
    """A full step, with a bag for each id: what a lookup is. Its update is fused."""
    torch = _torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            EmbeddingLocation,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    embedding = SplitTableBatchedEmbeddingBagsCodegen(
        [(task.rows, task.width, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType[OFFERS["FBGEMM"][task.optimizer]],
        learning_rate=rate,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )
    for weights in embedding.split_embedding_weights():
        weights.fill_(1)
    offsets = torch.arange(task.lookups + 1)

    def run(ids: np.ndarray) -> float:
        loss = embedding(torch.from_numpy(ids.astype(np.int64)), offsets).square().sum()
        loss.backward()
        return loss.item()

    return run


def _torch() -> Any:
    import torch

    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    return torch


def _optimizer(torch: Any, task: Task, parameters: Any, rate: float) -> Any:
    return getattr(torch.optim, OFFERS["torch"][task.optimizer])(parameters, lr=rate)
