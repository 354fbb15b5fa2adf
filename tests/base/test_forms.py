"""What is relied on of JAX's programs, and what happens where a new JAX has it otherwise.

On a new JAX the first test names the primitives whose parameters have changed.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.sparse import BCSR
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

import jmask
from jmask._autodiff import nested, view_rules
from jmask._base import forms as _forms
from jmask._lazy import row_local as _row_local
from tests.lookup_programs import IDS, PROGRAMS, TABLE, square
from tests.oracle import assert_close, densified
from tests.sparse_arrays import coo

pytestmark = pytest.mark.each

X = jnp.ones((4, 2))
FEATURES = coo(np.eye(4))
MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def _sharded(check_vma):
    of_device = lambda x: lax.psum(x[IDS[:2]].sum(), "i")
    specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec()}
    mapped = jax.shard_map(of_device, mesh=MESH, **specs, check_vma=check_vma)
    return jax.grad(mapped)


@jax.custom_vjp
def _doubled(x):
    return 2 * x


_doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))
COLUMNS = "set add multiply min max subtract"

# Programs that have, between them, every equation of `FORMS` that JAX has today.
EXAMPLES = {
    "lookup": jax.grad(lambda x: jnp.take(x, IDS[:2], axis=0).sum()),
    "slices": jax.grad(lambda x: x[1:3].sum() + lax.dynamic_slice_in_dim(x, IDS[0], 2).sum()),
    "features": lambda x: (FEATURES @ x, BCSR.from_bcoo(FEATURES) @ x),
    "scan": lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x),
    "while": lambda x: lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c + x, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda: x, lambda: 2 * x),
    "checkpoint": jax.grad(lambda x: jax.checkpoint(jnp.sin)(x).sum()),
    "custom rules": lambda x: _doubled(jax.nn.relu(x)),
    "columns": lambda x: [getattr(x.at[:, 0], f)(2.0) for f in COLUMNS.split()],
    "arithmetic": lambda x: -(x + x - x) * x / x + lax.reduce_precision(x**3, 8, 7),
    "shapes": lambda x: (jnp.squeeze(x[:, None].reshape(4, 2, 1)), lax.expand_dims(x, [0])),
    "products": lambda x: (x @ x.T, lax.select_n(x[0, 0] > 0, x, x)),
    "reductions": lambda x: (x.sum(0), x.prod(0), x.max(0), x.min(0), (x > 0).all(0)),
    "any": lambda x: ((x > 0).any(0), x.astype(jnp.bfloat16)),
    "names": lambda x: lax.optimization_barrier(checkpoint_name(x, "x")),
    "checked shard_map": _sharded(True),
    "shard_map": _sharded(False),
    "constraint": lambda x: lax.with_sharding_constraint(
        x, NamedSharding(MESH, PartitionSpec())
    ),
    "parts": lambda x: (lax.slice(x, (0, 0), (2, 1)), lax.concatenate(jnp.split(x, 2), 0)),
    "stacks": jax.grad(lambda x: (jnp.stack([x[::-1], x]).sum(0) * jnp.stack([*x])).sum()),
    "copies": lambda x: (jnp.array(x, copy=True), (z := lax.complex(x, x)).real, z.conj().imag),
    "sums of cotangents": jax.grad(lambda x: (x * x).sum() + x[IDS[:2]].sum()),
}
# Names of other versions than the one that runs, and what only meshes of explicit axes have.
NOT_SEEN = {
    *("pjit", "closed_call", "core_call", "custom_vjp_call_jaxpr", "remat", "remat2"),
    *("checkpoint", "copy", "copy_p", "expand_dims", "pcast", "pvary", "reshard"),
    *("add_any", "stack", "unstack", "tile"),
}
equations_of = lambda function, *args: _forms.within(jax.make_jaxpr(function)(*args).eqns)


@pytest.mark.parametrize("name", EXAMPLES)
def test_forms_are_as_known(name):
    """If this fails on a new JAX: the message says what its equations have now."""
    for eqn in equations_of(EXAMPLES[name], X):
        given, form = eqn.primitive.name, _forms.FORMS.get(eqn.primitive.name)
        assert _forms.name_of(eqn) == given, (
            f"On jax {jax.__version__} `{given}` has the parameters {sorted(eqn.params)}; "
            f"jmask reads {sorted(form.read)} and knows {sorted(form.ignored)} beside them. "
            f"Teach jmask/_base/forms.py the new form: {eqn}"
        )


def test_every_form_is_seen():
    seen = {e.primitive.name for f in EXAMPLES.values() for e in equations_of(f, X)}
    assert set(_forms.FORMS) - seen <= NOT_SEEN


def test_everything_with_a_rule_has_a_form():
    read = {name for name, rule in view_rules.RULES.items() if rule is not view_rules.entrywise}
    ruled = {*read, *nested.RULES, *_row_local.RULES, *_row_local.CONTROL_FLOW}
    assert ruled <= set(_forms.FORMS)


def test_parameters_of_another_kind_are_not_known():
    (eqn,) = (e for e in equations_of(EXAMPLES["scan"], X) if e.primitive.name == "scan")
    for name, x in {"jaxpr": None, "length": 7, "further": 0}.items():
        changed = eqn.replace(params=eqn.params | {name: x})
        assert _forms.name_of(changed).startswith("scan (parameters: ")
        assert "`scan`" in _forms.what_is_unknown(changed)
    (eqn,) = (e for e in equations_of(lambda x: x[IDS[:2]], X) if e.primitive.name == "gather")
    assert _forms.name_of(eqn.replace(params=eqn.params | {"mode": "new"})) != "gather"


def test_forms_that_are_not_known_are_refused_by_the_proof():
    program = jax.make_jaxpr(EXAMPLES["scan"])(X)
    eqns = [
        eqn.replace(params={"body": 0}) if eqn.primitive.name == "scan" else eqn
        for eqn in program.jaxpr.eqns
    ]
    program = ClosedJaxpr(program.jaxpr.replace(eqns=eqns), program.consts)
    with pytest.raises(ValueError, match="does not know `scan`"):
        _row_local.RowLocal.of(program, [None], {})


# --- a JAX with other names ----------------------------------------------------------------

# What `PROGRAMS` have whose parameters are read, and calls. Some are names of other versions.
OF_SOME_VERSIONS = (*_forms.REMATS, "split", "stack", "unstack", "tile")
RENAMED = """
    bcoo_dot_general bcsr_dot_general broadcast_in_dim concatenate cond convert_element_type
    dot_general gather integer_pow jit pad reduce_max reduce_sum rev scan scatter scatter-add
    slice transpose
