"""`gradcheck`: the gradients of a function against differences, in a stated semantics.

In plain semantics the entries that are not stored are zeros, which have a gradient; in masked
semantics they do not exist. The two have different gradients:

    x = BCOO of [[-, 1],          d(x @ x)[0, 0] / dx[0, 0]      plain 2 x[0, 0] = 0, and
                 [2, 3]]          d(x @ x)[0, 1] / dx[0, 0]      plain x[0, 1] = 1, masked 0

The Jacobian (inputs, outputs) is computed by differences and by JAX's rules, vjp and jvp. An
entry that is not stored is moved numerically in a tensor that stores every entry; JAX sees it
by a placeholder (see `_tensors.specified`).
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
from jmask._gradcheck.chart import Chart, Coordinate, Leaf, Problem
from jmask._gradcheck.message import GradcheckError, Setting
from jmask._tensors.masked_tensor import MaskedTensor

# Positive and negative, large and small. Powers of two: a right rule is rounded alike.
MULTIPLES = (1.0, -1.0, 2.0**10, -(2.0**10), 2.0**-10, -(2.0**-10))

_KINDS = {
    "specified": "the entries",
    "unspecified": "entries that are not specified",
    "hidden": "stored values that are no entries",
}


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
        modes: "rev" for reverse mode (vjp), "fwd" for forward mode (jvp), or both.
        order: 2 checks gradients of gradients too, in every mode.
        fast: compare along one random direction of each input, in place of every entry: a
            few evaluations, which miss faults that the tolerance of a sum allows.
        raise_exception: whether to raise where the check fails, or return False.

    Returns:
        True if the gradients are right; False if not and `raise_exception` is False.

    Raises:
        GradcheckError: if a gradient is wrong, or does not exist: the function changes a
            mask of its output, is not deterministic, or JAX cannot differentiate it.
        TypeError, ValueError: if an argument is wrong, or nothing is differentiable.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> from jax.experimental.sparse import BCOO
        >>> x = BCOO.fromdense(jnp.array([[0., 1.], [2., 3.]]))
        >>> jmask.gradcheck(lambda x: x @ jnp.ones(2), x, masked=True)
        True
        >>> jmask.gradcheck(lambda x: x @ jnp.ones(2), x, raise_exception=False)
        False

    References:
        `torch.autograd.gradcheck` has the same two semantics for sparse inputs.
    """
    _check_function("gradcheck(fun, args)", fun)
    modes = (modes,) if isinstance(modes, str) else modes
    are_names = isinstance(modes, list | tuple) and all(isinstance(x, str) for x in modes)
    if not are_names or set(modes) not in ({"rev"}, {"fwd"}, {"rev", "fwd"}):
        raise ValueError(f'`modes` must be ("rev",), ("fwd",) or both, got {shown(modes)}.')
    for name, value in {"eps": eps, "atol": atol, "rtol": rtol}.items():
        if not isinstance(value, int | float | np.number) or isinstance(value, bool):
            raise TypeError(f"`{name}` must be a number, got {type(value).__name__}.")
        if not (np.isfinite(value) and value >= 0) or (name == "eps" and value == 0):
            raise ValueError(f"`{name}` must be a positive number, got {value!r}.")
    if type(order) is not int or order not in (1, 2):
        raise ValueError(f"`order` must be 1 or 2, got {shown(order)}.")
    check_flag("masked", masked)
    check_flag("fast", fast)
    check_flag("raise_exception", raise_exception)
    args = args if type(args) is tuple else (args,)
    check_leaves("args", args)

    try:
        with jax.enable_x64(True):
            chart, setting = Chart(args, "args"), Setting(masked, eps, atol, rtol)
            run = lambda build, point: fun(*chart.arguments(build, point))
            problem = Problem(run, chart.point, chart.coordinates, setting)
            smooth = _check(problem, modes, fast)
            if order == 2:
                _check(_gradient_problem(problem, smooth, "rev" in modes), modes, fast)
    except GradcheckError:
        if raise_exception:
            raise
        return False
    return True


def _check_function(call: str, fun: object) -> None:
    if not callable(fun):
        raise TypeError(f"`fun` must be a function, got {shown(fun)}: write jmask.{call}.")


