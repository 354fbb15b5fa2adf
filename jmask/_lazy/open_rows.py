"""Open numbers of rows: dimensions of `jax.export` in the place of the rows of each table.

tables (5, 3) and (9, 2)      opened (rows0, 3) and (rows1, 2)

{ lambda ; a:f32[rows0,3]. let b = mul a a in (b,) }     rows0 = 5     a:f32[5,3]
"""

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jmask._base.forms import aval_of, holds_jaxprs, within
from jmask._base.types import Argument, ArraysFunction, Atom
from jmask._lazy.checks import NotRowLocalError

Dimension = int
"""A size that `jax.export` leaves open: `rows0`, or a multiple of it."""
Sizes = Mapping[Dimension, int]
"""The numbers, or other open dimensions, that take the place of open dimensions."""


def open_shapes(
    shapes: Sequence[jax.ShapeDtypeStruct], tables: Sequence[int | None]
) -> tuple[dict[int, Dimension], list[jax.ShapeDtypeStruct]]:
    """Return an open number of rows for each table, and the shapes with these.

    Args:
        tables: whose rows each array has along its first axis, or None.
    """
    rows = _open_rows(tuple(sorted({i for i in tables if i is not None})))
    pairs = zip(shapes, tables, strict=True)
    return rows, [x if i is None else x.update(shape=(rows[i], *x.shape[1:])) for x, i in pairs]


def axes_of_rows(v: Atom) -> list[int]:
    """Return the axes along which a variable has rows of a table."""
    shape = getattr(aval_of(v), "shape", ())
    return [i for i, size in enumerate(shape) if export.is_symbolic_dim(size)]


@contextlib.contextmanager
def traced_open(subject: str | None = None) -> Iterator[None]:
    """Context of a trace of open shapes, which keeps nothing that its callers hold.

    Where JAX asks whether a dimension is a number, it keeps the error in a local variable of
    the frame that the error's traceback holds: a cycle, which would hold all calling frames,
    and with them parameters and states, until Python collects garbage. It is new, so the
    youngest generation has it.

    Args:
        subject: what is traced; an error then says that it depends on the number of rows.
    """
    try:
        yield
    except Exception as error:  # whatever code makes of a number that is not known
        if subject is None or isinstance(error, NotRowLocalError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        why = f"{subject} depends on the number of rows ({reason})"
        raise NotRowLocalError(why) from error
    finally:
        gc.collect(0)


@functools.cache
def _open_rows(tables: tuple[int, ...]) -> dict[int, Dimension]:
    """Return an open number of rows for each table, all of one scope.

    They are the same in each call, so that JAX finds what it has traced for these shapes.
    """
    names = ", ".join(f"rows{i}" for i in tables)
    sizes: Argument = export.symbolic_shape(names) if tables else ()
    return dict(zip(tables, sizes, strict=True))


# How entries are taken, or repeated.
_TAKING = frozenset(
    "broadcast_in_dim dynamic_slice gather reshape rev slice squeeze transpose".split()
)


def operations_of(program: ClosedJaxpr) -> list[tuple[str, ...]]:
    """Return the operations on numbers that are no integers, in order, and their literals.

    A trace with an open number of rows and one for the table must have the same. An open size
    is never *equal* to a number, so a mask that asks `x.shape[0] == vocabulary` differs. What
    indexes is left out, since JAX itself indexes by other operations where a size is open.
    """
    return [
        (eqn.primitive.name, *(str(v) for v in eqn.invars if isinstance(v, Literal)))
        for eqn in within(program.jaxpr.eqns)
        if eqn.primitive.name not in _TAKING
        and not holds_jaxprs(eqn)
        and not all(jnp.issubdtype(aval_of(v).dtype, jnp.integer) for v in eqn.outvars)
    ]


def traced_alike(
    function: ArraysFunction,
    shapes: Sequence[jax.ShapeDtypeStruct],
    tables: Sequence[int | None],
    rows: Mapping[int, Dimension],
) -> ClosedJaxpr:
    """Return the program of a function that treats tables alike, each by itself.

    It is traced with one open number of rows for all, so that what JAX has traced of
    `jax.numpy` for one table is there for the next. Then each table gets its own.

    Args:
        tables: whose rows each input has along its first axis, or None; and each output, in
            the same order.
    """
    one, opened = open_shapes(shapes, [i if i is None else 0 for i in tables])
    program = jax.make_jaxpr(function)(*opened)
    jaxpr, sizes = program.jaxpr, {i: {one[0]: size} for i, size in rows.items()}
    ends = [*zip(jaxpr.invars, tables, strict=True), *zip(jaxpr.outvars, tables, strict=False)]
    of_each: dict[Var, Sizes]
    of_each = {v: sizes[i] for v, i in ends if i is not None and isinstance(v, Var)}
    # From operands to results; then back, to rows that are made of no others.
    for eqn in (*jaxpr.eqns, *reversed(jaxpr.eqns)):
        known = _own_sizes(eqn, of_each)
        for v in _variables(eqn):
            if known is not None and axes_of_rows(v):
                of_each.setdefault(v, known)
    return ClosedJaxpr(with_sizes(jaxpr, next(iter(sizes.values())), of_each), program.consts)


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var)]


