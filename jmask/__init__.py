"""Sparse and masked tensors for JAX."""

from jmask import nn as nn
from jmask import numpy as numpy
from jmask import tree as tree
from jmask._adagrad import adagrad as adagrad
from jmask._adagrad import rowwise_adagrad as rowwise_adagrad
from jmask._adam import adam as adam
from jmask._adam import rowwise_adam as rowwise_adam
from jmask._apply import apply_gradients as apply_gradients
from jmask._apply import apply_updates as apply_updates
from jmask._apply import densify as densify
from jmask._cast_storage import cast_storage as cast_storage
from jmask._fallback import StorageFallbackWarning as StorageFallbackWarning
from jmask._fallback import strict as strict
from jmask._ftrl import ftrl as ftrl
from jmask._lazy import lazy as lazy
from jmask._masked_storage import from_numpy_ma as from_numpy_ma
from jmask._masked_storage import to_numpy_ma as to_numpy_ma
from jmask._masked_tensor import MaskedTensor as MaskedTensor
from jmask._masked_tensor import as_masked_tensor as as_masked_tensor
from jmask._masked_tensor import masked_tensor as masked_tensor
from jmask._npz import load_npz as load_npz
from jmask._npz import save_npz as save_npz
from jmask._plain_arrays import from_arrays as from_arrays
from jmask._plain_arrays import to_arrays as to_arrays
from jmask._row_operations import add_n as add_n
from jmask._row_operations import retain as retain
from jmask._row_operations import square_sum as square_sum
from jmask._row_sparse import RowSparse as RowSparse
from jmask._sgd import sgd as sgd
from jmask._value_and_grad import grad as grad
from jmask._value_and_grad import value_and_grad as value_and_grad

__version__ = "0.1.0"
