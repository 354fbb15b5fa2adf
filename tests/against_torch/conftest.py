"""torch, for the tests that need it: they are marked so, and skipped without it."""

import warnings

import pytest


@pytest.fixture
def torch():
    import torch.masked

    with torch.sparse.check_sparse_tensor_invariants(), warnings.catch_warnings():
        # Sparse tensors are in beta, and masked ones a prototype.
        warnings.filterwarnings("ignore", ".*(prototype|beta|[Ss]parse|MaskedTensor)")
        yield torch
