"""`jmask.explain` says what `value_and_grad` does, from shapes alone, and names lines."""

import contextlib
import functools
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import pytest

import jmask
import jmask.numpy as jnm
from jmask._base.fallback import in_bytes, place_among
from tests.later import later
from tests.lookup_programs import PROGRAMS, TABLE
from tests.oracle import is_row_sparse

pytestmark = pytest.mark.sampled

nn = later("flax.linen")
nnx = later("flax.nnx")

SHAPE = jax.ShapeDtypeStruct
IDS, LARGE = SHAPE((3,), "int32"), SHAPE((2**16, 4), "float32")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Nothing is printed but where a test is about printing."""
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)


def line_of(function, text):
    """The number of the line of this file in `function` that holds `text`."""
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("name", PROGRAMS)
def test_agrees_with_the_gradient(name):
    """Of every program: the storage and the number of rows, and a reason for a fallback."""
    program = PROGRAMS[name]
    (found,) = jmask.explain(program.loss, SHAPE(TABLE.shape, TABLE.dtype)).parameters
    with warnings.catch_warnings(action="ignore", category=jmask.StorageFallbackWarning):
        gradient = jax.eval_shape(jmask.grad(program.loss), TABLE)
    assert found.is_sparse == is_row_sparse(gradient)
    assert found.nse == (gradient.nse if found.is_sparse else None)
    assert found.nbytes == TABLE.nbytes
    if program.falls_back:
        assert __file__ not in found.note
        assert "lookup_programs.py" in found.note


@pytest.mark.dtype_promotion
def test_sizes_of_tables_that_would_not_fit():
    def loss(params, ids):
        return jnp.sum(params["a"][0]["table"][ids]) + jnp.sum(params["w"])

    params = {"a": [{"table": SHAPE((10**9, 256), "bfloat16")}], "w": SHAPE((2, 3), "float32")}
    found = jmask.explain(loss, params, IDS)
    table, w = found["a.0.table"], found["w"]
    assert (table.nbytes, table.nse, table.touched) == (512 * 10**9, 3, 3 * 512)
    assert table.factor == pytest.approx(10**9 / 3)
    assert (w.nbytes, w.is_sparse, w.nse, w.touched, w.factor) == (24, False, None, 24, 1)
    text = repr(found)
    for part in ("bfloat16[1000000000, 256]", "512 GB", "row-sparse, 3 rows", "333,333,333x"):
        assert part in text
    with pytest.raises(KeyError, match=r"'a\.0\.table'"):
        found["table"]


def dense_use(params, ids):
    rows = params["item"][ids] * params["user"][ids]  # the lookups
    return jnp.sum(rows @ params["item"].T)  # the dense use


SITE, STDLIB = "/env/lib/python3/site-packages/flax/linear.py", contextlib.__file__


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([jmask.__file__, __file__], "{user}"),
        ([jax.__file__, SITE, STDLIB, __file__, "/outer.py"], f"{{user}}, in {SITE}:1"),
        ([SITE, STDLIB, "<frozen runpy>"], f"{SITE}:0"),
        (["<stdin>"], "<stdin>:0"),
        ([jax.__file__], "None"),
        ([], "None"),
    ],
)
def test_the_users_line(stack, expected):
    """The innermost that is nobody's package; else the innermost that is not in jax."""
    place = place_among((file, i) for i, file in enumerate(stack))
    user = f"{__file__}:{stack.index(__file__)}" if __file__ in stack else ""
    assert str(place) == expected.replace("{user}", user)


def test_sizes_as_one_reads_them():
    sizes = (0, 999, 1000, 99_949, 100_000, 999_499, 25_600_000, 512 * 10**9, 10**13)
    texts = "0 B,999 B,1.0 kB,99.9 kB,100 kB,999 kB,25.6 MB,512 GB,10,000 GB"
    assert ",".join(map(in_bytes, sizes)) == texts


def test_the_line_is_the_users_and_not_that_of_flax():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, ids):
            words = nn.Embed(1000, 8)
            hidden = jnp.tanh(words(ids))
            return words.attend(hidden)

    model, ids = Tied(), jnp.array([1, 2])
    params = model.init(jax.random.key(0), ids)

    def loss(params, ids):
        return jnp.sum(model.apply(params, ids) ** 2)

    note = jmask.explain(loss, params, ids)["params.Embed_0.embedding"].note
    assert f"test_explain.py:{line_of(Tied, 'attend(hidden)')})" in note
    with pytest.warns(jmask.StorageFallbackWarning) as seen:
        jmask.grad(loss)(params, ids)
    assert seen[0].filename == __file__
    assert seen[0].lineno == line_of(Tied, "attend(hidden)")
    said = str(seen[0].message)
    for part in ("`params['params']['Embed_0']['embedding']`", "(32.0 kB)", "`dot_general`"):
        assert part in said
    assert re.search(
        rf"looked up \({__file__}:{line_of(Tied, 'words(ids)')}, in .*linear", said
    )


