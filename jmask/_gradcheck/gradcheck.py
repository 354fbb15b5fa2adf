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

The analytical side runs the function on the input as it is, which carries a placeholder for the
entries that are not stored (see `_tensors.specified`). Both sides run in float64 and
complex128.

Order 2 checks the gradient as a function of its own:

    f(x) = sum(x ** 3)        gradient(x, c) = c * 3 x ** 2, for a cotangent c
                              its derivatives: 6 c x in x, 3 x ** 2 in c

The gradient is read at the entries of the tensors: at every entry in plain semantics, at the
specified ones in masked semantics, where it is zero elsewhere by the check of order 1.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.types import Function, KeyPath, PyTree, TensorLike
from jmask._base.validation import check_flag, check_leaves, shown
from jmask._gradcheck.entries import Parts, primal, random_reals, stored_positions
from jmask._gradcheck.jacobian import Rules, find_mismatch, is_suspicious
from jmask._gradcheck.message import GradcheckError, Setting
from jmask._gradcheck.problem import Problem, check_premises, is_masked_function
from jmask._tensors.masked_tensor import is_tensor


def gradcheck(
    fun: Function,
    args: PyTree,
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


def _checked_modes(modes: str | Sequence[str]) -> tuple[str, ...]:
    names = (modes,) if isinstance(modes, str) else modes
    known = isinstance(names, list | tuple) and all(
        isinstance(x, str) and x in ("rev", "fwd") for x in names
    )
    if not known or not names:
        raise ValueError(f'`modes` must be ("rev",), ("fwd",) or both, got {shown(modes)}.')
    return tuple(names)


def _check_numbers(eps: float, atol: float, rtol: float, order: int) -> None:
    for name, value in {"eps": eps, "atol": atol, "rtol": rtol}.items():
        if not isinstance(value, int | float | np.number) or isinstance(value, bool):
            raise TypeError(f"`{name}` must be a number, got {type(value).__name__}.")
        if not (np.isfinite(value) and value >= 0) or (name == "eps" and value == 0):
            raise ValueError(f"`{name}` must be a positive number, got {value!r}.")
    if isinstance(order, bool) or not isinstance(order, int) or order not in (1, 2):
        raise ValueError(f"`order` must be 1 or 2, got {shown(order)}.")


# --- gradients of gradients --------------------------------------------------------------


def gradient_problem(problem: Problem, modes: Sequence[str]) -> Problem:
    """Return the gradient of a checked problem, by reverse mode if that is among the modes."""
    rng, is_reverse = np.random.default_rng(1), "rev" in modes
    outputs, inputs = ([x.path for x in leaves] for leaves in (problem.outputs, problem.inputs))
    if is_reverse:
        vectors = problem.cotangents(random_reals(rng, problem.base.shape))
        what, along, of = "cotangent of ", outputs, [f"gradient of {path}" for path in inputs]
    else:
        vectors = []
        for x in problem.inputs:
            shape = tuple(np.shape(x.tensor))
            reals = random_reals(rng, (math.prod(shape) * x.parts,))
            vectors.append(jnp.asarray(reals.view(x.values.dtype).reshape(shape)))
        what, along, of = "tangent of ", inputs, [f"tangent of {path}" for path in outputs]

    def gradient_of(args: PyTree, vectors: Sequence[jax.Array]) -> dict[str, jax.Array]:
        leaves = jax.tree.leaves(args, is_leaf=is_tensor)
        tensors = [leaves[number] for number in problem.numbers]

        def function(steps: Sequence[jax.Array]) -> list[jax.Array]:
            pairs = zip(tensors, steps, strict=True)
            return problem.smooth(tensors, [_moved(problem, *pair) for pair in pairs])

        zeros = [jnp.zeros(tuple(np.shape(x)), x.dtype) for x in tensors]
        if is_reverse:
            _, transposed = jax.vjp(function, zeros)
            (results,) = transposed(list(vectors))
        else:
            _, results = jax.jvp(function, (zeros,), (list(vectors),))
        return dict(zip(of, results, strict=True))

    def name(path: KeyPath) -> str:
        if path[0].idx == 0:
            return f"args{jax.tree_util.keystr(path[1:])}"
        return what + along[path[1].idx]

    setting = dataclasses.replace(problem.setting, order=problem.setting.order + 1)
    return Problem(gradient_of, (problem.args, vectors), setting, name)


def _moved(problem: Problem, x: TensorLike, step: jax.Array) -> Parts:
    """Return what is differentiated of an input, its entries moved by the dense `step`."""
    values, placeholder = primal(x, problem.with_placeholders)
    if not is_tensor(x):
        return values + step, None
    # An entry that is stored twice moves where it is stored first.
    entries, first = np.unique(stored_positions(x), return_index=True)
    entries, first = entries[entries >= 0], first[entries >= 0]
    values = values.ravel().at[first].add(step.ravel()[entries]).reshape(values.shape)
    if placeholder is None:
        return values, None
    counts = np.full(step.shape, not problem.setting.masked)
    counts.ravel()[entries] = False
    return values, placeholder + jnp.where(counts, step, 0)
