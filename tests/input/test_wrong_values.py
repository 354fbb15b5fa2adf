"""Every wrong call gets an error that says what is wrong, and the way out.

The tables are in `wrong_calls/`: a call, the error, and words of the first line of its message
(and of notes below it) in their order.

    | # a name among the parameters                          a title
    | >>> jmask.embedding_lookup(TABLE, None)
    | TypeError: `ids` must be integers ... NoneType

A lambda is called eagerly and traced, with a table (6, 3) if it takes one. A statement without
an error defines names for the rows below it. What optax refuses before it calls jmask is
in test_sharp_bits.py.

And every argument of every public function is given what it does not take, one value at a time:
it refuses by the name of the argument, or the table says why it is right to take the value.
The rows of arguments.txt and transformations.txt: an argument, what it is given and takes of
that, as in `Arg`, and the call with the value `v`.

    | renormalize(padding_id): INTEGER, DEFAULT | NO_ROW
    |     jmask.renormalize(TABLE, IDS, 1.0, padding_id=v)

The words in capitals are what is given in turn, by what the argument takes, and reasons to take
it. `Foreign` is a tensor of another framework as Python sees one: it has a shape, a dtype that
is not NumPy's, and becomes an array of NumPy if it is asked.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from scripts import docs_pages
from tests import mistakes
from tests.compilations import TOO_FEW_DEVICES
from tests.mistakes import GRADS, LAZY, PARAMS, TABLE
from tests.sparse_arrays import coo, csr

TABLES = sorted((Path(__file__).parent / "wrong_calls").glob("*.txt"))
_CALL = re.compile(
    r"^>>> (?P<call>.*\n(?:\.\.\. .*\n)*)(?:(?P<error>[\w., ()]+): ?(?P<words>.*)\n)?", re.M
)


class Row(NamedTuple):
    """One wrong call, and the statements that define the names in it."""

    file: Path
    line: int
    code: str
    error: str
    words: list[str]
    definitions: str


def read_calls():
    """Read the tables; the name of a row is its file and line."""
    found = {}
    for file in TABLES:
        text, definitions = file.read_text(), ""
        for match in _CALL.finditer(text):
            code = match["call"].replace("\n... ", "\n")
            line = text.count("\n", 0, match.start())
            if match["error"] is None:
                definitions += code
            else:
                words = match["words"].split(" ... ")
                name = f"{file.stem}:{line + 1}"
                found[name] = Row(file, line, code, match["error"], words, definitions)
    return found


CALLS = read_calls()


def check(call, row, names):
    error = eval(row.error, names)
    with pytest.raises(error) as raised:
        call()
    first = str(raised.value).strip().partition("\n")[0]
    first = " ".join([first, *getattr(raised.value, "__notes__", ())])
    if TOO_FEW_DEVICES in first:  # which is why the test is skipped
        raise raised.value
    assert re.search(".*".join(map(re.escape, row.words)), first)


@pytest.mark.each
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.dtype_promotion
def test_wrong_call(name):
    row = CALLS[name]
    names = {**vars(mistakes), "coo": coo, "csr": csr, "jnm": jmask.numpy, "np": np}
    exec(row.definitions, names)
    code = compile("\n" * row.line + row.code, str(row.file), "eval")
    if not row.code.startswith("lambda"):
        check(lambda: eval(code, names), row, names)
        return
    call = eval(code, names)
    table = [jnp.arange(18, dtype=jnp.float32).reshape(6, 3)][: call.__code__.co_argcount]
    check(lambda: call(*table), row, names)
    check(lambda: jax.eval_shape(call, *table), row, names)


def test_mask_that_may_mean_two_things():
    """Three stored rows of a tensor of three rows: entries, or stored values?"""
    rows = jmask.RowSparse([2, 0, 3], jnp.ones((3, 2)), (3, 2))
    mask = np.array([[True, False], [True, True], [False, False]])
    stored = jmask.masked_tensor(rows, rows.with_values(jnp.asarray(mask)))
    np.testing.assert_array_equal(stored.to_tensor(0), [[1, 1], [0, 0], [1, 0]])


# --- each argument is given what it does not take ---------------------------------------


class Foreign:
    """A tensor that is none of JAX's, like one of torch."""

    shape = (6, 2)
    ndim = 2
    dtype = "torch.float32"
    is_sparse = False

    def __array__(self, dtype=None, copy=None):
        return np.ones(self.shape, np.float32)