""".split()
RENAMED += OF_SOME_VERSIONS


@functools.cache
def found(name):
    """The names of the equations of a program."""
    return {e.primitive.name for e in equations_of(PROGRAMS[name].loss, TABLE)}


@functools.cache
def expected_gradient(name):
    return jax.grad(PROGRAMS[name].loss)(TABLE)


def test_all_that_are_read_are_renamed():
    read = {name for name, form in _forms.FORMS.items() if form.read}
    assert set.union(*map(found, PROGRAMS)) & read <= {*RENAMED}


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("primitive", RENAMED)
def test_gradients_where_parameters_are_renamed(primitive):
    """The same numbers, and no error: rows where the equation is not between, or dense."""
    names = [name for name in PROGRAMS if primitive in found(name)]
    if primitive in OF_SOME_VERSIONS and not names:
        pytest.skip("the name of another JAX")
    assert names
    for name in names[:6]:
        loss, expected = PROGRAMS[name].loss, expected_gradient(name)
        with renamed(primitive):
            gradient = jmask.grad(loss)(TABLE)
        assert_close(densified(gradient), expected, rtol=2e-5, atol=2e-6)


def test_the_warning_says_why():
    """Also where `strict` makes it an error; and `explain` goes on."""
    loss = PROGRAMS["scan"].loss
    with renamed("scan"):
        with pytest.warns(jmask.StorageFallbackWarning, match="does not know `scan`"):
            assert isinstance(jmask.grad(loss)(TABLE), jax.Array)
        with jmask.strict(), pytest.raises(Exception, match="does not know `scan`"):
            jmask.grad(loss)(TABLE)
    for primitive in ("scan", "jit", "gather"):
        with renamed(primitive):
            found = str(jmask.explain(lambda table: square(table[IDS]), TABLE))
            assert "float32[10, 4]" in found


# What a transformation has, and whether it can do without that equation's rule.
LIFTED = {
    "broadcast_in_dim": (optax.adam(0.1), True),
    "reduce_sum": (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), False),
    "cond": (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), False),
}


@pytest.mark.parametrize("primitive", LIFTED)
@pytest.mark.dtype_promotion
def test_lazy_where_parameters_are_renamed(primitive):
    """`lazy` runs what it can prove, and refuses the rest with the reason."""
    inner, is_proved = LIFTED[primitive]
    state, gradient = inner.init(TABLE), jmask.grad(lambda t: square(t[IDS]))(TABLE)
    extra = {"value": 1.0} if primitive == "cond" else {}
    expected, _ = jmask.lazy(inner).update(gradient, state, TABLE, **extra)
    with renamed(primitive):
        update = jmask.lazy(inner).update
        if is_proved:
            found, _ = update(gradient, state, TABLE, **extra)
            np.testing.assert_array_equal(found.todense(), expected.todense())
        else:
            with pytest.raises(ValueError, match=f"does not know `{primitive}`"):
                update(gradient, state, TABLE, **extra)


# --- a JAX whose primitives have other parameters -------------------------------------

PREFIX = "new_"


class _Renamed(Primitive):
    """A primitive that is run with its parameters under their old names."""

    def __init__(self, original):
        super().__init__(original.name)
        self.original = original
        self.multiple_results = original.multiple_results

    def get_bind_params(self, params):
        old = {name.removeprefix(PREFIX): x for name, x in params.items()}
        return self.original.get_bind_params(old)

    def bind(self, *args, **params):
        return self.original.bind(*args, **params)


@functools.cache
def _renamed(original):
    primitive = _Renamed(original)
    run = lambda *args, **params: original.bind(*args, **primitive.get_bind_params(params))
    # For what JAX itself runs, the body of a loop say.
    lowering = mlir.lower_fun(run, multiple_results=original.multiple_results)
    mlir.register_lowering(primitive, lowering)
    return primitive


def _in_program(x, name):
    """A jaxpr, or whatever else a parameter is, with equations renamed."""
    if isinstance(x, tuple | list):
        return type(x)(_in_program(y, name) for y in x) if type(x) in (tuple, list) else x
    if isinstance(x, Jaxpr):
        return x.replace(eqns=[_in_equation(eqn, name) for eqn in x.eqns])
    if isinstance(x, ClosedJaxpr):
        return x.replace(jaxpr=_in_program(x.jaxpr, name))
    return x


def _in_equation(eqn, name):
    params = {key: _in_program(x, name) for key, x in eqn.params.items()}
    if eqn.primitive.name != name:
        return eqn.replace(params=params)
    params = {PREFIX + key: x for key, x in params.items()}
    return eqn.replace(primitive=_renamed(eqn.primitive), params=params)


@contextlib.contextmanager
def renamed(name):
    """Let `jax.make_jaxpr` rename all parameters of the primitive `name`."""
    make_jaxpr = jax.make_jaxpr

    def renaming(*given, **how):
        def trace(*args, **kwargs):
            program = make_jaxpr(*given, **how)(*args, **kwargs)
            if how.get("return_shape"):
                return _in_program(program[0], name), program[1]
            return _in_program(program, name)

        return trace

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, jax, "make_jaxpr", make_jaxpr)
        jax.make_jaxpr = renaming
        yield
