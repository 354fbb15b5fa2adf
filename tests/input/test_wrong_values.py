"""Every argument of every public function is given what it does not take, one value at a time.

It refuses by the name of the argument, or the table says why it is right to take the value.
The tables are in doors.py and optimizer_doors.py, the values in wrong_values.py.
"""

import pytest

import jmask
from tests.doors import TENSOR_DOORS
from tests.optimizer_doors import OPTIMIZER_DOORS
from tests.wrong_values import Door

DOORS: dict[str, Door] = TENSOR_DOORS | OPTIMIZER_DOORS


def complaint(door: Door, named: tuple[str, ...], what: str) -> str | None:
    """What is wrong with what a function does with a value, or None."""
    try:
        door.call(door.values[what])
    except (TypeError, ValueError, IndexError) as error:
        if what in door.takes:
            return f"refuses {what}: {error}"
        if what in door.elsewhere or any(f"`{word}" in str(error) for word in named):
            return None
        return f"refuses {what} without a name: {error}"
    except Exception as error:
        known = what in door.elsewhere
        return None if known else f"fails on {what}: {type(error).__name__}: {error}"
    return None if what in door.takes else f"takes {what}, and the table does not say why"


@pytest.mark.sampled
@pytest.mark.parametrize("name", DOORS)
@pytest.mark.dtype_promotion
def test_door(name):
    door = DOORS[name]
    named = door.named or (name.rpartition("(")[2].rstrip(")"),)
    complaints = [complaint(door, named, what) for what in door.values]
    assert not any(complaints), [text for text in complaints if text]


def test_every_public_function_has_a_door():
    no_arguments = {"densify", "drop_nonfinite_rows", "strict"}
    made_by_others = {
        "DeferredTable",
        "MaskedTensor",
        "PackedTable",
        "PaddedBags",
        "ShardedTable",
    }
    classes = {"GradcheckError", "StorageFallbackWarning"}
    modules = {
        "nn",
        "nnx",
        "numpy",
        "sparsecore",
        "tree",
    }  # of which these take what jax.numpy takes
    public = {name for name in dir(jmask) if not name.startswith("_")}
    doors = {name.split("(")[0].split(".")[0].split("[")[0] for name in DOORS}
    assert public - no_arguments - made_by_others - classes - modules <= doors
    functions = {f"tree.{name}" for name in jmask.tree.__all__}
    assert functions <= {name.split("(")[0] for name in DOORS}
