"""Functions with the names of `jax.nn`, over the entries that exist.

    x = MaskedTensor([1, nan, 1], [T, F, T])
    softmax(x) = [0.5, --, 0.5]       relu(x) = [1, --, 1]

For a slice with no valid entry a `MaskedTensor` gives masked entries with derivative 0. An
array with `where=` gives what `torch.masked` does: nan for the softmax family, 0 for
`normalize`; in other slices the entries left out are 0 (`log_softmax`: -inf). Masked tensors
on sparse storage keep it: their slices are segments of the stored values.
"""

import jax.numpy as _jnp
from jax import nn as _nn

from jmask._ops.contractions import dot_product_attention as dot_product_attention
from jmask._ops.contractions import linear as linear
from jmask._ops.elementwise import elementwise as _elementwise
from jmask._ops.reductions import logmeanexp as logmeanexp
from jmask._ops.reductions import logsumexp as logsumexp
from jmask._ops.softmax import attention_weights as attention_weights
from jmask._ops.softmax import glu as glu
from jmask._ops.softmax import log_softmax as log_softmax
from jmask._ops.softmax import normalize as normalize
from jmask._ops.softmax import softmax as softmax
from jmask._ops.softmax import softmin as softmin
from jmask._ops.softmax import standardize as standardize

# Activations.
celu = _elementwise(_nn.celu)
elu = _elementwise(_nn.elu)
gelu = _elementwise(_nn.gelu)
hard_sigmoid = _elementwise(_nn.hard_sigmoid)
hard_silu = hard_swish = _elementwise(_nn.hard_silu)
hard_tanh = _elementwise(_nn.hard_tanh)
leaky_relu = _elementwise(_nn.leaky_relu)
log_sigmoid = _elementwise(_nn.log_sigmoid)
mish = _elementwise(_nn.mish)
relu = _elementwise(_nn.relu)
relu6 = _elementwise(_nn.relu6)
selu = _elementwise(_nn.selu)
sigmoid = _elementwise(_nn.sigmoid)
silu = swish = _elementwise(_nn.silu)
soft_sign = _elementwise(_nn.soft_sign)
softplus = _elementwise(_nn.softplus)
squareplus = _elementwise(_nn.squareplus)
tanh = _elementwise(_jnp.tanh)
