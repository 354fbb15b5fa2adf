"""The programs of docs/other_programs.md that are whole: they print what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "other_programs.md"


@pytest.mark.rank_promotion
@pytest.mark.dtype_promotion
@pytest.mark.filterwarnings("ignore")  # those of other libraries
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.needs(what=name)) for name in ("haiku", "numpyro")],
)
def test_program(name):
    (program,) = re.findall(
        rf"^## {name}\n.*?^```py\n(.*?)^```$", PAGE.read_text(), re.S | re.M
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, name, "exec"), {})
    assert printed.getvalue() == "True\n"
    assert program.endswith("# True\n")