def _gradient_problem(problem: Problem, smooth: Function, is_reverse: bool) -> Problem:
    """Return the vjp of a checked function, or its jvp, as a function of point and vector."""
    renamed = lambda what, names: [x._replace(path=f"{what} of {x.path}") for x in names]
    outputs, inputs = problem.outputs, problem.inputs
    if is_reverse:
        vector, outputs = renamed("cotangent", outputs), renamed("gradient", inputs)
        gradient = lambda x, c: jax.vjp(smooth, x)[1](c)[0]
    else:
        vector, outputs = renamed("tangent", inputs), renamed("tangent", outputs)
        gradient = lambda x, t: jax.jvp(smooth, (x,), (t,))[1]
    point = np.concatenate([problem.point, _random(np.random.default_rng(1), len(vector))])
    run = lambda build, p: gradient(*jnp.split(jnp.asarray(p), [problem.point.size]))
    setting = dataclasses.replace(problem.setting, order=2)
    result = Problem(run, point, problem.inputs + vector, setting)
    result.outputs = outputs
    return result


def _check_premises(problem: Problem) -> None:
    """Check that the function has one value, no nan, and takes stored zeros for zeros."""
    here, error = problem.value, problem.setting.error
    for at in np.flatnonzero(np.isnan(here)):
        raise error(
            f"{problem.outputs[at]} is nan at the given input, so it has no derivative there.",
            "an input at which the function is defined",
        )
    again = problem.near(problem.point, "running the function again")
    for at in np.flatnonzero(here != again):
        raise error(
            f"{problem.outputs[at]} was {here[at]:.9g} and then {again[at]:.9g} for the same "
            "input: the function is not deterministic.",
            "fix its random key or state",
        )
    if problem.setting.masked or all(x.kind != "unspecified" for x in problem.inputs):
        return
    what = "storing zeros at unspecified entries"
    try:
        stored = problem.near(problem.point, what, Leaf.with_every_entry)
    except GradcheckError:
        raise
    except Exception as reason:
        text = f"{what} made the function raise {type(reason).__name__}: {reason}"
        raise error(text, "mask") from reason
    for at in np.flatnonzero(~np.isclose(here, stored, rtol=1e-9, atol=1e-9)):
        raise error(
            f"{what} changed {problem.outputs[at]} from {here[at]:.9g} to {stored[at]:.9g}: "
            "the function tells an unspecified entry from a zero.",
            "mask",
        )


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
        step = f"a step in {name}"
        up, down = (problem.near(problem.point + x * direction, step) for x in (h, -h))
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
    text = str(reason).strip().partition("\n")[0]
    other = {"rev": "fwd", "fwd": "rev"}[failed]
    raise problem.setting.error(
        f"JAX cannot differentiate the function in this mode ({type(reason).__name__}: {text})",
        f"modes=({other!r},) to check the other mode alone",
        failed,
    ) from reason


def _rule(problem: Problem, smooth: Function, mode: str) -> Function:
    """Return the map of cotangents (n, outputs) to (inputs, n), or tangents to (n, outputs)."""
    point, sizes = jnp.asarray(problem.point), (len(problem.inputs), len(problem.outputs))
    if mode == "rev":
        _, pullback = jax.vjp(smooth, point)
        along, sizes = lambda cotangent: pullback(cotangent)[0], sizes[::-1]
    else:
        _, along = jax.linearize(smooth, point)
    along(jnp.zeros(sizes[0]))  # custom rules are called here first, and may raise

    each = lambda rows: [along(jnp.asarray(row)) for row in rows]
    matrix = lambda rows: np.reshape(each(rows), (len(rows), sizes[1]))
    return (lambda rows: matrix(rows).T) if mode == "rev" else matrix


