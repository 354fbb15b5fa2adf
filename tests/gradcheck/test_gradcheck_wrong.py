"""Functions whose derivative rules are wrong on purpose, and what must be said of each.

Each is a right function (`right`, which a checker must accept) with a wrong rule (`wrong`,
which it must refuse). The faults are those of hand-written rules: a sign, a missing term, a
lost duplicate, a transposed product, a mask forgotten, a cotangent not used. Some are hard to
see from random projections: a single entry among large ones, a permutation, a rule that is
not linear.
"""

import itertools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import linear_call
from jax.experimental.sparse import BCOO

import jmask
import jmask.numpy as jnm  # noqa: F401 (of the table)
from tests.expressions import functions, rows
from tests.sparse_arrays import coo

pytestmark = pytest.mark.sampled(15)

X = np.array([0.5, 1.0, -1.5])
MATRIX = np.array([[1.0, 2.0, -1.0], [0.5, -2.0, 3.0], [4.0, 0.25, 1.0]])
Z = np.array([1.0 + 2.0j, -0.5 + 0.25j])
MASK = np.array([True, False, True])
MASKED = jmask.masked_tensor(np.array([0.5, np.nan, 2.0]), MASK)
STORED = coo(np.float32([0, 3, 0, 2]))
PADDED = BCOO(
    (jnp.array([3.0, 2.0, 0.0]), jnp.array([[1], [3], [4]])), shape=(4,), unique_indices=True
)
TWICE = jmask.RowSparse([2, 0, 2], jnp.array([[1.0], [2.0], [3.0]]), (3, 1))


# A function with its fault and without; `says`: a regular expression for the message.
_FIELDS = "wrong right args says masked modes order"
Wrong = namedtuple("Wrong", _FIELDS, defaults=(False, ("rev",), 1))


def with_vjp(right, pullback):
    """`right` with its reverse rule replaced: pullback(*args, cotangent) -> cotangents."""

    def cotangents(args, ct):
        result = pullback(*args, ct)
        return result if isinstance(result, tuple) else (result,)

    function = jax.custom_vjp(right)
    function.defvjp(lambda *args: (right(*args), args), cotangents)
    return function


def with_jvp(right, pushforward):
    """`right` with its rules replaced: pushforward(*args, *tangents) -> tangent."""
    function = jax.custom_jvp(right)
    function.defjvp(lambda args, tangents: (right(*args), pushforward(*args, *tangents)))
    return function


def one_mode(forward, backward):
    """The sine, its forward and reverse derivative times a factor each."""
    along = lambda cos, t: forward * cos * t
    back = lambda cos, c: backward * cos * c
    return with_jvp(jnp.sin, lambda x, t: linear_call(along, back, jnp.cos(x), t))


softmax = lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x))
product = lambda x, w: w @ x
rows_added = lambda values: jnp.zeros((3, 1)).at[jnp.array([2, 0, 2])].add(values)
# A function of a tensor by one of its stored values, of its data, of the dense array.
of_values = lambda function: lambda x: function(x.values)
of_data = lambda function: lambda x: function(x.data)
of_dense = lambda function: lambda x: function(jmask.todense(x))
kept = lambda dense: jnp.where(np.array([False, True, False, True]), dense, 0)
total_square = lambda x: jnp.sum(x**2)
huge_and_tiny = lambda x: jnp.sum(jnp.array([1e4, 1e-2, 1e4]) * x)
clipped_lookup = lambda x: jnp.take(x, jnp.array([0, 7, 1]), mode="clip")
_calls = itertools.count()
never_the_same = lambda x: x * (1 + 1e-3 * next(_calls))
FIRST, SECOND, THIRD = (rf"args\[0\], entry \({i},\)" for i in range(3))
UNSPECIFIED = FIRST + ", which is not specified"
UNDER_MASK = r"args\[0\], stored value \(1,\), which is under the mask"


def by_vjp(right, pullback, says=FIRST, args=(X,), **check):
    return Wrong(with_vjp(right, pullback), right, args, says, **check)


def by_jvp(right, pushforward, says=FIRST, **check):
    return Wrong(with_jvp(right, pushforward), right, (X,), says, modes=("fwd",), **check)