def softmax(table, ids):
    hidden = jnp.tanh(table[ids])  # first
    return jnp.sum(hidden @ table.T)  # last


def penalty_first(table, ids):
    penalty = jnp.sum(table**2)  # last
    return penalty + jnp.sum(table[ids])  # first


def in_scan(table, ids):
    def body(total, i):
        row = table[i]  # first
        return total + jnp.sum(table @ row), None  # last

    return jax.lax.scan(body, 0.0, ids)[0]


def in_remat(table, ids):
    def inner(table):
        rows = jnp.sin(table[ids])  # first
        return jnp.sum(rows @ table.T)  # last

    return jax.checkpoint(inner)(table)


def in_a_function_of_jax(table, ids):
    largest = jnp.sort(table, axis=0)[0]  # last
    return jnp.sum(largest) + jnp.sum(table[ids])  # first


def with_sorted_columns(table, ids):
    changed = jnp.sort(table, 0)  # last
    return jnp.sum(changed[ids])  # first


def with_rows_set(table, ids):
    changed = table.at[jnp.array([0, 1])].set(0.0)  # last
    return jnp.sum(jnp.take(changed, ids, axis=0))  # first


def label_of_each_example(table, ids):
    logits = jax.vmap(lambda x: table @ x)(jnp.ones((len(ids), 4)))
    return jnp.sum(jax.vmap(lambda row, i: jax.nn.log_softmax(row)[i])(logits, ids))


def test_an_output_layer_is_no_table():
    """Its gradient is dense by nature: no warning, of whatever size."""
    with jmask.strict():
        jax.eval_shape(jmask.grad(label_of_each_example), LARGE, IDS)


def test_a_bias_of_what_is_looked_up_is_no_table():
    """As of a layer of a graph, whose nodes are then read by the senders of edges."""
    nodes = jnp.ones((40, 8))
    loss = lambda bias, ids: jnp.sum(jnp.tanh(jnp.sin(nodes) + bias[None])[ids])
    (step,) = jmask.explain(loss, SHAPE((8,), "float32"), IDS).parameters
    assert not step.note


USES = {
    softmax: "dot_general",
    penalty_first: "integer_pow",
    in_scan: "dot_general",
    in_remat: "dot_general",
    in_a_function_of_jax: "sort",
    with_sorted_columns: "sort",
    with_rows_set: "scatter",
}
OF_COMPUTED = (with_sorted_columns, with_rows_set)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("loss", USES, ids=lambda x: x.__name__)
def test_both_lines_are_named(loss, jitted):
    """Where a table is looked up, and the use that needs all of it, to which a warning points.

    Lookups in what was computed from a table are warned of where it is a megabyte or more.
    """
    ids, primitive, gradient = jnp.array([1, 2]), USES[loss], jmask.grad(loss)
    gradient = jax.jit(gradient) if jitted else gradient
    first, last = (line_of(loss, f"# {word}") for word in ("first", "last"))
    note = jmask.explain(loss, TABLE, ids)["params"].note
    for part in (f":{first})", f":{last})", f"`{primitive}` needs all of it"):
        assert part in note
    table = TABLE
    if loss in OF_COMPUTED:
        gradient(TABLE, ids)
        gradient, table = functools.partial(jax.eval_shape, gradient), LARGE
    with pytest.warns(jmask.StorageFallbackWarning) as seen:
        gradient(table, ids)
    (warning,) = seen
    assert (warning.filename, warning.lineno) == (__file__, last)
    if loss not in OF_COMPUTED:
        at = f"looked up ({__file__}:{first}), but `{primitive}` needs all of it"
        assert at in str(warning.message)
    with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match=f"`{primitive}`"):
        jmask.grad(loss)(jnp.zeros(table.shape), ids)


