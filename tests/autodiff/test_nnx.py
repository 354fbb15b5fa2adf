"""`jmask.nnx.value_and_grad` and `grad` are those of nnx, with rows for tables looked up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask._tensors.row_sparse import is_row_sparse
from tests.later import later

nnx = later("flax.nnx")
pytestmark = [
    pytest.mark.dtype_promotion,
    pytest.mark.rank_promotion,
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
]

V, D = 20, 4
IDS = jnp.array([3, 5, 3, 19])


@functools.cache
def models():
    """Constructors, made late: flax takes seconds to import."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.dense = nnx.Linear(D, D, rngs=rngs)

        def rows(self, ids):
            return self.embed(ids)

        def __call__(self, ids):
            return self.dense(jnp.sin(self.rows(ids)))

    class WithState(Model):
        """Statistics, random numbers and a count."""

        def __init__(self, rngs):
            super().__init__(rngs)
            self.norm = nnx.BatchNorm(D, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def rows(self, ids):
            self.calls[...] += 1
            return self.dropout(self.norm(self.embed(ids)))

    class Rematerialised(Model):
        def __call__(self, ids):
            return nnx.remat(lambda model, ids: model.dense(model.embed(ids)))(self, ids)

    class Shared(Model):
        """One layer in two places."""

        def __init__(self, rngs):
            super().__init__(rngs)
            self.again = self.embed

        def __call__(self, ids):
            return self.dense(self.embed(ids) * self.again(ids + 1))

    class Sown(Model):
        def __call__(self, ids):
            rows = self.embed(ids)
            self.sow(nnx.Intermediate, "seen", rows)
            return self.dense(rows)

    class Writing(Model):
        """It writes to a parameter, as weight normalisation does."""

        def __call__(self, ids):
            result = super().__call__(ids)
            self.dense.bias[...] = self.dense.bias[...] + 1.0
            return result

    class Changing(Model):
        """It writes all that a module can hold, while it runs."""

        def __init__(self, rngs):
            super().__init__(rngs)
            self.old, self.calls, self.deterministic = nnx.Linear(D, D, rngs=rngs), 0, False
            self.cache = nnx.data(None)

        def __call__(self, ids):
            self.calls += 1
            self.deterministic = True
            if hasattr(self, "old"):
                self.new = self.old
                del self.old
            self.cache = nnx.Cache(self.embed(ids))
            return self.new(self.cache[...])

    every = (Model, WithState, Rematerialised, Shared, Sown, Writing, Changing)
    return {x.__name__: x for x in every}


NAMES = ("Model", "WithState", "Rematerialised", "Shared", "Sown", "Writing", "Changing")
loss = lambda model, ids: jnp.sum(model(ids) ** 3)


def dense(tree):
    """Leaves as arrays, by their paths."""
    is_leaf = is_row_sparse
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {
        jax.tree_util.keystr(p): np.asarray(x.todense() if is_leaf(x) else x) for p, x in leaves
    }


def plain(state):
    """A state with numbers in place of keys of random numbers."""

    def numbers(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(numbers, nnx.as_pure(state), is_leaf=is_row_sparse)


def assert_same(found, expected):
    found, expected = dense(plain(found)), dense(plain(expected))
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_allclose(found[path], x, rtol=2e-4, atol=1e-5, err_msg=path)


WAYS = {"eager": lambda f: f, "jit": lambda f: nnx.jit(f)}


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_models(name, way):
    """Value, gradient and what the model holds after two calls are those of nnx."""
    ours, theirs = (models()[name](nnx.Rngs(0)) for _ in range(2))
    call, dense_call = (
        WAYS[way](f(loss)) for f in (jmask.nnx.value_and_grad, nnx.value_and_grad)
    )
    for _ in range(2):
        with jmask.strict():
            value, grads = call(ours, IDS)
        expected, dense_grads = dense_call(theirs, IDS)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        place = "again" if name == "Shared" else "embed"
        assert is_row_sparse(grads[place]["embedding"].get_value())
        assert_same(grads, dense_grads)
        assert_same(nnx.state(ours), nnx.state(theirs))
        assert nnx.graphdef(ours) == nnx.graphdef(theirs)


def arguments():
    """Models, arrays and a name: fresh ones, as calls write to them."""
    make = models()
    first, second = make["WithState"](nnx.Rngs(0)), make["Model"](nnx.Rngs(1))
    return first, second, jnp.arange(4.0), nnx.Dropout(0.5, rngs=nnx.Rngs(2)), "twice"


def of_many(first, second, w, dropout, mode, ids=IDS):
    rows = jnp.sin(first(ids)) * second(ids) * dropout(w)[None]
    aux = {"rows": first.calls[...], "w": w, "count": dropout.rngs.count[...]}
    return jnp.sum(rows) * (2 if mode == "twice" else 1), aux


ARGNUMS = {
    "first": lambda: 0,
    "second": lambda: 1,
    "array": lambda: 2,
    "one in a tuple": lambda: (1,),
    "all": lambda: (0, 1, 2),
    "another order": lambda: (2, 0),
    "a module without parameters": lambda: (1, 3),
    "a filter without a match": lambda: nnx.DiffState(1, nnx.BatchStat),
    "filter": lambda: nnx.DiffState(0, nnx.PathContains("embedding")),
    "filters": lambda: (
        nnx.DiffState(1, nnx.PathContains("kernel")), nnx.DiffState(0, nnx.Param), 2,
    ),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ARGNUMS)
@pytest.mark.parametrize("kind", ["value_and_grad", "grad"])
def test_argnums(kind, case, way):
    """With aux, arguments by keyword, and state in models that are not differentiated."""
    argnums = ARGNUMS[case]()
    results, held = [], []
    for home in (jmask.nnx, nnx):
        given = arguments()
        function = getattr(home, kind)(of_many, argnums=argnums, has_aux=True)
        if way == "eager":
            *first, dropout, mode = given
            results.append(function(*first, dropout=dropout, mode=mode))
        else:
            results.append(nnx.jit(function, static_argnums=4)(*given))
        held.append(nnx.state(given[:4]))
    assert_same(*held)
    found, expected = results
    assert jax.tree.structure(dense(plain(found))) == jax.tree.structure(dense(plain(expected)))
    assert_same(*results)


def test_trees_of_modules_and_variables():
    """Modules in a dict, a variable, random numbers by keyword; no aux."""

    def fun(tree, scale, *, rngs):
        noise = rngs.normal((len(IDS), D))
        return jnp.sum(tree["model"](IDS) * tree["w"] * scale[...] + noise)

    results, counts = [], []
    for home in (jmask.nnx, nnx):
        tree = {"model": models()["Model"](nnx.Rngs(0)), "w": jnp.arange(4.0)}
        scale, rngs = nnx.Variable(jnp.float32(2)), nnx.Rngs(3)
        if home is nnx:  # which takes none by keyword
            call = nnx.value_and_grad(
                lambda *args: fun(*args[:2], rngs=args[2]), argnums=(0, 1)
            )
            results.append(call(tree, scale, rngs))
        else:
            results.append(home.value_and_grad(fun, argnums=(0, 1))(tree, scale, rngs=rngs))
        counts.append(rngs.default.count[...])
    assert counts == [1, 1]
    assert_same(*results)


def test_decorator_and_training():
    """`nnx.Optimizer` takes the gradients, and untouched rows stay."""
    model = models()["WithState"](nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jmask.lazy(optax.adam(0.05)), wrt=nnx.Param)
    start = np.asarray(model.embed.embedding[...])

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer):
        @jmask.nnx.value_and_grad(has_aux=True)
        def loss_of_model(model):
            rows = model(IDS)
            return jnp.mean(rows**2), rows.shape

        (value, shape), grads = loss_of_model(model)
        assert shape == (4, D)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < losses[0]
    others = np.setdiff1d(np.arange(V), IDS)
    np.testing.assert_array_equal(np.asarray(model.embed.embedding[...])[others], start[others])
    assert model.calls[...] == 30
    gradient = jmask.nnx.grad(has_aux=True)(lambda model: (jnp.sum(model(IDS)), 7))
    (grads, aux) = gradient(model)
    assert aux == 7
    assert is_row_sparse(grads["embed"]["embedding"].get_value())


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_one_module_in_two_arguments(argnums):
    """The derivative in both places; nnx says so of both arguments, and refuses one."""
    fun = lambda a, b: jnp.sum(jnp.sin(a(IDS)) * b(IDS + 1))
    model, same = (models()["Model"](nnx.Rngs(0)) for _ in range(2))
    found = jmask.nnx.grad(fun, argnums=argnums)(model, model)
    expected = nnx.grad(lambda model: fun(model, model))(same)
    if argnums == (0, 1):
        found, rest = found
        assert not rest
    assert is_row_sparse(found["embed"]["embedding"].get_value())
    assert_same(found, expected)


def test_without_flax(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flax", None)
    with pytest.raises(ImportError, match="pip install flax"):
        jmask.nnx.grad(loss)


def test_filters_are_for_the_function_of_nnx():
    loss, model = lambda model: model.kernel.sum(), nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for argnums in (nnx.DiffState(0, nnx.Param), (nnx.DiffState(0, nnx.Param),)):
        with pytest.raises(TypeError, match=r"`argnums` must .*jmask\.nnx\.value_and_grad"):
            jmask.value_and_grad(loss, argnums=argnums)(model)
        assert jmask.nnx.value_and_grad(loss, argnums=argnums)(model)