OBJECTS = {
    "None": None, "a string": "abc", "an object": object(), "a dict": {"a": 1.0},
    "strings": np.array([["a", "b"]] * 6), "another framework's": Foreign(), "a function": len,
}  # fmt: skip
ARRAY = {
    **OBJECTS,
    "complex": jnp.full((6, 2), 1j),
    "a scalar": jnp.float32(1),
    "another shape": jnp.ones((3, 5, 7)),
    "booleans": jnp.ones((6, 2), bool),
    "nan": jnp.full((6, 2), jnp.nan),
}
NUMBER = {
    **OBJECTS,
    "nan": float("nan"),
    "infinity": float("inf"),
    "negative": -1.0,
    "complex": 1j,
    "two numbers": jnp.ones(2),
    "True": True,
}
INTEGER = {**NUMBER, "a half": 0.5, "negative": -1}
FLAG = {**OBJECTS, "1": 1, "0.0": 0.0, "an array": jnp.array([True])}
NAME = {**OBJECTS, "another name": "other", "1": 1}


@dataclasses.dataclass(frozen=True)
class Arg:
    """One argument of one function.

    Attributes:
        call: with the value in its place.
        values: what is given.
        takes: for what is rightly taken the reason.
        elsewhere: for what another library or the caller's own function refuses, which.
        named: what in backticks the error begins a name with; by default the argument.
    """

    call: Callable[[Any], object]
    values: Mapping[str, Any]
    takes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)
    named: tuple[str, ...] = ()


# The same reason for several values.
because = lambda reason, *names: dict.fromkeys(names, reason)
without = lambda table, name: {k: v for k, v in table.items() if k != name}
FUNCTION = without(OBJECTS, "a function") | {"an array": jnp.ones(2)}
DEFAULT = because("None is the default", "None")
ANY = because(
    "any tensor of numbers", "complex", "a scalar", "another shape", "booleans", "nan"
)
OF_THIS_SHAPE = because("any numbers of this shape", "complex", "booleans", "nan")
REAL = because(
    "nan is what a computation gave, and no mistake of a call", "another shape", "nan"
)
PAIRS = because("a complex table is two real ones", "complex")
INEXACT = REAL | PAIRS
NAN = because("nan is a number: skip_nonfinite and drop_nonfinite_rows are for it", "nan")
TREE = because("a tree, which None and a dict of numbers are", "None", "a dict")
WHATEVER = because("leaves that are no tensors stay as they are", *ARRAY)
SIGNED = because("a number of either sign", "negative")
FILL = because("any number", "nan", "infinity", "negative", "True")
FROM_THE_END = because("counts from the end", "negative")
GREATEST = because("the greatest entry", "infinity")
NO_ROW = because("an id that no row has", "negative")
OWN = "the loss function fails on it, with an error of its own"
OF_THE_LOSS = because(OWN, "None", "a dict", "a scalar", "complex")
OF_OPTAX = because("optax.chain unpacks the state before jmask is reached", *OBJECTS)
SUMMED = TREE | ANY
SCALED = without(SUMMED, "booleans")

# What stands beside the value in calls.
MASKED = jmask.masked_tensor(TABLE, TABLE > 0)
BAGS, SQUARE = jnp.array([[1, 2], [3, 4]]), jnp.ones((2, 2))
ADAGRAD = jmask.adagrad(0.1)
VOCAB, ZEROS = jmask.vocabulary.create(100), jax.nn.initializers.zeros
LOADED = {"step": 1, "sum": np.ones((6, 2))}
step = lambda tx, grads=GRADS, params=PARAMS: tx.update(grads, tx.init(PARAMS), params)


def mapped(function):
    """A collective of a value under `vmap`."""
    return lambda v: jax.vmap(lambda _: function(v, "i"), axis_name="i")(jnp.ones(2))


_ROW = re.compile(r"^(?P<name>[^:\n]+): (?P<given>.*)\n    (?P<call>.*)$", re.M)
NAMES = {**vars(mistakes), **globals()}


def read(file, **names):
    """The rows of a table, with what `names` has in them."""
    return {
        name: eval(f"Arg(lambda v: {call}, {given})", NAMES | names)
        for name, given, call in _ROW.findall(Path(__file__).with_name(file).read_text())
    }


ARGUMENTS = read("arguments.txt")

