"""`gradcheck`: the gradients of a function against differences, in a stated semantics.

A function of a sparse tensor may take the entries that are not stored for zeros, which can
change and have a gradient, or for nothing at all. The two have different gradients, and a
check must say which it checks:

    x = BCOO of [[-, 1],          d(x @ x)[0, 0] / dx[0, 0]      plain 2 x[0, 0] = 0, and
                 [2, 3]]          d(x @ x)[0, 1] / dx[0, 0]      plain x[0, 1] = 1, masked 0

| semantics          | numerical side                 | analytical side                        |
|--------------------|--------------------------------|----------------------------------------|
| plain, the default | every entry moves              | the gradient at every entry            |
| masked             | specified entries move         | the same there; elsewhere exactly zero |

The analytical side runs the function on the input as it is, which carries a phantom for the
entries that are not there (see `_tensors.phantom`). Both sides run in float64 and complex128.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmask._base.validation import check_flag, check_leaves, shown
from jmask._gradcheck.fast import is_suspicious
from jmask._gradcheck.jacobian import Rules
from jmask._gradcheck.masked_function import is_masked_function
from jmask._gradcheck.message import GradcheckError, Setting
from jmask._gradcheck.premises import check_premises
from jmask._gradcheck.problem import Problem
from jmask._gradcheck.second import gradient_problem
from jmask._gradcheck.slow import find_mismatch


def gradcheck(
    fun: Callable[..., Any],
    args: Any,
    *,
    masked: bool = False,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    modes: Sequence[str] = ("rev", "fwd"),
    order: int = 1,
    fast: bool = False,
    raise_exception: bool = True,
) -> bool:
    """Check the gradients of a function against central differences.

    Args:
        fun: takes `args`, returns any pytree. It is run eagerly, in double precision; to
            check it under `jit`, pass the jitted function.
        args: a tuple of arguments, or a single one: pytrees of arrays, `MaskedTensor`, BCOO,
            BCSR and `RowSparse`, real or complex. Integers and booleans stay as they are.
        masked: the semantics. False: entries that are not specified are zeros, and every
            entry is checked. True: only specified entries exist; the gradient at all others
            must be exactly zero.
        eps: the step of the differences, times the size of an entry if that is over 1.
        atol, rtol: a derivative may differ by `atol + rtol * abs(numerical)`.
        modes: "rev" for reverse mode (vjp), "fwd" for forward mode (jvp): a name, or both
            in a tuple.
        order: 2 checks gradients of gradients too, in every mode.
        fast: compare along random directions first, and every entry only where these
            differ. The verdict is that of the slow check, unless wrong entries cancel in
            random sums or are within the rounding errors of the differences.
        raise_exception: whether to raise where the check fails, or return False.

    Returns:
        True if the gradients are right; False if not and `raise_exception` is False.

    Raises:
        GradcheckError: if a gradient is wrong, or does not exist: the function changes a
            mask of its output, is not deterministic, or cannot be differentiated in one of
            `modes`. The message names the input, the entry, and what to try.
        TypeError, ValueError: if an argument of `gradcheck` is wrong, or nothing can be
            differentiated.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> from jax.experimental.sparse import BCOO
        >>> x = BCOO.fromdense(jnp.array([[0., 1.], [2., 3.]]))
        >>> jmask.gradcheck(lambda x: x @ jnp.ones(2), x, masked=True)
        True
        >>> jmask.gradcheck(lambda x: jmask.todense(x) @ jnp.ones(2), x)
        True
        >>> jmask.gradcheck(lambda x: x @ jnp.ones(2), x, raise_exception=False)
        False

    References:
        The two semantics are those of `torch.autograd.gradcheck` for sparse inputs.
    """
    if not callable(fun):
        raise TypeError(
            f"`fun` must be a function, got {type(fun).__name__}: write "
            "jmask.gradcheck(fun, args)."
        )
    modes = _checked_modes(modes)
    _check_numbers(eps, atol, rtol, order)
    flags = {"masked": masked, "fast": fast, "raise_exception": raise_exception}
    for name, flag in flags.items():
        check_flag(name, flag)
    args = args if type(args) is tuple else (args,)
    check_leaves("args", args)

    def is_masked() -> bool:
        # Only for a message, which must not fail for a reason of its own.
        try:
            return is_masked_function(lambda args: fun(*args), args)
        except Exception:
            return True

    setting = Setting(masked, eps, atol, rtol, 1, is_masked)
    try:
        with jax.enable_x64(True):
            _check(Problem(fun, args, setting), modes, order, fast)
    except GradcheckError:
        if raise_exception:
            raise
        return False
    return True


def _check(problem: Problem, modes: Sequence[str], order: int, fast: bool) -> None:
    check_premises(problem)
    rules = Rules(problem, modes)
    if not fast or is_suspicious(rules):
        mismatch = find_mismatch(rules)
        if mismatch is not None:
            raise GradcheckError(mismatch.message(problem.setting))
    if order == 2:
        _check(gradient_problem(problem, modes), modes, 1, fast)


def _checked_modes(modes: Any) -> tuple[str, ...]:
    given = (modes,) if isinstance(modes, str) else modes
    known = isinstance(given, list | tuple) and all(
        isinstance(x, str) and x in ("rev", "fwd") for x in given
    )
    if not known or not given:
        raise ValueError(f'`modes` must be ("rev",), ("fwd",) or both, got {shown(modes)}.')
    return tuple(given)


def _check_numbers(eps: float, atol: float, rtol: float, order: int) -> None:
    for name, value in {"eps": eps, "atol": atol, "rtol": rtol}.items():
        if not isinstance(value, int | float | np.number) or isinstance(value, bool):
            raise TypeError(f"`{name}` must be a number, got {type(value).__name__}.")
        if not (np.isfinite(value) and value >= 0) or (name == "eps" and value == 0):
            raise ValueError(f"`{name}` must be a positive number, got {value!r}.")
    if isinstance(order, bool) or not isinstance(order, int) or order not in (1, 2):
        raise ValueError(f"`order` must be 1 or 2, got {shown(order)}.")
