"""`gradcheck`: the gradients of a function against differences, in a stated semantics.

A function of a sparse tensor may take the entries that are not stored for zeros, which can
change and have a gradient, or for nothing at all. The two have different gradients, and a
check must say which it checks:

    x = BCOO of [[-, 1],          d(x @ x)[0, 0] / dx[0, 0]      plain 2 x[0, 0] = 0, and
                 [2, 3]]          d(x @ x)[0, 1] / dx[0, 0]      plain x[0, 1] = 1, masked 0

The function becomes one of real vectors: a chart maps a vector to its arguments, and its
results are read as a vector (see `chart`). Its Jacobian (inputs, outputs) is computed twice:

    f(x) = x0 * x1 at (2, 3)      numerical  [[3], [2]]     (f(2 + h, 3) - f(2 - h, 3)) / 2h = 3
                                  reverse    [[3], [2]]     pullback(1) = (3, 2)
                                  forward    [[3], [2]]     jvp along (1, 0) = 3, (0, 1) = 2

An entry that is not stored is moved numerically in a tensor that stores every entry; JAX sees
it by a placeholder (see `_tensors.specified`). The fast check compares combinations of the
Jacobian along random directions. Order 2 is the check of the vjp (x, cotangent) -> gradient as
a function, or of the jvp.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.types import Function, HostArray, PyTree, Tensor
from jmask._base.validation import check_flag, check_leaves, shown
from jmask._gradcheck.chart import Chart, Leaf, Outputs, blocks
from jmask._gradcheck.message import Coordinate, GradcheckError, Setting
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor

# Positive and negative, large and small. Powers of two: a right rule is rounded alike.
MULTIPLES = (1.0, -1.0, 2.0**10, -(2.0**10), 2.0**-10, -(2.0**-10))


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
        fast: compare along one random direction of each input, in place of every entry. It
            takes a few evaluations whatever the size of the arguments, names no entry, and
            misses faults that the tolerance of a sum allows.
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
    modes = (modes,) if isinstance(modes, str) else modes
    is_list = isinstance(modes, list | tuple) and len(modes) > 0
    if not is_list or not all(isinstance(x, str) and x in ("rev", "fwd") for x in modes):
        raise ValueError(f'`modes` must be ("rev",), ("fwd",) or both, got {shown(modes)}.')
    for name, value in {"eps": eps, "atol": atol, "rtol": rtol}.items():
        if not isinstance(value, int | float | np.number) or isinstance(value, bool):
            raise TypeError(f"`{name}` must be a number, got {type(value).__name__}.")
        if not (np.isfinite(value) and value >= 0) or (name == "eps" and value == 0):
            raise ValueError(f"`{name}` must be a positive number, got {value!r}.")
    if isinstance(order, bool) or not isinstance(order, int) or order not in (1, 2):
        raise ValueError(f"`order` must be 1 or 2, got {shown(order)}.")
    flags = {"masked": masked, "fast": fast, "raise_exception": raise_exception}
    for name, flag in flags.items():
        check_flag(name, flag)
    args = args if type(args) is tuple else (args,)
    check_leaves("args", args)

    try:
        with jax.enable_x64(True):
            chart, setting = Chart(args, "args"), Setting(masked, eps, atol, rtol)
            run = lambda build, point: fun(*chart.arguments(build, point))
            problem = Problem(run, chart.point, chart.coordinates, setting)
            smooth = _check(problem, modes, fast)
            if order == 2:
                gradient = _gradient_problem(problem, smooth, is_reverse="rev" in modes)
                _check(gradient, modes, fast)
    except GradcheckError:
        if raise_exception:
            raise
        return False
    return True


# --- the function of real vectors --------------------------------------------------------


class Problem:
    """A function of a real vector, to be differentiated at a point.

    Attributes:
        run: run(build, point) is its result, with arguments as a method of `Leaf` builds them.
        inputs, outputs: the coordinates of the point and of the result, in words.
        scales: the size of each coordinate of the point, but at least 1.
    """

    def __init__(
        self, run: Function, point: HostArray, inputs: list[Coordinate], setting: Setting
    ):
        self.run, self.point, self.inputs, self.setting = run, point, inputs, setting
        self._outputs = Outputs(run(Leaf.at, point), setting)
        self.outputs = self._outputs.coordinates
        self.scales = np.where(np.isfinite(point), np.maximum(1, np.abs(point)), 1)

    def near(self, point: HostArray, what: str, build: Function = Leaf.near) -> HostArray:
        """Return the value for differences; `what` is what the step is called in errors."""
        return self._outputs.checked(self.run(build, point), what)

    def smooth(self, build: Function, point: jax.Array) -> jax.Array:
        """Return the value for JAX to differentiate."""
        return self._outputs.vector(self.run(build, point))

    def vanishes(self, kind: str) -> bool:
        """Decide whether derivatives along coordinates of this kind must be zero."""
        return kind == "hidden" or (self.setting.masked and kind == "unspecified")


def _gradient_problem(problem: Problem, smooth: Function, is_reverse: bool) -> Problem:
    """Return the vjp of a checked function, or its jvp, as a function of point and vector."""
    renamed = lambda what, names: [x._replace(path=f"{what} of {x.path}") for x in names]
    if is_reverse:
        vector = renamed("cotangent", problem.outputs)
        outputs = renamed("gradient", problem.inputs)
        gradient = lambda x, c: jax.vjp(smooth, x)[1](c)[0]
    else:
        vector = renamed("tangent", problem.inputs)
        outputs = renamed("tangent", problem.outputs)
        gradient = lambda x, t: jax.jvp(smooth, (x,), (t,))[1]
    point = np.concatenate([problem.point, _random(np.random.default_rng(1), len(vector))])
    run = lambda build, p: gradient(*jnp.split(jnp.asarray(p), [problem.point.size]))
    setting = dataclasses.replace(problem.setting, order=2)
    result = Problem(run, point, problem.inputs + vector, setting)
    result.outputs = outputs
    return result


def _check_premises(problem: Problem) -> None:
    """Check that the function has one value, no nan, and takes stored zeros for zeros."""
    what = "running the function again"
    here, again = (problem.near(problem.point, what) for _ in range(2))
    for at in np.flatnonzero((here != again) & ~(np.isnan(here) & np.isnan(again))):
        raise GradcheckError(
            f"{problem.outputs[at]} was {here[at]:.9g} and then {again[at]:.9g} for the same "
            "input: the function is not deterministic. To try: fix its random key or state."
        )
    for at in np.flatnonzero(np.isnan(here)):
        raise GradcheckError(
            f"{problem.outputs[at]} is nan at the given input, so it has no derivative there. "
            "To try: an input at which the function is defined."
        )
    if problem.setting.masked or all(x.kind != "unspecified" for x in problem.inputs):
        return
    what, advice = "storing zeros at unspecified entries", problem.setting.fields("mask")
    try:
        stored = problem.near(problem.point, what, Leaf.with_every_entry)
    except GradcheckError:
        raise
    except Exception as reason:
        raise GradcheckError(
            f"{what} made the function raise {type(reason).__name__}: {reason}\n{advice}"
        ) from reason
    for at in np.flatnonzero(~np.isclose(here, stored, rtol=1e-9, atol=1e-9)):
        raise GradcheckError(
            f"{what} changed {problem.outputs[at]} from {here[at]:.9g} to {stored[at]:.9g}: "
            f"the function tells an unspecified entry from a zero.\n{advice}"
        )


# --- its derivatives ---------------------------------------------------------------------


def _random(rng: np.random.Generator, size: int) -> HostArray:
    """Numbers of random sign whose sizes are between 0.5 and 1.5: none is lost in a sum."""
    return rng.choice([-1.0, 1.0], size) * rng.uniform(0.5, 1.5, size)


def _differences(
    problem: Problem, names: Sequence[Coordinate], directions: HostArray
) -> HostArray:
    """Return the derivatives along directions by differences; 0 where they must be."""
    derivatives = np.zeros((len(directions), len(problem.outputs)))
    for row, name, direction in zip(derivatives, names, directions, strict=True):
        if problem.vanishes(name.kind):
            continue
        moves = direction != 0
        h = problem.setting.eps * np.min(problem.scales[moves] / np.abs(direction[moves]))
        up, down = (
            problem.near(problem.point + step * direction, f"a step in {name}")
            for step in (h, -h)
        )
        with np.errstate(invalid="ignore"):  # 0 where both are the same infinity
            row[:] = np.where(up == down, 0, up - down) / (2 * h)
    return derivatives


def _rules(problem: Problem, modes: Sequence[str]) -> tuple[Function, dict[str, Function]]:
    """Return the function that JAX differentiates, and its derivative rule in each mode."""
    # A rule of the function (custom_vjp) may insist on the structure of its arguments. Then it
    # has no gradient at entries that are not there, and needs no placeholders.
    for build in (Leaf.with_placeholder, Leaf.at):
        smooth, rules = functools.partial(problem.smooth, build), {}
        try:
            for mode in modes:
                rules[mode] = _rule(problem, smooth, mode)
            return smooth, rules
        except Exception as error:
            failed, reason = mode, error
    raise problem.setting.unsupported(failed, reason) from reason


def _rule(problem: Problem, smooth: Function, mode: str) -> Function:
    """Return what takes cotangents (n, outputs) to (n, inputs), or tangents the other way."""
    point, sizes = jnp.asarray(problem.point), (len(problem.inputs), len(problem.outputs))
    if mode == "rev":
        _, pullback = jax.vjp(smooth, point)
        along, sizes = lambda cotangent: pullback(cotangent)[0], sizes[::-1]
    else:
        _, along = jax.linearize(smooth, point)
    along(jnp.zeros(sizes[0]))  # custom rules are called here first, and may raise
    rule = lambda rows: [along(jnp.asarray(row)) for row in rows]
    return lambda rows: np.reshape(rule(rows), (len(rows), sizes[1]))


# --- their comparison --------------------------------------------------------------------


def _check(problem: Problem, modes: Sequence[str], fast: bool) -> Function:
    """Check a function, and return it in the form that JAX differentiates."""
    _check_premises(problem)
    smooth, rules = _rules(problem, modes)
    inputs, outputs = problem.inputs, problem.outputs
    # Random directions: one of each block of inputs, and one of all outputs.
    rng, members = np.random.default_rng(0), blocks(inputs)
    weights = _random(rng, len(outputs))
    steps = np.zeros((len(members), len(inputs)))
    for row, at in zip(steps, members, strict=True):
        row[at] = problem.scales[at] * _random(rng, at.size)
    random_inputs = [inputs[at[0]]._replace(entry="a random direction") for at in members]
    random_output = Coordinate("all outputs", "specified", "at random")

    read, directions = (random_inputs, steps) if fast else (inputs, np.eye(len(inputs)))
    differences = _differences(problem, read, directions)
    for mode, rule in rules.items():
        is_reverse, expected = mode == "rev", differences
        if not fast:
            jacobian = rule(np.eye(len(outputs))).T if is_reverse else rule(directions)
            _compare(problem, mode, inputs, outputs, differences, jacobian)
            expected = jacobian if is_reverse else steps @ jacobian
        # A rule may be right along each coordinate, and wrong along combinations and multiples.
        for by in MULTIPLES:
            times = "" if by == 1 else f" (times {by:g}, and divided by it)"
            renamed = lambda x, times=times: x._replace(entry=x.entry + times)
            advice = "" if fast and by == 1 else "not linear"
            if is_reverse:
                (gradient,) = rule(by * weights[None]) / by
                sums, gradient = expected @ weights, directions @ gradient if fast else gradient
                names = [renamed(random_output)]
                _compare(problem, mode, read, names, sums[:, None], gradient[:, None], advice)
            else:
                names, tangents = list(map(renamed, random_inputs)), rule(by * steps) / by
                _compare(problem, mode, names, outputs, expected, tangents, advice)
    return smooth


def _compare(
    problem: Problem,
    mode: str,
    inputs: Sequence[Coordinate],
    outputs: Sequence[Coordinate],
    numerical: HostArray,
    analytical: HostArray,
    advice: str = "",
) -> None:
    """Raise the error of the worst derivative of the first block that has a wrong one."""
    allowed = problem.setting.atol + problem.setting.rtol * np.abs(numerical)
    allowed[[problem.vanishes(x.kind) for x in inputs]] = 0
    with np.errstate(invalid="ignore"):
        excess = np.abs(analytical - numerical) - allowed
    excess[np.isnan(excess)] = np.inf
    for block in itertools.product(blocks(inputs), blocks(outputs)):
        part = excess[np.ix_(*block)]
        if (part > 0).any():
            # The first of the worst: rounding would decide which of several equal ones.
            worst = np.unravel_index(np.argmax(part >= 0.99 * part.max()), part.shape)
            at = block[0][worst[0]], block[1][worst[1]]
            names, values = (inputs[at[0]], outputs[at[1]]), (numerical[at], analytical[at])
            raise problem.setting.mismatch(mode, names, values, part, advice or names[0].kind)


# --- masked functions --------------------------------------------------------------------


def is_masked_function(fun: Function, x: PyTree) -> bool:
    """Decide by trying whether f(x + dx) = f(sparse_mask(x + dx, x)) for small dx.

    A `MaskedTensor` keeps its mask in x + dx: dx moves the values under it, and the zeros that
    `todense` reads there. A sparse x + dx stores every entry. So a product `x @ y` of a sparse
    x is no masked function, although its gradient in JAX has entries where x has: it takes
    stored zeros for no entries. After `sparse_mask` it is one.

    Args:
        fun: takes `x`, returns any pytree.
        x: a sparse or masked tensor, or a pytree with some; floating or complex.

    Returns:
        False if a random dx of size 0.01 or 0.0001 shows a difference. Entries that do not
        exist in either result are not compared.

    Raises:
        ValueError: if `x` or the result holds no floating or complex numbers.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> from jax.experimental.sparse import BCOO
        >>> x = BCOO.fromdense(jnp.array([[0., 1.], [2., 3.]]))
        >>> jmask.is_masked_function(lambda y: y @ jnp.ones(2), x)
        False
        >>> jmask.is_masked_function(lambda y: jmask.sparse_mask(y, x) @ jnp.ones(2), x)
        True

    References:
        Nikita Vedeneev's definition in pytorch/pytorch#95405.
    """
    if not callable(fun):
        raise TypeError(
            f"`fun` must be a function, got {shown(fun)}: write "
            "jmask.is_masked_function(fun, x)."
        )
    check_leaves("x", x)

    def with_other_entries(leaf: Leaf, point: HostArray) -> Tensor:
        if isinstance(leaf.tensor, MaskedTensor):
            return leaf.with_placeholder(point)
        return leaf.with_every_entry(point) if is_tensor(leaf.tensor) else leaf.at(point)

    with jax.enable_x64(True):
        chart, setting = Chart((x,), "x"), Setting(False, 1.0, 0.0, 0.0)
        kinds = np.array([c.kind for c in chart.coordinates])
        rng = np.random.default_rng(0)
        for size in (1e-2, 1e-2, 1e-4, 1e-4):
            steps = size * _random(rng, kinds.size)
            # Values under a mask are replaced: they may be nan, and stay so in a sum.
            near = np.where(kinds == "hidden", steps, chart.point + steps)
            masked = np.where(kinds == "specified", near, chart.point)
            result = fun(*chart.arguments(Leaf.at, masked))
            outputs = Outputs(result, setting)
            expected = np.asarray(outputs.vector(result))
            try:
                result = fun(*chart.arguments(with_other_entries, near))
                moved = outputs.checked(result, "moving other entries")
            except GradcheckError:
                return False
            scale = np.max(np.abs(expected), initial=1, where=np.isfinite(expected))
            if not np.allclose(moved, expected, rtol=1e-11, atol=1e-12 * scale, equal_nan=True):
                return False
    return True