# Named optimizers have every argument of their signature.
SCHEDULED = because("a schedule", "a function")
TAKES = {
    "learning_rate": SCHEDULED,
    "clip_gradient": DEFAULT,
    "rescale_grad": SIGNED,
    "state_dtype": DEFAULT,
    "mu_dtype": DEFAULT,
    "mask": DEFAULT | because("a function of the parameters", "a function"),
    "adamw(weight_decay)": SCHEDULED,
}
BUILDERS = (jmask.sgd, jmask.adam, jmask.rowwise_adam)
BUILDERS += (jmask.adamw, jmask.adagrad, jmask.rowwise_adagrad, jmask.ftrl)
for build in BUILDERS:
    for name, parameter in inspect.signature(build).parameters.items():
        title = f"{build.__name__}({name})"
        beside = {"momentum": 0.9} if title == "sgd(nesterov)" else {}
        names = ("decay_mode", "state_dtype", "mu_dtype", "count", "mask")
        kind = NAME if name in names else NUMBER
        ARGUMENTS[title] = Arg(
            lambda v, f=build, n=name, k=beside: f(**{"learning_rate": 0.1, **k, n: v}),
            FLAG if isinstance(parameter.default, bool) else kind,
            TAKES.get(title) or TAKES.get(name, {}),
        )

OPTIMIZERS = {
    "adagrad": ADAGRAD,
    "lazy": LAZY,
    "dense": jmask.adam(0.1, lazy_update=False),
    "skip": jmask.skip_nonfinite(ADAGRAD),
    "multi": jmask.multi_steps(ADAGRAD, 2, GRADS),
    "drop": optax.chain(jmask.drop_nonfinite_rows(), ADAGRAD),
    "densify": optax.chain(jmask.densify(), ADAGRAD),
    "clip": optax.chain(jmask.clip_by_row_norm(1.0), ADAGRAD),
    "bound": optax.chain(ADAGRAD, jmask.max_row_norm(1.0)),
}
for name, tx in OPTIMIZERS.items():
    of_optax = OF_OPTAX if name in ("drop", "densify", "clip", "bound") else {}
    of_numbers = {} if name == "multi" else NAN
    rows = read("transformations.txt", tx=tx, OF_GRADIENTS=of_numbers, OF_STATES=of_optax)
    ARGUMENTS |= {title.replace("tx", name): row for title, row in rows.items()}


def complaint(argument, named, what):
    """Describe what a function does wrong with a value, or return None."""
    try:
        argument.call(argument.values[what])
    except (TypeError, ValueError, IndexError) as error:
        if what in argument.takes:
            return f"refuses {what}: {error}"
        if what in argument.elsewhere or any(f"`{word}" in str(error) for word in named):
            return None
        return f"refuses {what} without a name: {error}"
    except Exception as error:
        known = what in argument.elsewhere
        return None if known else f"fails on {what}: {type(error).__name__}: {error}"
    return None if what in argument.takes else f"takes {what}, and the table does not say why"


@pytest.mark.sampled
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.dtype_promotion
def test_argument(name):
    argument = ARGUMENTS[name]
    named = argument.named or (name.rpartition("(")[2].rstrip(")"),)
    complaints = [complaint(argument, named, what) for what in argument.values]
    assert not any(complaints), [text for text in complaints if text]


def test_every_public_function_is_listed():
    no_arguments = {"densify", "drop_nonfinite_rows", "keep_memory", "strict", "touched"}
    made_by_others = set("MaskedTensor PaddedBags".split())
    classes = {"GradcheckError", "StorageFallbackWarning"}
    modules = {"nn", "nnx", "numpy", "sparsecore", "tree"}  # take what jax.numpy takes
    public = {name for name in dir(jmask) if not name.startswith("_")}
    listed = {name.split("(")[0].split(".")[0].split("[")[0] for name in ARGUMENTS}
    assert public - no_arguments - set(made_by_others) - classes - modules <= listed
    of_vocabulary = set(docs_pages.public_names(jmask.vocabulary)) - {"Vocabulary"}
    names = {name.split("(")[0] for name in ARGUMENTS}
    assert {f"vocabulary.{name}" for name in of_vocabulary} <= names
    of_tree = set(docs_pages.public_names(jmask.tree)) - {"leaves", "map"}  # as in jax.tree
    assert {f"tree.{name}" for name in of_tree} <= names
