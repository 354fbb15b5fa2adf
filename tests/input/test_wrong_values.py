"""Every argument of every public function is given what it does not take, one value at a time.

It refuses by the name of the argument, or the table says why it is right to take the value.
The tables are in arguments.py and optimizer_arguments.py, the values in wrong_values.py.
"""

import pytest

import jmask
from scripts import docs_pages
from tests.input.arguments import TENSOR_ARGUMENTS
from tests.input.optimizer_arguments import OPTIMIZER_ARGUMENTS
from tests.input.wrong_values import Arg

ARGUMENTS: dict[str, Arg] = TENSOR_ARGUMENTS | OPTIMIZER_ARGUMENTS


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
    made_by_others = {
        "DeferredTable",
        "MaskedTensor",
        "PackedTable",
        "PaddedBags",
        "ShardedTable",
    }
    classes = {"GradcheckError", "StorageFallbackWarning"}
    modules = {  # which take what jax.numpy takes
        "nn",
        "nnx",
        "numpy",
        "sparsecore",
        "tree",
    }
    public = {name for name in dir(jmask) if not name.startswith("_")}
    listed = {name.split("(")[0].split(".")[0].split("[")[0] for name in ARGUMENTS}
    assert public - no_arguments - made_by_others - classes - modules <= listed
    of_jax = {"leaves", "map"}  # take what jax.tree takes
    functions = {
        f"tree.{name}" for name in docs_pages.public_names(jmask.tree) if name not in of_jax
    }
    assert functions <= {name.split("(")[0] for name in ARGUMENTS}