def _own_sizes(eqn: JaxprEqn, of_each: Mapping[Var, Sizes]) -> Sizes | None:
    """Return the sizes of the first variable of an equation that has its own."""
    return next((of_each[v] for v in _variables(eqn) if v in of_each), None)


# --- numbers in the place of open dimensions ------------------------------------------------

# JAX compiles a called jaxpr once, by its identity: outside jit in each update otherwise. It is
# kept as long as JAX keeps the jaxpr that it is made of, which holds what a user's closures do.
_CALLED: weakref.WeakKeyDictionary[Jaxpr, dict[object, ClosedJaxpr]]
_CALLED = weakref.WeakKeyDictionary()


def with_sizes(
    jaxpr: Jaxpr, numbers: Sizes, of_each: Mapping[Var, Sizes] | None = None
) -> Jaxpr:
    """Return a jaxpr for arrays whose open dimensions have these sizes.

    Args:
        of_each: other sizes, of some variables and of equations that have them.
    """
    of_each = of_each or {}
    variables: dict[Var, Var] = {}

    def var(v: Var) -> Var:
        if v not in variables:
            aval, shape = v.aval, getattr(v.aval, "shape", None)
            if shape is not None:
                sizes = of_each.get(v, numbers)
                aval = aval.update(shape=tuple(_sized(x, sizes) for x in shape))
            variables[v] = Var(aval)
        return variables[v]

    def atoms(atoms: Sequence[Atom]) -> list[Atom]:
        return [v if isinstance(v, Literal) else var(v) for v in atoms]

    def at_sizes(eqn: JaxprEqn) -> JaxprEqn:
        invars, outvars = atoms(eqn.invars), list(map(var, eqn.outvars))
        params = params_with_sizes(eqn, _own_sizes(eqn, of_each) or numbers)
        return eqn.replace(invars=invars, outvars=outvars, params=params)

    constants, inputs = list(map(var, jaxpr.constvars)), list(map(var, jaxpr.invars))
    eqns, outputs = list(map(at_sizes, jaxpr.eqns)), atoms(jaxpr.outvars)
    return jaxpr.replace(constvars=constants, invars=inputs, eqns=eqns, outvars=outputs)


def params_with_sizes(eqn: JaxprEqn, numbers: Mapping[Dimension, int]) -> dict[str, Argument]:
    """Return the parameters of an equation, and of what it calls, with these sizes."""
    is_one = lambda x: type(x) not in (tuple, list)
    sized = functools.partial(_sized, numbers=numbers)
    return {name: jax.tree.map(sized, x, is_leaf=is_one) for name, x in eqn.params.items()}


def _sized(x: Argument, numbers: Mapping[Dimension, int]) -> Argument:
    """Return a dimension, a jaxpr or another parameter with these sizes."""
    if isinstance(x, ClosedJaxpr) and x.consts:  # which may be traced
        return ClosedJaxpr(with_sizes(x.jaxpr, numbers), x.consts)
    if isinstance(x, ClosedJaxpr):
        sized, key = _CALLED.setdefault(x.jaxpr, {}), tuple(numbers.items())
        if key not in sized:
            sized[key] = ClosedJaxpr(with_sizes(x.jaxpr, numbers), ())
        return sized[key]
    if isinstance(x, Jaxpr):
        return with_sizes(x, numbers)
    if not export.is_symbolic_dim(x):
        return x
    known: Mapping[Argument, int] = numbers
    if x in known:  # of most arrays: to divide takes 30 us
        return known[x]
    for dimension, number in numbers.items():
        if isinstance(times := x // dimension, int) and times * dimension == x:
            return times * number
    raise NotRowLocalError(f"it makes an array of {x} rows")
