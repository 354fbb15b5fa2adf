"""Every argument of every public function is given what it does not take, one value at a time.

It refuses by the name of the argument, or the table says why it is right to take the value.
The rows of arguments.txt and transformations.txt: an argument, what it is given and takes of
that, as in `Arg`, and the call with the value `v`.

    | renormalize(padding_id): INTEGER, DEFAULT | NO_ROW
    |     jmask.renormalize(TABLE, IDS, 1.0, padding_id=v)

The words in capitals are in wrong_values.py.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jmask
from scripts import docs_pages
from tests import mistakes
from tests.input import wrong_values
from tests.input.wrong_values import (
    ADAGRAD,
    DEFAULT,
    FLAG,
    NAME,
    NAN,
    NUMBER,
    OF_OPTAX,
    SIGNED,
    Arg,
    because,
)
from tests.mistakes import GRADS, LAZY

_ROW = re.compile(r"^(?P<name>[^:\n]+): (?P<given>.*)\n    (?P<call>.*)$", re.M)
NAMES = {**vars(mistakes), **vars(wrong_values), "jax": jax, "jnp": jnp, "jmask": jmask}


def read(file: str, **names: Any) -> dict[str, Arg]:
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


def complaint(argument: Arg, named: tuple[str, ...], what: str) -> str | None:
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
    no_arguments = {"densify", "drop_nonfinite_rows", "strict"}
    made_by_others = set(
        "DeferredTable MaskedTensor PackedTable PaddedBags ShardedTable".split()
    )
    classes = {"GradcheckError", "StorageFallbackWarning"}
    modules = {"nn", "nnx", "numpy", "sparsecore", "tree"}  # take what jax.numpy takes
    public = {name for name in dir(jmask) if not name.startswith("_")}
    listed = {name.split("(")[0].split(".")[0].split("[")[0] for name in ARGUMENTS}
    assert public - no_arguments - set(made_by_others) - classes - modules <= listed
    of_tree = set(docs_pages.public_names(jmask.tree)) - {"leaves", "map"}  # as in jax.tree
    assert {f"tree.{name}" for name in of_tree} <= {name.split("(")[0] for name in ARGUMENTS}
