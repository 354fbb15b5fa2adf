"""Every wrong call gets an error that says what is wrong, and the way out.

The tables are in `wrong_calls/`: a call, the error, and words of the first line of its message
in their order.

    | # a name among the parameters                          a title
    | >>> jmask.embedding_lookup(TABLE, None)
    | TypeError: `ids` must be integers ... NoneType

A lambda is called eagerly and traced, with a table (6, 3) if it takes one. A statement without
an error defines names for the rows below it. What optax refuses before it calls jmask is
in test_sharp_bits.py, and what each argument is given in turn in test_wrong_values.py.
"""

import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests import mistakes
from tests.sparse_arrays import coo, csr

TABLES = sorted((Path(__file__).parent / "wrong_calls").glob("*.txt"))
_ROW = re.compile(
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


def rows():
    """Read the tables; the name of a row is its file and line."""
    found = {}
    for file in TABLES:
        text, definitions = file.read_text(), ""
        for match in _ROW.finditer(text):
            code = match["call"].replace("\n... ", "\n")
            line = text.count("\n", 0, match.start())
            if match["error"] is None:
                definitions += code
            else:
                words = match["words"].split(" ... ")
                name = f"{file.stem}:{line + 1}"
                found[name] = Row(file, line, code, match["error"], words, definitions)
    return found


ROWS = rows()


def check(call, row, names):
    error = eval(row.error, names)
    with pytest.raises(error) as raised:
        call()
    first = str(raised.value).strip().partition("\n")[0]
    assert re.search(".*".join(map(re.escape, row.words)), first)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.dtype_promotion
def test_wrong_call(name):
    row = ROWS[name]
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
    with pytest.raises(ValueError, match=r"may be meant for the entries .* or for"):
        jmask.masked_tensor(rows, mask)
    stored = jmask.masked_tensor(rows, rows.with_values(jnp.asarray(mask)))
    np.testing.assert_array_equal(stored.to_tensor(0), [[1, 1], [0, 0], [1, 0]])