def sine(of_cotangent, says=FIRST, **check):
    pullback = lambda x, c: jnp.cos(x) * of_cotangent(c)
    return by_vjp(jnp.sin, pullback, says, **check)


# The name of a fault, and the wrong gradient that has it.
_WRONG = r"""
    sign | sine(lambda c: -c)
    factor | by_vjp(jnp.square, lambda x, c: x * c, THIRD)
    missing term | by_vjp(lambda x: x**2 + jnp.sin(x), lambda x, c: 2 * x * c)
    missing term of the other entries | by_vjp(softmax, lambda x, c: softmax(x) * c, SECOND)
    one entry | sine(lambda c: c * jnp.array([1, 0.9, 1]), SECOND)
    one small entry beside large ones |
        by_vjp(huge_and_tiny, lambda x, c: c * jnp.array([1e4, 0, 1e4]), SECOND)
    two entries exchanged | by_vjp(jnp.sin, lambda x, c: (jnp.cos(x) * c)[jnp.array([1, 0, 2])])
    transposed |
        Wrong(lambda x: with_vjp(product, lambda x, w, c: (w @ c, jnp.outer(c, x)))(x, MATRIX),
        lambda x: product(x, MATRIX), (X,), FIRST)
    cumulated the other way | by_vjp(lambda x: jnp.cumsum(x), lambda x, c: jnp.cumsum(c))
    shifted by one | by_vjp(lambda x: x[1:], lambda x, c: jnp.pad(c, (0, 1)))
    dropped where clipped | by_vjp(clipped_lookup,
        lambda x, c: jnp.zeros(3).at[jnp.array([0, 7, 1])].add(c, mode="drop"), THIRD)
    zero | Wrong(jax.lax.stop_gradient, lambda x: x, (X,), FIRST)
    rounded | by_vjp(jnp.sin, lambda x, c: jnp.round(jnp.cos(x), 1) * c, SECOND)
    nan | by_vjp(jnp.abs, lambda x, c: x / jnp.sqrt(x) / jnp.sqrt(x) * c, THIRD)
    cotangent not used | by_vjp(total_square, lambda x, c: 2 * x, THIRD)
    cotangent squared | sine(lambda c: c**2)
    cotangent clipped | sine(lambda c: jnp.clip(c, -1, 1), THIRD)
    cotangent made positive | by_vjp(total_square, lambda x, c: 2 * x * jnp.abs(c), THIRD)
    cotangent of one sign | sine(lambda c: jnp.maximum(c, -2))
    cotangent of bounded norm |
        by_vjp(total_square, lambda x, c: 2 * x * c / jnp.maximum(1, jnp.abs(c) / 100), THIRD)
    small cotangents dropped | sine(lambda c: jnp.where(jnp.abs(c) < 0.01, 0, c))
    tangent clipped | by_jvp(jnp.sin, lambda x, t: jnp.cos(x) * jnp.clip(t, -2, 2),
        r"args\[0\], a random direction \(times 1024")
    conjugate missing |
        by_vjp(jnp.conj, lambda z, c: c, r"\], imaginary part of entry \(", (Z,))
    imaginary part lost |
        by_vjp(jnp.square, lambda z, c: 2 * z.real * c, r"part of entry \(0,\)", (Z,))
    second of two arguments | by_vjp(lambda x, y: x * y**2,
        lambda x, y, c: (y**2 * c, x * y * c), r"args\[1\], entry \(1,\)", (X, X[::-1]))
    arguments exchanged |
        by_vjp(jnp.multiply, lambda x, y, c: (x * c, y * c), THIRD, (X, X[::-1] + 1))
    bias in a tree | Wrong(lambda p: with_vjp(jnp.add,
        lambda x, y, c: (c, c.sum() * jnp.ones(3)))(p["w"] * 2, p["layer"]["b"]),
        lambda p: p["w"] * 2 + p["layer"]["b"], ({"w": X, "layer": {"b": X}},),
        r"args\[0\]\['layer'\]\['b'\], entry \(0,\)")
    forward mode alone | Wrong(one_mode(0.5, 1.0), jnp.sin, (X,), FIRST, modes=("rev", "fwd"))
    reverse mode alone | Wrong(one_mode(1.0, 0.5), jnp.sin, (X,), FIRST, modes=("fwd", "rev"))
    both modes | by_jvp(jnp.exp, lambda x, t: x * jnp.exp(x) * t)
    second order, in the input |
        by_vjp(jnp.sin, lambda x, c: jax.lax.stop_gradient(jnp.cos(x)) * c, SECOND, order=2)
    second order, in the cotangent |
        sine(jax.lax.stop_gradient, r"cotangent of output, entry \(0,\)", order=2)
    second order, forward |
        by_jvp(jnp.sin, lambda x, t: jax.lax.stop_gradient(jnp.cos(x)) * t, SECOND, order=2)
    duplicates dropped | Wrong(of_values(with_vjp(rows_added,
        lambda v, c: c[jnp.array([2, 0, 2])] * jnp.array([[0.0], [1], [1]]))),
        lambda x: jmask.todense(x, masked_grad=True), (TWICE,),
        r"args\[0\], entry \(2, 0\), stored value \(0, 0\)", masked=True)
    under the mask |
        Wrong(of_data(with_vjp(lambda d: jnp.where(MASK, d, 0), lambda d, c: c.sum() + 0 * c)),
        lambda x: x.to_tensor(0), (MASKED,), FIRST, masked=True)
    under the mask alone | Wrong(
        of_data(with_vjp(lambda d: jnp.sum(jnp.where(MASK, d, 0)), lambda d, c: c + 0 * X)),
        jnm.sum, (MASKED,), UNDER_MASK, masked=True)
    nan under the mask | Wrong(lambda x: jnp.sum(jnp.where(x.mask, jnp.log(x.data), 0)),
        lambda x: jnm.sum(jnm.log(x)), (MASKED,), UNDER_MASK, masked=True)
    padding | Wrong(lambda x: jnp.sum(x.data), lambda x: jnp.sum(x.todense()), (PADDED,),
        r"args\[0\], stored value \(2,\), which is padding", masked=True)
    unspecified entries | Wrong(of_dense(with_vjp(kept, lambda x, c: c)), of_dense(kept),
        (STORED,), UNSPECIFIED, masked=True)
    plain product, checked as masked | Wrong(lambda x: jmask.todense(x) @ MATRIX.ravel()[:4],
        lambda x: x @ jnp.asarray(MATRIX.ravel()[:4]), (STORED,), UNSPECIFIED, masked=True)
    masked product, checked as plain | Wrong(lambda x: x @ jnp.asarray(MATRIX.ravel()[:4]),
        lambda x: jmask.todense(x) @ MATRIX.ravel()[:4], (STORED,), UNSPECIFIED)
    mask that changes | Wrong(lambda x: jmask.masked_tensor(x, x >= 1.0),
        lambda x: jmask.masked_tensor(x, x >= 0.9), (X,),
        r"args\[0\].* changed the mask of output, at entry \(1,\)")
    not deterministic |
        Wrong(never_the_same, lambda x: x, (X,), r"entry \(0,\) was .* and then")
"""
WRONG = {
    name: make()
    for name, code in rows(_WRONG)
    for make in functions("", globals())(code).values()
}


# The tolerance of a sum allows them, so that the fast check does.
ACCEPTED_BY_FAST = {"one small entry beside large ones"}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.dtype_promotion
def test_wrong_gradient(name):
    case = WRONG[name]
    options = {"masked": case.masked, "modes": case.modes, "order": case.order}
    for fast in (False, True):
        assert jmask.gradcheck(case.right, case.args, fast=fast, **options)
    with pytest.raises(jmask.GradcheckError, match=case.says) as caught:
        jmask.gradcheck(case.wrong, case.args, **options)
    message = str(caught.value)
    assert "to try" in message.lower()
    assert "numerical" not in message or f"masked={case.masked}" in message
    accepts = jmask.gradcheck(
        case.wrong, case.args, fast=True, raise_exception=False, **options
    )
    assert accepts == (name in ACCEPTED_BY_FAST)
