"""Sparse and masked tensors for JAX."""

# Methods of tensors are functions of these.
from jmask import nn as nn
from jmask import nnx as nnx
from jmask import numpy as numpy
from jmask import sparsecore as sparsecore
from jmask import tree as tree
from jmask import vocabulary as vocabulary
from jmask._autodiff.value_and_grad import grad as grad
from jmask._autodiff.value_and_grad import value_and_grad as value_and_grad
from jmask._base.fallback import StorageFallbackWarning as StorageFallbackWarning
from jmask._base.fallback import strict as strict
from jmask._deferred.deferred import deferred as deferred
from jmask._embedding.bag import embedding_bag as embedding_bag
from jmask._embedding.lookup import embedding_lookup as embedding_lookup
from jmask._embedding.lookup import renormalize as renormalize
from jmask._embedding.overflow import exchange_overflow as exchange_overflow
from jmask._embedding.pad_bags import PaddedBags as PaddedBags
from jmask._embedding.pad_bags import pad_bags as pad_bags
from jmask._gradcheck.check import gradcheck as gradcheck
from jmask._gradcheck.check import is_masked_function as is_masked_function
from jmask._gradcheck.message import GradcheckError as GradcheckError
from jmask._kernels.keep_memory import keep_memory as keep_memory
from jmask._kernels.stochastic_rounding import stochastic_round as stochastic_round
from jmask._lazy.lazy import lazy as lazy
from jmask._ops import indexing as _indexing  # noqa: F401
from jmask._ops.contractions import add_n as add_n
from jmask._ops.contractions import square_sum as square_sum
from jmask._ops.indexing import retain as retain
from jmask._ops.products import dot as dot
from jmask._optim import exported as _exported  # noqa: F401
from jmask._optim.adam import adam as adam
from jmask._optim.adam import adamw as adamw
from jmask._optim.adam import rowwise_adam as rowwise_adam
from jmask._optim.ema import ema as ema
from jmask._optim.explain import explain as explain
from jmask._optim.guards import clip_by_row_norm as clip_by_row_norm
from jmask._optim.guards import drop_nonfinite_rows as drop_nonfinite_rows
from jmask._optim.guards import max_row_norm as max_row_norm
from jmask._optim.guards import skip_nonfinite as skip_nonfinite
from jmask._optim.microbatches import multi_steps as multi_steps
from jmask._optim.named import adagrad as adagrad
from jmask._optim.named import ftrl as ftrl
from jmask._optim.named import rowwise_adagrad as rowwise_adagrad
from jmask._optim.named import sgd as sgd
from jmask._optim.torch_state import from_torch_state as from_torch_state
from jmask._optim.torch_state import to_torch_state as to_torch_state
from jmask._tables.packed import packed as packed
from jmask._tables.plain_arrays import from_arrays as from_arrays
from jmask._tables.plain_arrays import to_arrays as to_arrays
from jmask._tables.sharded import sharded as sharded
from jmask._tensors.conversions import cast_storage as cast_storage
from jmask._tensors.conversions import from_numpy_ma as from_numpy_ma
from jmask._tensors.conversions import to_numpy_ma as to_numpy_ma
from jmask._tensors.masked_tensor import MaskedTensor as MaskedTensor
from jmask._tensors.masked_tensor import as_masked_tensor as as_masked_tensor
from jmask._tensors.masked_tensor import masked_tensor as masked_tensor
from jmask._tensors.row_sparse import RowSparse as RowSparse
from jmask._tensors.specified import sparse_mask as sparse_mask
from jmask._tensors.specified import todense as todense
from jmask._updates.apply import apply_gradients as apply_gradients
from jmask._updates.apply import apply_updates as apply_updates
from jmask._updates.apply import densify as densify

__version__ = "0.4.0"
