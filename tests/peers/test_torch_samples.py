"""The samples of torch's OpInfo: operators of jmask with the same name, on the same inputs.

Elementwise operators run on a `MaskedTensor` with a random mask: valid entries are torch's.
Operators of `torch.masked` come with masks of their own.

Left out are variants of an operator under another name, samples with keywords (`clamp(min=)`),
which are spelled otherwise in JAX, and of `torch.masked` those with sparse masks.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
import jmask.nn as jnn
import jmask.numpy as jnm
from tests.torch_names import name_here

pytestmark = [
    pytest.mark.needs(what="expecttest"),
    pytest.mark.rank_promotion,
    pytest.mark.dtype_promotion,
]

# By the name of torch, where that differs.
NAMES = {
    "nn.functional.silu": "silu",
    "nn.functional.softplus": "softplus",
    "nn.functional.relu": "relu",
    "nn.functional.logsigmoid": "log_sigmoid",
    "special.i0e": "i0e",
}
# torch.masked: what it is called here.
MASKED = {
    "sum": jnm.sum, "prod": jnm.prod, "amax": jnm.max, "amin": jnm.min, "mean": jnm.mean,
    "logsumexp": jnn.logsumexp, "softmax": jnn.softmax, "log_softmax": jnn.log_softmax,
    "softmin": jnn.softmin,
}  # fmt: skip


def op_infos():
    with warnings.catch_warnings(action="ignore"):
        from torch.testing._internal import common_methods_invocations as invocations
        from torch.testing._internal import opinfo
    return invocations.op_db, opinfo.core


def elementwise():
    import torch

    op_db, core = op_infos()
    for op in op_db:
        name = NAMES.get(op.name, name_here(op.name.removeprefix("special.")))
        ours = getattr(jnn, name, None) if "functional" in op.name else getattr(jnm, name, None)
        is_one = isinstance(op, core.UnaryUfuncInfo | core.BinaryUfuncInfo)
        is_same = callable(ours) and not op.variant_test_name
        if is_one and is_same and torch.float64 in op.dtypes:
            yield op, ours


def test_elementwise():
    import torch

    rng, compared = np.random.default_rng(0), {}
    with jax.enable_x64(True):
        for op, ours in elementwise():
            for sample in op.sample_inputs("cpu", torch.float64, requires_grad=False):
                if sample.kwargs or not all(isinstance(x, torch.Tensor) for x in sample.args):
                    continue
                expected = op(sample.input, *sample.args).numpy()
                mask = rng.random(tuple(sample.input.shape)) < 0.7
                x = jmask.masked_tensor(jnp.asarray(sample.input.numpy()), mask)
                y = ours(x, *(jnp.asarray(a.numpy()) for a in sample.args))
                valid = np.asarray(y.mask)
                np.testing.assert_array_equal(valid, np.broadcast_to(mask, expected.shape))
                np.testing.assert_allclose(
                    np.asarray(y.to_tensor(0))[valid],
                    expected[valid],
                    rtol=1e-6,
                    atol=1e-9,
                    err_msg=op.name,
                )
                compared[op.name] = compared.get(op.name, 0) + 1
    assert len(compared) > 50, sorted(compared)


@pytest.mark.parametrize("name", MASKED)
def test_masked(name):
    import torch

    op_db, _ = op_infos()
    (op,) = [op for op in op_db if op.name == f"masked.{name}"]
    compared = 0
    with jax.enable_x64(True):
        for sample in op.sample_inputs("cpu", torch.float64, requires_grad=False):
            kwargs = dict(sample.kwargs)
            mask = kwargs.get("mask")
            known = kwargs.keys() <= {"mask", "dim", "keepdim"}
            if (
                mask is None
                or mask.layout != torch.strided
                or not known
                or not sample.input.ndim
            ):
                continue
            axis = sample.args[0] if sample.args else kwargs.get("dim")
            if isinstance(axis, list | tuple):
                axis = tuple(axis)
            if axis == ():
                continue
            where = np.broadcast_to(mask.numpy(), tuple(sample.input.shape))
            x = jmask.masked_tensor(jnp.asarray(sample.input.numpy()), where)
            how = {"keepdims": True} if kwargs.get("keepdim") else {}
            expected = op(sample.input, *sample.args, **sample.kwargs).numpy()
            found = MASKED[name](x, axis=axis, **how)
            valid = np.asarray(found.mask)
            np.testing.assert_allclose(
                np.asarray(found.to_tensor(0))[valid], expected[valid], rtol=1e-9
            )
            compared += 1
    assert compared, "no sample was compared"
