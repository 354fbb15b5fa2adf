"""Find the steps of lazy transformations in a program, and take them where they are applied.

    tx = optax.partition({"tables": jmask.adam(0.1), "layers": optax.adamw(0.1)}, labels)

`tx.update` is traced, and what a lazy transformation does in it is one equation. Where its
updates of tables are results of `tx`, and nothing else looks at them, they need not be made:

    u, s' = lazy_step g s t         in one pass: t' and s' of g, s and t
    v     = mul -0.1 h              as it is
    in (u, v)

In a chain only the next step looks at them. Both are one step then, of the chain:

    u, s' = lazy_step g s t
    w, r' = lazy_step u r t         in one pass: t', s' and r' of g, s, r and t
    in (w,)

Whatever else is done to an update is done to it: the step is taken in several passes. So are
steps in loops, in branches, and in functions that are mapped.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import jax
from jax.extend.core import JaxprEqn, Primitive, Var, get_opaque_trace_state

from jmask._base.array_types import is_narrow
from jmask._base.fallback import collected, setting
from jmask._base.jaxprs import bound, contexts_of, needed_for, read, run
from jmask._base.types import Argument, Atom, Gradient, PyTree, PyTreeDef
from jmask._base.validation import abstract_leaf
from jmask._lazy.checks import NotRowLocalError, is_gradient_leaf
from jmask._lazy.one_pass import Replaced, applied
from jmask._lazy.step import LazyStep, written_in_rows
from jmask._ops.rows import trial
from jmask._tensors.row_sparse import RowSparse, is_row_sparse

Way = Callable[[LazyStep], tuple[PyTree, PyTree]]
"""How a step is taken: it returns updates and state."""

# --- how the steps of a trace are taken ---------------------------------------------------

_this_trace = functools.partial(get_opaque_trace_state, convention="nnx")
_WAY = contextvars.ContextVar[tuple[object, Way]]("way", default=(None, LazyStep.update))


def taking(way: Way) -> AbstractContextManager[object]:
    """Return a context in which the steps of this trace are taken in some way."""
    return setting(_WAY, (_this_trace(), way))


def taken(step: LazyStep) -> tuple[PyTree, PyTree]:
    """Return updates and state of a step."""
    trace, way = _WAY.get()
    return way(step) if trace == _this_trace() else step.update()


# --- steps as equations -------------------------------------------------------------------

_LAZY_STEP = Primitive("jmask_lazy_step")
_LAZY_STEP.multiple_results = True
_LAZY_STEP.def_abstract_eval(lambda *operands, number, types: list(types))


def tells_all(x: Gradient) -> bool:
    """Decide whether the update for this gradient is all that the next step of a chain needs.

    An update has no mask, one of single entries may be of whole rows, and one in 16 bits has
    been rounded.
    """
    if not is_gradient_leaf(x):
        return True
    return is_row_sparse(x) and x.leading == 1 and x.width is None and not is_narrow(x.dtype)


# What an equation is a step of: the structure of the step, whose arrays are the operands; that
# of its results; and whether it may be one step with others of a chain.
_Equation = tuple[PyTreeDef, PyTreeDef, bool]


def _as_equation(equations: list[_Equation], step: LazyStep) -> tuple[PyTree, PyTree]:
    """Return updates and state of a step on rows as results of an equation."""
    if step.proof is None or not any(leaf.kind == "param" for leaf in step.leaves):
        return step.update()
    structure: PyTreeDef
    arrays, structure = jax.tree.flatten(step)
    update = lambda *arrays: structure.unflatten(arrays).update()
    # For the types alone.
    program, made = jax.make_jaxpr(update, return_shape=True)(*arrays)
    of_results: PyTreeDef = jax.tree.structure(made)
    is_link = all(tells_all(leaf.given) and leaf.valid is None for leaf in step.gradients)
    number, types = len(equations), tuple(program.out_avals)
    equations.append((structure, of_results, is_link))
    results = of_results.unflatten(_LAZY_STEP.bind(*arrays, number=number, types=types))
    states = [leaf for leaf in step.leaves if leaf.kind == "state"]
    for leaf, new in zip(states, jax.tree.leaves(results[1]), strict=True):
        if leaf.table is not None:
            written_in_rows(new, leaf.given)
    return results


# --- programs with steps ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _FoundStep:
    """Hold one step of a program, or several steps of a chain, merged."""

    step: LazyStep  # with variables in place of arrays
    eqn: JaxprEqn  # of the last step
    updates: Sequence[Sequence[Var]]
    state: Sequence[Var]
    is_link: bool

    @property
    def invars(self) -> list[Atom]:
        # A leaf's home is another leaf.
        given = [(leaf.given, leaf.valid) for leaf in self.step.leaves]
        atoms: list[Atom] = jax.tree.leaves((given, self.step.proof))
        return atoms

    @property
    def params(self) -> list[Atom]:
        return [leaf.given for leaf in self.step.leaves if leaf.kind == "param"]

    def then(self, other: "_FoundStep") -> "_FoundStep | None":
        """Return both as one step, if the other one gets all updates of this one."""
        gradients: list[Atom] = jax.tree.leaves([leaf.given for leaf in other.step.gradients])
        is_next = gradients == [*itertools.chain(*self.updates)]
        if not (is_next and self.is_link and other.is_link and self.params == other.params):
            return None
        # Refused may be a norm of the updates, which in the chain are of all rows.
        with contextlib.suppress(NotRowLocalError):
            step, state = self.step.then(other.step), [*self.state, *other.state]
            return _FoundStep(step, other.eqn, other.updates, state, is_link=True)
        return None


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return [v for v in atoms if isinstance(v, Var)]


def _is_padding(x: RowSparse, ids: Atom, eqns: Sequence[JaxprEqn]) -> bool:
    """Decide whether an update has no rows, by ids that a program makes from nothing.

    `optax.set_to_zero` makes such. To write them XLA would copy a table: nothing says that what
    is looked up is read before.

    Args:
        x: its shapes.
    """
    chosen, needed = needed_for([ids], eqns)
    made = {v for eqn in chosen for v in eqn.outvars}
    if not needed.keys() <= made:
        return False
    values: dict[Var, Argument] = {}
    with trial():
        run(chosen, values, bound)
        rows = x.with_leaves(read(values, ids), x.values).flat().row_ids()
        return bool((rows >= x.row_count).all())


def with_steps_applied(
    update: Callable[[], tuple[PyTree, PyTree]], params: PyTree
) -> tuple[PyTree, PyTree]:
    """Return updates and state; of tables that are updated in one pass what they become."""

    # --- the program
    equations: list[_Equation] = []
    of_state: list[PyTreeDef] = []
    others: dict[int, object] = {}  # leaves of the state that are no arrays

    def traced() -> tuple[PyTree, list[PyTree]]:
        with taking(functools.partial(_as_equation, equations)):
            updates, state = update()
        # Such as the functions of a module: a program returns none.
        leaves, tree = jax.tree.flatten(state)
        of_state.append(tree)
        others.update((i, x) for i, x in enumerate(leaves) if abstract_leaf(x) is None)
        return updates, [None if i in others else x for i, x in enumerate(leaves)]

    made: tuple[PyTree, PyTree]
    with jax.debug_key_reuse(False):  # to which ids are keys, and an equation uses them up
        program, made = jax.make_jaxpr(traced, return_shape=True)()
    is_leaf = lambda x: x is None or is_gradient_leaf(x)
    of_updates: PyTreeDef
    leaves, of_updates = jax.tree.flatten(made[0], is_leaf=is_leaf)
    trees: list[PyTreeDef] = [*map(jax.tree.structure, leaves), jax.tree.structure(made[1])]
    outvars = iter(program.jaxpr.outvars)
    outputs = [list(itertools.islice(outvars, x.num_leaves)) for x in trees]
    eqns, _ = needed_for(program.jaxpr.outvars, program.jaxpr.eqns)

    def uses_in(items: Sequence[JaxprEqn | _FoundStep]) -> Counter[Var]:
        used = itertools.chain(program.jaxpr.outvars, *(x.invars for x in items))
        return Counter(_variables(used))

    # --- find the lazy steps in it; steps of a chain become one
    items: list[JaxprEqn | _FoundStep] = []
    uses = uses_in(eqns)
    for eqn in eqns:
        if eqn.primitive is not _LAZY_STEP:
            items.append(eqn)
            continue
        number, _ = eqn.params.values()
        structure, of_results, is_link = equations[number]
        of_step, state = of_results.unflatten(eqn.outvars)
        updates = [
            jax.tree.leaves(x) for x in jax.tree.leaves(of_step, is_leaf=is_gradient_leaf)
        ]
        lazy_step, new = structure.unflatten(eqn.invars), jax.tree.leaves(state)
        step = _FoundStep(lazy_step, eqn, updates, new, is_link)
        for i, before in enumerate(items):
            both = before.then(step) if isinstance(before, _FoundStep) else None
            if both is None:
                continue
            assert isinstance(before, _FoundStep)
            # The steps before are taken where this one is: nothing until then reads their
            # state, nor does this one.
            early, until = {*before.state}, [*items[i + 1 :], step]
            is_read = any(v in early for x in until for v in _variables(x.invars))
            if not is_read and all(uses[v] == 1 for v in itertools.chain(*before.updates)):
                step = both
                del items[i]
                break
        items.append(step)

    # --- where updates go that are read by nothing else, and of tables that nothing else reads
    values: dict[Var, Argument] = dict(
        zip(program.jaxpr.constvars, program.consts, strict=True)
    )
    uses, tables = uses_in(items), jax.tree.leaves(params, is_leaf=is_leaf)
    place_of = {tuple(_variables(x)): place for place, x in enumerate(outputs[:-1])}

    def places(taken: _FoundStep) -> dict[int, int]:
        """Return the place of each table, if all of them may be updated."""
        found: dict[int, int] = {}
        for i, leaf in enumerate(taken.step.gradients):
            if leaf.table is None:
                continue
            place, table = place_of.get(tuple(taken.updates[i])), taken.params[i]
            used = _variables((table, *taken.updates[i]))
            if place is None or any(uses[v] != 1 for v in used):
                return {}
            if read(values, table) is not tables[place]:
                return {}
            found[i] = place
        return found

    # --- the run
    replaced: dict[int, Argument] = {}
    with collected():
        for item in items:
            names, context = contexts_of(item.eqn if isinstance(item, _FoundStep) else item)
            with names, context:
                if not isinstance(item, _FoundStep):
                    made_of = bound(item, [read(values, v) for v in item.invars])
                    values.update(zip(item.outvars, made_of, strict=True))
                    continue
                found = places(item)
                step_now: LazyStep = jax.tree.map(functools.partial(read, values), item.step)
                results, state = applied(step_now) if found else step_now.update()
            values.update(zip(item.state, jax.tree.leaves(state), strict=True))
            every = jax.tree.leaves(results, is_leaf=is_gradient_leaf)
            for i, (variables, x) in enumerate(zip(item.updates, every, strict=True)):
                if i in found:
                    replaced[found[i]] = x
                else:
                    values.update(zip(variables, jax.tree.leaves(x), strict=True))
    for i, x in enumerate(leaves):
        if i not in replaced and is_row_sparse(x) and _is_padding(x, outputs[i][0], eqns):
            replaced[i] = Replaced(tables[i])
    *made_updates, state = (
        replaced[i] if i in replaced else tree.unflatten([read(values, v) for v in variables])
        for i, (tree, variables) in enumerate(zip(trees, outputs, strict=True))
    )
    state = of_state[0].unflatten(others.get(i, x) for i, x in enumerate(state))
    return of_updates.unflatten(made_updates), state