def _check(problem: Problem, modes: Sequence[str], fast: bool) -> Function:
    """Check a function, and return it in the form that JAX differentiates."""
    _check_premises(problem)
    smooth, rules = _rules(problem, modes)
    inputs, outputs = problem.inputs, problem.outputs
    # Random directions: one of each block of inputs, and one of all outputs.
    rng, members = np.random.default_rng(0), blocks(inputs)
    weights = _random(rng, len(outputs))[None]
    steps = np.zeros((len(members), len(inputs)))
    for row, at in zip(steps, members, strict=True):
        row[at] = problem.scales[at] * _random(rng, at.size)
    random_inputs = [inputs[at[0]]._replace(entry="a random direction") for at in members]
    random_output = [Coordinate("all outputs", "specified", "at random")]

    read, directions = (random_inputs, steps) if fast else (inputs, np.eye(len(inputs)))
    differences = _differences(problem, read, directions)
    for mode, rule in rules.items():
        is_reverse, jacobian = mode == "rev", differences
        if not fast:
            jacobian = rule(np.eye(len(outputs) if is_reverse else len(inputs)))
            _compare(problem, mode, inputs, outputs, differences, jacobian)
        if is_reverse:
            vectors, names, numerical = weights, (read, random_output), jacobian @ weights.T
        else:
            vectors, names = steps, (random_inputs, outputs)
            numerical = jacobian if fast else steps @ jacobian
        # A rule may be right along each coordinate, and wrong along combinations and multiples.
        for by in MULTIPLES:
            analytical = rule(by * vectors) / by
            if is_reverse and fast:
                analytical = directions @ analytical
            advice = "" if fast and by == 1 else "not linear"
            _compare(problem, mode, *names, numerical, analytical, advice, by)
    return smooth


def _compare(
    problem: Problem,
    mode: str,
    inputs: Sequence[Coordinate],
    outputs: Sequence[Coordinate],
    numerical: HostArray,
    analytical: HostArray,
    advice: str = "",
    multiple: float = 1,
) -> None:
    """Raise the error of the worst derivative of the first block that has a wrong one."""
    setting = problem.setting
    allowed = setting.atol + setting.rtol * np.abs(numerical)
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
            kind = inputs[at[0]].kind
            what = "gradient" if setting.order == 1 else "gradient of the gradient"
            times = "" if multiple == 1 else f" (times {multiple:g}, and divided by it)"
            raise setting.error(
                f"the {what} is wrong: {np.count_nonzero(part > 0)} of the {part.size} "
                f"derivatives of this output at {_KINDS[kind]} of this input. The worst:",
                advice or kind,
                mode,
                input=f"{inputs[at[0]]}{'' if mode == 'rev' else times}",
                output=f"{outputs[at[1]]}{times if mode == 'rev' else ''}",
                numerical=f"{numerical[at]:.9g}",
                analytical=f"{analytical[at]:.9g}",
            )


def blocks(names: Sequence[Coordinate]) -> list[HostArray]:
    """Return the indices of the coordinates of each kind and path, specified ones first."""
    members: dict[tuple[str, str], list[int]] = {}
    for index, x in enumerate(names):
        members.setdefault((x.kind, x.path), []).append(index)
    in_order = sorted(members.items(), key=lambda item: list(_KINDS).index(item[0][0]))
    return [np.array(indices) for _, indices in in_order]


def is_masked_function(fun: Function, x: PyTree) -> bool:
    """Decide by trying whether f(x + dx) = f(sparse_mask(x + dx, x)) for small dx.

    A `MaskedTensor` keeps its mask in x + dx, a sparse x + dx stores every entry. So a product
    of a sparse x is no masked function, although its gradient in JAX has entries where x has.

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
    _check_function("is_masked_function(fun, x)", fun)
    check_leaves("x", x)

    def with_other_entries(leaf: Leaf, reals: jax.Array) -> Tensor:
        is_masked = isinstance(leaf.tensor, MaskedTensor)
        return leaf.with_placeholder(reals) if is_masked else leaf.with_every_entry(reals)

    with jax.enable_x64(True):
        chart = Chart((x,), "x")
        run = lambda build, point: fun(*chart.arguments(build, point))
        kinds = np.array([c.kind for c in chart.coordinates])
        rng = np.random.default_rng(0)
        for size in (1e-2, 1e-2, 1e-4, 1e-4):
            steps = size * _random(rng, kinds.size)
            # Values under a mask are replaced: they may be nan, and stay so in a sum.
            near = np.where(kinds == "hidden", steps, chart.point + steps)
            masked = np.where(kinds == "specified", near, chart.point)
            problem = Problem(run, masked, chart.coordinates, Setting())
            try:
                moved = problem.near(near, "moving other entries", with_other_entries)
            except GradcheckError:
                return False
            expected = problem.value
            scale = np.max(np.abs(expected), initial=1, where=np.isfinite(expected))
            if not np.allclose(moved, expected, rtol=1e-11, atol=1e-12 * scale, equal_nan=True):
                return False
    return True
