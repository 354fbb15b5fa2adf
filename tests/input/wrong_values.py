"""What is given to every argument in turn, by what the argument takes.

    ARRAY     None, a string, an object, a dict, a tensor of another framework, ...
    NUMBER    None, a string, nan, a complex number, an array of two, ...

`Foreign` is a tensor of another framework as Python sees one: it has a shape, a dtype that is
not NumPy's, and becomes an array of NumPy if it is asked.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmask
from tests.mistakes import GRADS, PARAMS, TABLE


class Foreign:
    """A tensor that is none of JAX's, like one of torch."""

    shape = (6, 2)
    ndim = 2
    dtype = "torch.float32"
    is_sparse = False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
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


def because(reason: str, *names: str) -> dict[str, str]:
    """The same reason for several values."""
    return dict.fromkeys(names, reason)


def without(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in table.items() if k != name}


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
LOADED = {"step": 1, "sum": np.ones((6, 2))}


def step(tx: Any, grads: Any = GRADS, params: Any = PARAMS) -> Any:
    return tx.update(grads, tx.init(PARAMS), params)


def mapped(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A collective of a value under `vmap`."""
    return lambda v: jax.vmap(lambda _: function(v, "i"), axis_name="i")(jnp.ones(2))
