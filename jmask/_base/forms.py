"""The names and parameters of equations that this library relies on.

A jaxpr is no stable interface. JAX renames parameters between versions, and a reader that
asks for one by its old name fails in the user's program:

    scan  num_consts=1 num_carry=1 jaxpr length reverse unroll      jax 0.10
    scan  ft_in=... ft_out=...     jaxpr length reverse unroll      jax 0.11, 0.12

So every reader of jaxprs asks here, and nowhere else. `FORMS` lists for each primitive that has
a rule the parameters that are read, and others that may be there. `name_of` is the
name under which rules are found. An equation with other parameters, which a newer JAX may have,
is named by what is not known of it: no rule has that name, so its gradient is dense with a
warning, and `lazy` refuses it with the reason.

To take on a new JAX, run `tests/base/test_forms.py`: it says which primitive has changed.
"""

import operator
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import PartitionSpec

from jmask._base.types import Argument, Atom, Function, Index, Options, PyTree, Shaped

# Equations that do no more than run a jaxpr; the second have a derivative of their own.
PLAIN_CALLS = ("jit", "pjit", "closed_call", "core_call")
CALLS = (*PLAIN_CALLS, "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
# The same, recomputed in the backward pass: the name differs between JAX versions.
REMATS = ("remat2", "remat", "checkpoint")

Opened = tuple[Jaxpr, Sequence[jax.Array]]
"""A jaxpr and its constants."""


class Form(NamedTuple):
    """Known parameters of a primitive."""

    read: frozenset[str]  # parameters that rules read
    # Others that may occur. No rule reads them: they are passed on unchanged, or do not change
    # what is computed.
    ignored: frozenset[str]
    # Whether the values of the parameters are known too; None if any will do.
    holds: Callable[[JaxprEqn], bool] | None


aval_of: Callable[[Atom], Shaped] = operator.attrgetter("aval")
"""The abstract array (shape, dtype, ndim) of a variable or literal."""


def opened(jaxpr: Jaxpr | ClosedJaxpr) -> Opened:
    """Return a jaxpr, closed or not, and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


# --- equations that hold jaxprs ----------------------------------------------------------


class Scan(NamedTuple):
    """A `scan`: inputs are so many `consts`, so many of the `carry`, then what is scanned.

    `how` is reverse and unroll, as `jax.lax.scan` takes them, which finds a symbolic length in
    what is scanned alone.
    """

    body: Opened
    consts: int
    carry: int
    length: int
    how: Options


def scan_of(eqn: JaxprEqn) -> Scan:
    """Return the form of a `scan`.

    Counts of constants, carries and scanned inputs are read off the shapes, which are the same
    in every version: what is scanned or stacked has an axis more outside the body than inside.
    """
    jaxpr, consts = opened(eqn.params["jaxpr"])
    scanned = _with_an_axis_more(eqn.invars, jaxpr.invars)
    carry = len(eqn.outvars) - _with_an_axis_more(eqn.outvars, jaxpr.outvars)
    consts_count, length = len(eqn.invars) - carry - scanned, eqn.params["length"]
    how = {name: eqn.params[name] for name in ("reverse", "unroll")}
    return Scan((jaxpr, consts), consts_count, carry, length, how)


def _with_an_axis_more(outer: Sequence[Atom], inner: Sequence[Atom]) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(aval_of(v).shape) == len(aval_of(w).shape) + 1 for v, w in pairs)


def _is_known_scan(eqn: JaxprEqn) -> bool:
    scan = scan_of(eqn)
    jaxpr, _ = scan.body
    first, count = scan.consts, scan.carry
    inputs, outputs = (
        [(aval_of(v).shape, aval_of(v).dtype) for v in variables]
        for variables in (jaxpr.invars[first : first + count], jaxpr.outvars[:count])
    )
    said = (eqn.params.get("num_consts", first), eqn.params.get("num_carry", count))
    scanned = [*eqn.invars[first + count :], *eqn.outvars[count:]]
    lengths = {aval_of(v).shape[0] for v in scanned}
    return inputs == outputs and said == (first, count) and lengths <= {scan.length}


class While(NamedTuple):
    """A `while`: inputs are constants of the condition, of the body, then what is carried."""

    condition: Opened
    body: Opened
    condition_consts: int
    body_consts: int


def while_of(eqn: JaxprEqn) -> While:
    condition, body = opened(eqn.params["cond_jaxpr"]), opened(eqn.params["body_jaxpr"])
    return While(condition, body, eqn.params["cond_nconsts"], eqn.params["body_nconsts"])


def _is_known_while(eqn: JaxprEqn) -> bool:
    loop, carried = while_of(eqn), len(eqn.outvars)
    inputs = [len(x[0].invars) for x in (loop.condition, loop.body)]
    consts = [loop.condition_consts, loop.body_consts]
    is_known = inputs == [count + carried for count in consts]
    return is_known and len(eqn.invars) == sum(consts) + carried


def branches_of(eqn: JaxprEqn) -> list[Opened]:
    """Return the branches of a `cond`, which run on all inputs but the first, their number."""
    return [opened(branch) for branch in eqn.params["branches"]]


def switch_like(eqn: JaxprEqn, which: Index, cases: Sequence[Function]) -> PyTree:
    """Run one of several functions, in the place of the branches of a `cond`.

    Branches of `lax.platform_dependent` are each for some platforms, and compiled for no other.
    """
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return jax.lax.switch(which, cases)
    pairs = list(zip(cases, platforms, strict=True))
    default = [case for case, names in pairs if names is None]
    by_name = {name: case for case, names in pairs for name in names or ()}
    return jax.lax.platform_dependent(default=default[0] if default else None, **by_name)


def called(eqn: JaxprEqn) -> Opened:
    """Return the jaxpr that a call-like equation runs, and its constants."""
    return opened(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"])


def recomputed_how(eqn: JaxprEqn) -> Options:
    """Return what else `jax.checkpoint` takes, of a `remat`."""
    return {name: eqn.params[name] for name in ("prevent_cse", "policy")}


def is_recomputed_apart(eqn: JaxprEqn) -> bool:
    """Decide whether what a `remat` runs must not be merged with the forward pass."""
    return bool(eqn.params["prevent_cse"] and eqn.params["differentiated"])


def bodies_of(eqn: JaxprEqn) -> list[Opened]:
    """Return the jaxprs, if any, that an equation runs on its last inputs."""
    name = name_of(eqn)
    if name == "cond":
        return branches_of(eqn)
    if name == "while":
        return [while_of(eqn).body]
    runs_one = name in CALLS or name in REMATS or name in ("scan", "shard_map")
    return [called(eqn)] if runs_one else []


def _runs_on_all(eqn: JaxprEqn) -> bool:
    """Decide whether bodies have the inputs and the outputs of their equation."""
    counts = len(eqn.invars) - (eqn.primitive.name == "cond"), len(eqn.outvars)
    bodies = branches_of(eqn) if eqn.primitive.name == "cond" else [called(eqn)]
    return all((len(x.invars), len(x.outvars)) == counts for x, _ in bodies)


def holds_jaxprs(eqn: JaxprEqn) -> bool:
    """Decide whether an equation runs others, and may take inputs that none of them reads."""
    return any(True for _ in jaxprs_in_params(eqn.params))


def calls(jaxpr: Jaxpr, name: str) -> bool:
    """Decide whether a program, or what it runs, calls a jitted function of this name."""
    return any(eqn.params.get("name") == name for eqn in within(jaxpr.eqns))


def within(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Return equations and the equations of jaxprs that they run, in known forms or not."""
    every = list(eqns)
    for eqn in eqns:
        for jaxpr in jaxprs_in_params(eqn.params):
            every += within(jaxpr.eqns)
    return every


def writes_reference(eqn: JaxprEqn) -> bool:
    """Decide whether an equation may write to what `jax.new_ref` made, to be read elsewhere."""
    is_array = lambda v: isinstance(aval_of(v), jax.core.ShapedArray)
    return bool(eqn.effects) and not all(map(is_array, eqn.invars))


# --- several devices ---------------------------------------------------------------------


class ShardMap(NamedTuple):
    """A `shard_map`: its body on one device, and what else `jax.shard_map` takes."""

    body: Opened
    in_specs: Sequence[PartitionSpec]
    out_specs: Sequence[PartitionSpec]
    how: Options


def shard_map_of(eqn: JaxprEqn) -> ShardMap:
    """Return the form of a `shard_map`; JAX 0.10.1 and older call its axes otherwise."""
    params = eqn.params
    axes = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    how = {"mesh": params["mesh"], "axis_names": set(axes), "check_vma": params["check_vma"]}
    return ShardMap(opened(params["jaxpr"]), params["in_specs"], params["out_specs"], how)


# --- gather -------------------------------------------------------------------------------

_OF_A_GATHER = {
    *("offset_dims", "collapsed_slice_dims", "start_index_map"),
    *("operand_batching_dims", "start_indices_batching_dims"),
}
# In all of them but CLIP an index out of range is dropped, or there is none.
_MODES = ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")


# --- the table ---------------------------------------------------------------------------


_CALL = (
    "call_jaxpr jaxpr bwd compiler_options_kvs ctx_mesh donated_invars fwd_jaxpr_thunk "
    "in_layouts in_shardings inline jvp_jaxpr_fun keep_unused name num_consts out_layouts "
    "out_shardings out_trees symbolic_zeros"
)
_SCATTER = "mode indices_are_sorted unique_indices update_consts update_jaxpr"
_GATHER = "dimension_numbers slice_sizes mode fill_value indices_are_sorted unique_indices"
# Primitives: parameters that rules read | others that may occur.
_TABLE = f"""
{" ".join(CALLS)}: | {_CALL}
{" ".join(REMATS)}: jaxpr prevent_cse differentiated | policy
scan: jaxpr length reverse unroll | num_consts num_carry ft_in ft_out linear _split_transpose
while: cond_jaxpr body_jaxpr cond_nconsts body_nconsts |
cond: branches | branches_platforms
shard_map: jaxpr mesh in_specs out_specs check_vma | newly_manual_axes manual_axes
gather: {_GATHER} |
bcoo_dot_general bcsr_dot_general: dimension_numbers lhs_spinfo | preferred_element_type
dot_general: dimension_numbers | precision preferred_element_type out_sharding
reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or: axes | out_sharding
add add_any sub neg div select_n copy copy_p complex real imag optimization_barrier: |
mul: | out_dtype
conj: | input_dtype
integer_pow: y |
convert_element_type: new_dtype | weak_type sharding
reduce_precision: | exponent_bits mantissa_bits
broadcast_in_dim: broadcast_dimensions shape | sharding
reshape: | new_sizes dimensions sharding
expand_dims squeeze: | dimensions
concatenate: dimension |
dynamic_slice: | slice_sizes
slice: start_indices limit_indices strides |
pad: padding_config |
scatter: dimension_numbers mode | {_SCATTER}
scatter-add scatter-max scatter-min scatter-mul scatter-sub: dimension_numbers | {_SCATTER}
rev: dimensions |
split: axis sizes |
stack unstack: axis |
tile: reps |
transpose: permutation |
pvary: | axes axis_index_groups
pcast: | axes from to
reshard: | dst_sharding concrete_mesh
sharding_constraint: | context_mesh layout sharding unconstrained_dims
name: | name
"""
_HOLDS: dict[str, Callable[[JaxprEqn], bool]] = {
    **dict.fromkeys((*CALLS, *REMATS, "cond", "shard_map"), _runs_on_all),
    "scan": _is_known_scan,
    "while": _is_known_while,
    "gather": lambda eqn: (
        {*eqn.params["dimension_numbers"]._fields} == _OF_A_GATHER
        and eqn.params["mode"].name in _MODES
    ),
    "scatter": lambda eqn: eqn.params["mode"].name != "CLIP",
    "mul": lambda eqn: eqn.params.get("out_dtype") is None,
    "reshape": lambda eqn: eqn.params.get("dimensions") is None,
}
FORMS: dict[str, Form] = {
    name: Form(frozenset(read.split()), frozenset(ignored.split()), _HOLDS.get(name))
    for names, read, ignored in (re.split("[:|]", line) for line in _TABLE.split("\n")[1:-1])
    for name in names.split()
}


def name_of(eqn: JaxprEqn) -> str:
    """Return the primitive of an equation, under which rules are found.

    Parameters that are not as known are appended to the name: no rule has that.
    """
    name, given = eqn.primitive.name, eqn.params.keys()
    form = FORMS.get(name)
    if form is None:
        return name
    try:
        is_known = form.read <= given and given <= form.read | form.ignored
        if is_known and (form.holds is None or form.holds(eqn)):
            return name
    except (AttributeError, KeyError, TypeError, ValueError):
        pass  # a parameter of another type than is known
    return f"{name} (parameters: {', '.join(sorted(given))})"


def what_is_unknown(eqn: JaxprEqn) -> str:
    """Describe an equation whose form is not known."""
    name, given = eqn.primitive.name, ", ".join(sorted(eqn.params)) or "none"
    return f"this version of jmask does not know `{name}` with these parameters: {given}"


def parameter(eqn: JaxprEqn, name: str) -> Argument:
    """Return a parameter of an equation, one of those that `FORMS` says are read."""
    assert name in FORMS[eqn.primitive.name].read, (eqn.primitive.name, name)
    return eqn.params[name]