def test_reasons():
    def loss(p, ids):
        columns = jnp.sum(p["columns"][:, ids])
        scan = jax.lax.scan(lambda c, i: (c + p["scan"][i].sum(), None), 0.0, ids)[0]
        either = jax.lax.cond(
            ids[0] > 1, lambda t: t[ids].sum(), lambda t: t.sum(), p["either"]
        )
        cast = jnp.sum(p["cast"].astype(jnp.float32)[ids])
        weights = jnp.sum(p["w"] @ p["w"] / jnp.linalg.norm(p["w"]))  # no table: no word
        return columns + scan + either + cast + p["few"][ids].sum() + p["scalar"] + weights

    names = ("columns", "scan", "either", "unused", "cast")
    params = {
        name: SHAPE((50, 4), "bfloat16" if name == "cast" else "float32") for name in names
    }
    params |= {"few": SHAPE((2, 4), "float32"), "scalar": 1.0, "w": SHAPE((4, 4), "float32")}
    found = jmask.explain(loss, params, IDS)
    assert "not by whole rows" in found["columns"].note
    assert "`reduce_sum` needs all of it" in found["either"].note
    assert "not used" in found["unused"].note
    assert found["few"].touched == found["few"].nbytes
    assert "as many rows as the table has" in found["few"].note
    assert [found[name].nse for name in ("scan", "cast", "few")] == [3, 3, 3]
    assert {found[name].note for name in ("scan", "cast", "scalar", "w")} == {""}


def test_stacked_tables():
    """A row is one of a table, and M * V rows are all of them."""
    params = {"t": jnp.ones((3, 2000, 16)), "whole": jnp.ones((3, 2000, 16))}
    found = jmask.explain(
        lambda p, ids: jnp.sum(p["t"][:, ids]) + jnp.sum(p["whole"][ids]),
        params,
        IDS,
        platform="tpu",
    )
    assert (found["t"].nse, found["t"].leading, found["t"].touched) == (9, 2, 9 * 64)
    assert "all of them" not in found["t"].note
    assert "jmask.packed(table.reshape(6000, 16))" in found["t"].note
    assert found["whole"].touched == found["whole"].nbytes


def test_packed_tables():
    packed = jax.eval_shape(jmask.packed, SHAPE((1000, 4), "float32"))
    params = {"used": packed, "not used": packed}
    look = lambda p, ids: jmask.embedding_lookup(p["used"], ids, width=4)
    found = jmask.explain(lambda p, ids: jnp.sum(look(p, ids)), params, IDS, platform="tpu")
    assert (found["used"].nse, found["used"].touched, found["used"].note) == (3, 3 * 512, "")
    assert found["used"].array == "float32[32, 128]"  # 32 rows in a line
    assert "not used" in found["not used"].note


def test_nothing_is_warned_of_and_nothing_hidden():
    """What else becomes dense in the function is a note; `strict` does not stop it."""
    rows = jmask.RowSparse([1], jnp.ones((1, 4)), (9, 4))
    with jmask.strict():
        found = jmask.explain(lambda t: jnp.sum(t) + jnm.cos(rows).sum(), TABLE)
        tied = jmask.explain(PROGRAMS["tied"].loss, TABLE)
    (note,) = found.notes
    assert "`cos` made a sparse tensor" in note
    assert "test_explain.py" in note
    assert tied.notes == ()
    assert tied["params"].note


def test_a_gradient_inside_of_the_loss():
    """Of a table of the same shape as one that is explained, and at other lines."""
    inner = lambda t: jmask.grad(PROGRAMS["tied"].loss)(t).sum()
    found = jmask.explain(lambda t: PROGRAMS["tied"].loss(t) + inner(jnp.ones(t.shape)), TABLE)
    (note,) = found.notes
    assert "became dense" in note
    assert found["params"].note


def test_printed_once(capsys, monkeypatch):
    jmask.explain(dense_use, {"item": TABLE, "user": TABLE}, IDS)
    assert capsys.readouterr().out == ""  # an interactive session shows what is returned
    monkeypatch.delattr("sys.ps1")
    found = jmask.explain(dense_use, {"item": TABLE, "user": TABLE}, IDS)
    assert capsys.readouterr().out == f"{found!r}\n"


@pytest.mark.parametrize("row", [(64,), (4, 16), (128,), (1,)])
def test_narrow_tables_on_tpus(row):
    table = SHAPE((10**6, *row), "float32")
    for platform in ("tpu", "cpu", None):
        loss = lambda table, ids: jnp.sum(table[ids])
        (step,) = jmask.explain(loss, table, IDS, platform=platform).parameters
        is_copied = platform == "tpu" and row in ((64,), (4, 16))
        assert ("jmask.packed(table)" in step.note) == is_copied
