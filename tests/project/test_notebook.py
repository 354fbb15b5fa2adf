"""The notebook runs from its first cell to its last, and shows what it says."""

import ast
import base64
import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.rank_promotion, pytest.mark.dtype_promotion]

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
PNG = b"\x89PNG"


def test_notebook(monkeypatch):
    """A cell that ends with an expression shows its value; plots are stored as pictures."""
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    names = {}
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] != "code":
            continue
        program = ast.parse("".join(cell["source"]))
        value = None
        if isinstance(program.body[-1], ast.Expr):
            last = ast.Expression(program.body.pop().value)
            exec(compile(program, f"cell {number}", "exec"), names)
            value = eval(compile(last, f"cell {number}", "eval"), names)
        else:
            exec(compile(program, f"cell {number}", "exec"), names)
        results = [x["data"] for x in cell["outputs"] if x["output_type"] == "execute_result"]
        if value is not None:
            assert "".join(results[0]["text/plain"]) == _shown(value)
    pictures = [
        base64.b64decode(data["image/png"])
        for cell in CELLS
        for data in (x.get("data", {}) for x in cell.get("outputs", ()))
        if "image/png" in data
    ]
    assert len(pictures) == len(shown) == 2
    assert all(picture.startswith(PNG) for picture in pictures)
    plt.close("all")


def _shown(value):
    """As IPython shows it: a tuple with long entries has them in lines of their own."""
    text = repr(value)
    return text if len(text) < 80 else text.replace(", Array(", ",\n Array(")
