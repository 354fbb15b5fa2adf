"""A plugin of pytest: numpy.ma's tests, each call made with `jmask.numpy` as well.

    python -m pytest -p tests.peers.numpy_ma --pyargs numpy.ma.tests.test_core

Each call of an arithmetic function or a reduction with masked arrays of numbers is made with
jmask, too. The numbers of its valid entries must be those of numpy.ma to the last digits, and
its mask the same, but where that masks what is outside the domain of a function. The test goes
on with the array of numpy.ma, as tests compare digits that two libraries need not share.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.ma.core as core

import jmask
import jmask.numpy as jnm

ELEMENTWISE = (
    "abs absolute add subtract multiply negative exp cos sin tan arctan sinh cosh tanh "
    "arcsinh fabs floor ceil equal not_equal less less_equal greater greater_equal "
    "logical_not logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor "
    "arctan2 hypot maximum minimum conjugate"
).split()
# numpy.ma masks what is outside the domain; jmask has nan or infinity there.
OF_A_DOMAIN = "sqrt log log2 log10 arccos arcsin arccosh arctanh divide true_divide".split()
METHODS = "sum prod mean var std min max ptp any all cumsum cumprod argmin argmax".split()
EXTRAS = "cov corrcoef".split()

# By words of the name of a test.
LEFT_OUT = {
    "masked_weights": "multiplies nan by False, which XLA takes for 0, in jax.numpy as well"
}
NOT_COMPARED = {
    "what it is": "no masked array among the arguments, or one with structure, text or objects",
    "how it is called": "an argument that jmask.numpy does not have: out, a subclass's own",
    "refused": "jmask refuses what numpy.ma does with a warning or an error of its own",
    "compared": "made with jmask as well",
}
counts = collections.Counter()


def compared_with_jmask(name, original, of):
    """`original`, of whose every result it is checked that jmask has it, too.

    Args:
        name: of the function in `jmask.numpy`.
        original: of numpy.ma.
        of: how many of the arguments are tensors.
    """
    ours = getattr(jnm, {"fabs": "abs"}.get(name, name))

    @functools.wraps(original)
    def call(*args, **kwargs):
        expected = original(*args, **kwargs)
        if not _are_known(args[:of]) or not any(isinstance(x, np.ma.MaskedArray) for x in args):
            counts["what it is"] += 1
            return expected
        if not _are_plain(args[of:], kwargs) or expected is np.ma.masked:
            counts["how it is called"] += 1
            return expected
        with jax.enable_x64(True):
            try:
                found = ours(*map(_tensor, args[:of]), *args[of:], **kwargs)
            except (TypeError, ValueError, NotImplementedError, IndexError):
                counts["refused"] += 1
                return expected
            _compare(found, expected, name in OF_A_DOMAIN)
        return expected

    return call


def _compare(found, expected, may_mask_more):
    valid = np.asarray(found.to_dense().mask) if isinstance(found, jmask.MaskedTensor) else True
    numbers = np.asarray(found.to_tensor(0) if isinstance(found, jmask.MaskedTensor) else found)
    mask = np.ma.getmaskarray(expected)
    assert numbers.shape == np.shape(expected), (numbers.shape, np.shape(expected))
    exists = np.broadcast_to(valid, mask.shape)
    if may_mask_more:
        assert not (~exists & ~mask).any(), "jmask masks more than numpy.ma"
    else:
        np.testing.assert_array_equal(exists, ~mask)
    data = np.ma.getdata(expected)
    if numbers.dtype.kind in "fc" and data.dtype.kind in "fc":
        digits = min(np.finfo(x.dtype).precision for x in (numbers, data))
        close = {"rtol": 10.0 ** (2 - digits), "atol": 10.0 ** (1 - digits)}
        np.testing.assert_allclose(numbers[~mask], data[~mask], **close)
    else:
        np.testing.assert_array_equal(numbers[~mask], data[~mask])
    counts["compared"] += 1


def _tensor(x):
    if isinstance(x, np.ma.MaskedArray):
        return jmask.from_numpy_ma(x)
    return jnp.asarray(x)


def _are_known(args):
    return all(np.asarray(x).dtype.kind in "biufc" and type(x) is not np.ma.mvoid for x in args)


def _are_plain(args, kwargs):
    simple = int | float | bool | tuple | type(None)
    known = {"axis", "keepdims", "ddof", "rowvar", "bias"}
    return (
        all(isinstance(x, simple) for x in args)
        and kwargs.keys() <= known
        and not any(x is np._NoValue for x in kwargs.values())
    )


class Replaced:
    """A ufunc of numpy.ma whose calls are compared, and that is itself otherwise."""

    def __init__(self, original, call):
        self.original, self.call = original, call
        self.__doc__, self.__name__ = original.__doc__, getattr(original, "__name__", "")

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.original, name)


def pytest_configure(config):
    for name in (*ELEMENTWISE, *OF_A_DOMAIN):
        original = getattr(core, name)
        of = getattr(original.f, "nin", 1) if hasattr(original, "f") else 1
        replaced = Replaced(original, compared_with_jmask(name, original, of))
        for module in (core, np.ma):
            setattr(module, name, replaced)
    for name in EXTRAS:
        function = compared_with_jmask(name, getattr(np.ma.extras, name), 1)
        for module in (np.ma.extras, np.ma):
            setattr(module, name, function)
    for name in METHODS:
        method = getattr(core.MaskedArray, name)
        setattr(core.MaskedArray, name, compared_with_jmask(name, method, 1))


def pytest_collection_modifyitems(config, items):
    left = [item for item in items if any(word in item.nodeid for word in LEFT_OUT)]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


def pytest_terminal_summary(terminalreporter):
    for word, reason in LEFT_OUT.items():
        terminalreporter.write_line(f"left out: tests with `{word}` in their name: {reason}")
    for kind, reason in NOT_COMPARED.items():
        terminalreporter.write_line(f"{counts[kind]} calls {kind}: {reason}")


def pytest_sessionfinish(session):
    if counts["compared"] < 100 and session.config.getoption("numprocesses", None) is None:
        session.exitstatus = 1
