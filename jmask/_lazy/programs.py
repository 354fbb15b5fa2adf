"""Find the steps of lazy transformations in a program, and take them where they are applied.

    tx = optax.partition({"tables": jmask.adam(0.1), "layers": optax.adamw(0.1)}, labels)

`tx.update` is traced, and what a lazy transformation does in it is one equation. Where its
updates of tables are results of `tx`, and nothing else looks at them, they need not be made:

    u, s' = lazy_step[adam] g s t       in one pass: t' and s' of g, s and t
    v     = mul -0.1 h                  as it is
    in (u, v)

In a chain only the next step looks at them. Both are one step then, of the chain:

    u, s' = lazy_step[adam] g s t
    w, r' = lazy_step[ema] u r t        in one pass: t', s' and r' of g, s, r and t
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
from typing import Protocol, TypeVar

import jax
import optax
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Primitive, Var, get_opaque_trace_state

from jmask._base.array_types import is_narrow
from jmask._base.fallback import collected
from jmask._base.jaxprs import bound, contexts_of, read
from jmask._base.types import Argument, Atom, Gradient, PyTree, PyTreeDef
from jmask._lazy.checks import NotRowLocalError, is_gradient_leaf
from jmask._lazy.one_pass import applied
from jmask._lazy.row_local import RowWise
from jmask._lazy.state_rows import one_step
from jmask._lazy.step import LazyStep, is_written_in_rows, step_of, written_in_rows
from jmask._tensors.row_sparse import is_row_sparse

_T = TypeVar("_T")
Inner = optax.GradientTransformationExtraArgs
Finish = Callable[[LazyStep], tuple[Argument, PyTree]]
"""Takes a step that is proved: (results, state), as `LazyStep.update` and `applied` do."""


class Run(Protocol):
    """Makes a step, and finishes it."""

    def __call__(
        self,
        finish: Finish,
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        **extra_args: PyTree,
    ) -> tuple[Argument, PyTree]: ...


def run_of(inner: Inner) -> Run:
    """Return what makes steps of a transformation of arrays, on rows."""

    def run(
        finish: Finish,
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        **extra_args: PyTree,
    ) -> tuple[Argument, PyTree]:
        return finish(step_of(inner, gradients, state, params, extra_args))

    return run


# --- steps as equations -------------------------------------------------------------------

_this_trace = functools.partial(get_opaque_trace_state, convention="nnx")


@dataclasses.dataclass(frozen=True)
class _Step:
    """Hold what an equation is a step of."""

    run: Run
    inner: Inner | None  # if it may be chained to another one
    given: Sequence[PyTreeDef]  # of gradients, state, parameters
    sizes: Sequence[int]  # how many arrays each update is made of
    tables: Sequence[int]  # which of the updates are row-sparse


# The trace of a `tx.update`, in which steps are equations, and its steps. An equation has the
# number of its own: JAX keeps programs, which need not keep what transformations hold.
_STEPS = contextvars.ContextVar[tuple[object, list[_Step]]]("steps", default=(None, []))

_LAZY_STEP = Primitive("jmask_lazy_step")
_LAZY_STEP.multiple_results = True
_LAZY_STEP.def_abstract_eval(lambda *operands, number, types: list(types))


def taken(
    run: Run,
    gradients: PyTree,
    state: PyTree,
    params: PyTree,
    extra_args: dict[str, PyTree],
    inner: Inner | None = None,
) -> tuple[PyTree, PyTree]:
    """Return updates and state of a step, which `with_steps_applied` finds in its program.

    Args:
        inner: what it is a step of, if that may be chained to another one.
    """
    trace, steps = _STEPS.get()
    if params is None or extra_args or trace != _this_trace():
        return run(LazyStep.update, gradients, state, params, **extra_args)
    holds_tracers, written = False, list[bool]()

    def finish(step: LazyStep) -> tuple[PyTree, PyTree]:
        nonlocal holds_tracers
        held = () if step.proof is None else step.proof.program.consts
        holds_tracers = any(isinstance(x, Tracer) for x in held)
        return step.update()

    def update() -> tuple[PyTree, PyTree]:
        updates, new = run(finish, gradients, state, params)
        pairs = zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True)
        written[:] = [is_written_in_rows(*pair) for pair in pairs]
        return updates, new

    program, made = jax.make_jaxpr(update, return_shape=True)()
    if holds_tracers:  # of this trace, as an injected rate: they cannot be read behind it
        return run(LazyStep.update, gradients, state, params)
    updates = jax.tree.leaves(made[0], is_leaf=is_gradient_leaf)
    arguments = gradients, state, params
    is_link = all(map(tells_all, jax.tree.leaves(gradients, is_leaf=is_gradient_leaf)))
    step = _Step(
        run,
        inner if is_link else None,
        list(map(jax.tree.structure, arguments)),
        [len(jax.tree.leaves(x)) for x in updates],
        [i for i, x in enumerate(updates) if is_row_sparse(x)],
    )
    types, operands = tuple(program.out_avals), jax.tree.leaves(arguments)
    structure: PyTreeDef = jax.tree.structure(made)
    results = structure.unflatten(_LAZY_STEP.bind(*operands, number=len(steps), types=types))
    steps.append(step)
    pairs = zip(jax.tree.leaves(results[1]), jax.tree.leaves(state), strict=True)
    for (new, old), is_written in zip(pairs, written, strict=True):
        if is_written:
            written_in_rows(new, old)
    return results


def tells_all(x: Gradient) -> bool:
    """Decide whether an update of it tells the next step of a chain all that it does.

    An update has no mask, one of single entries may be of whole rows, and one in 16 bits has
    been rounded.
    """
    if not is_gradient_leaf(x):
        return True
    return is_row_sparse(x) and x.leading == 1 and x.width is None and not is_narrow(x.dtype)


# --- programs with steps ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Taken:
    """Hold steps of a program: one, or those of a chain, where each gets updates of another."""

    eqn: JaxprEqn  # of the last step
    steps: Sequence[_Step]
    gradients: Sequence[Atom]
    states: Sequence[Sequence[Atom]]  # of each step
    params: Sequence[Atom]
    updates: Sequence[Var]  # of the last step
    new_states: Sequence[Sequence[Var]]  # of each

    @classmethod
    def of(cls, eqn: JaxprEqn, step: _Step) -> "_Taken":
        """Return the step of an equation."""
        given = _divided(eqn.invars, [x.num_leaves for x in step.given])
        gradients, state, params = given
        number = sum(step.sizes)
        updates, new_state = eqn.outvars[:number], eqn.outvars[number:]
        return cls(eqn, [step], gradients, [state], params, updates, [new_state])

    @property
    def invars(self) -> list[Atom]:
        return [*self.gradients, *itertools.chain(*self.states), *self.params]

    def then(self, other: "_Taken") -> "_Taken":
        """Return both as steps of a chain."""
        return _Taken(
            other.eqn,
            [*self.steps, *other.steps],
            self.gradients,
            [*self.states, *other.states],
            self.params,
            other.updates,
            [*self.new_states, *other.new_states],
        )

    def run(self, finish: Finish, values: dict[Var, Argument]) -> list[Argument]:
        """Return what the last step is finished to, and add the states to `values`."""

        def tree(structure: PyTreeDef, variables: Sequence[Atom]) -> PyTree:
            return structure.unflatten([read(values, v) for v in variables])

        of_gradients, _, of_params = self.steps[0].given
        gradients, params = tree(of_gradients, self.gradients), tree(of_params, self.params)
        pairs = zip(self.steps, self.states, strict=True)
        states = [tree(step.given[1], variables) for step, variables in pairs]
        new_states: Sequence[PyTree] = ()
        if len(self.steps) > 1:
            inners = [step.inner for step in self.steps if step.inner]
            chain = optax.chain(*inners)
            if all(isinstance(x, RowWise) for x in inners):
                chain = RowWise(*chain)
            # Refused may be a norm of the updates, which in the chain are of all rows.
            with contextlib.suppress(NotRowLocalError):
                results, new_states = run_of(chain)(finish, gradients, tuple(states), params)
        if not new_states:
            ways, new_states, results = [LazyStep.update] * (len(states) - 1), [], gradients
            for step, way, state in zip(self.steps, [*ways, finish], states, strict=True):
                results, new = step.run(way, results, state, params)
                new_states.append(new)
        for variables, new in zip(self.new_states, new_states, strict=True):
            values.update(zip(variables, jax.tree.leaves(new), strict=True))
        every: list[Argument] = jax.tree.leaves(results, is_leaf=is_gradient_leaf)
        return every


def _divided(x: Sequence[_T], sizes: Sequence[int]) -> list[Sequence[_T]]:
    ends = itertools.accumulate(sizes)
    return [x[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return [v for v in atoms if isinstance(v, Var)]


@one_step()
def with_steps_applied(
    update: Callable[[], tuple[PyTree, PyTree]], params: PyTree
) -> tuple[PyTree, PyTree]:
    """Return updates and state; of tables that are updated in one pass what they become."""

    # --- the program
    steps: list[_Step] = []

    def traced() -> tuple[PyTree, PyTree]:
        token = _STEPS.set((_this_trace(), steps))
        try:
            return update()
        finally:
            _STEPS.reset(token)

    made: tuple[PyTree, PyTree]
    program, made = jax.make_jaxpr(traced, return_shape=True)()
    is_leaf = lambda x: x is None or is_gradient_leaf(x)
    of_updates: PyTreeDef
    leaves, of_updates = jax.tree.flatten(made[0], is_leaf=is_leaf)
    trees: list[PyTreeDef] = [*map(jax.tree.structure, leaves), jax.tree.structure(made[1])]
    outputs = _divided(program.jaxpr.outvars, [x.num_leaves for x in trees])

    def uses_in(items: Sequence[JaxprEqn | _Taken]) -> Counter[Var]:
        used = itertools.chain(program.jaxpr.outvars, *(x.invars for x in items))
        return Counter(_variables(used))

    # --- its steps, those of a chain as one
    items: list[JaxprEqn | _Taken] = []
    uses = uses_in(program.jaxpr.eqns)
    for eqn in program.jaxpr.eqns:
        if eqn.primitive is not _LAZY_STEP:
            items.append(eqn)
            continue
        number, _ = eqn.params.values()
        step = _Taken.of(eqn, steps[number])
        for i, before in enumerate(items):
            if not isinstance(before, _Taken) or [*step.gradients] != [*before.updates]:
                continue
            are_links = all(x.inner for x in (*before.steps, *step.steps))
            is_next = are_links and all(uses[v] == 1 for v in before.updates)
            # The steps before are taken where this one is.
            early = {v for state in before.new_states for v in state}
            is_read = any(v in early for x in items[i + 1 :] for v in _variables(x.invars))
            if is_next and [*step.params] == [*before.params] and not is_read:
                step = before.then(step)
                del items[i]
                break
        items.append(step)

    # --- where updates go that are read by nothing else, and of tables that nothing else reads
    values: dict[Var, Argument] = dict(
        zip(program.jaxpr.constvars, program.consts, strict=True)
    )
    uses, tables = uses_in(items), jax.tree.leaves(params, is_leaf=is_leaf)
    place_of = {tuple(_variables(x)): place for place, x in enumerate(outputs[:-1])}

    def places(step: _Taken, updates: Sequence[Sequence[Var]]) -> dict[int, int]:
        """Return the place of each table, if all of them may be updated."""
        found: dict[int, int] = {}
        for i in step.steps[-1].tables:
            place, table = place_of.get(tuple(updates[i])), step.params[i]
            used = _variables((table, *updates[i]))
            if place is None or any(uses[v] != 1 for v in used):
                return {}
            if read(values, table) is not tables[place]:
                return {}
            found[i] = place
        return found

    # --- the run
    new: dict[int, Argument] = {}
    with collected():
        for item in items:
            if isinstance(item, _Taken):
                updates = _divided(item.updates, item.steps[-1].sizes)
                found = places(item, updates)
                names, context = contexts_of(item.eqn)
                with names, context:
                    results = item.run(applied if found else LazyStep.update, values)
                for i, (variables, x) in enumerate(zip(updates, results, strict=True)):
                    if i in found:
                        new[found[i]] = x
                    else:
                        values.update(zip(variables, jax.tree.leaves(x), strict=True))
            else:
                names, context = contexts_of(item)
                with names, context:
                    made_of = bound(item, [read(values, v) for v in item.invars])
                values.update(zip(item.outvars, made_of, strict=True))
    *made_updates, state = (
        new[i] if i in new else tree.unflatten([read(values, v) for v in variables])
        for i, (tree, variables) in enumerate(zip(trees, outputs, strict=True))
    )
    return of_updates.unflatten(made_updates), state
