"""Rules about the source itself."""

import ast
import pkgutil
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

import jmask
from jmask._tensors import methods

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "jmask").rglob("*.py"))
EVERYTHING = [
    *SOURCES,
    *(ROOT / "examples").rglob("*.py"),
    *(ROOT / "benchmarks").rglob("*.py"),
    *(p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__)),
]


def imported(path):
    """The full names of all that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (home + alias.name for alias in node.names)


def test_only_public_jax():
    for path in EVERYTHING:
        assert "jax._src" not in path.read_text(), path
        for name in imported(path):
            assert name.split(".")[0] not in ("jax", "optax") or "._" not in name, (path, name)


def taken_from_modules(path):
    """The full names of what a file takes from modules of jmask: `module.name`."""
    tree = ast.parse(path.read_text())
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jmask":
            names = {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
            modules |= {x: name for x, name in names.items() if name in sys.modules}
    attributes = (x for x in ast.walk(tree) if isinstance(x, ast.Attribute))
    read = (x for x in attributes if isinstance(x.ctx, ast.Load))
    names = ((getattr(x.value, "id", None), x.attr) for x in read)
    yield from (f"{modules[of]}.{name}" for of, name in names if of in modules)


def test_what_programs_take_from_jmask_exists():
    """Benchmarks and lines of conftest.py are run by few, and name what may be gone."""
    for path in EVERYTHING:
        for name in [*imported(path), *taken_from_modules(path)]:
            if name.split(".")[0] == "jmask":
                pkgutil.resolve_name(name)
    tricks = runpy.run_path(str(ROOT / "benchmarks" / "tricks.py"))["TRICKS"]
    for name, (holder, decision, _) in tricks.items():
        assert callable(getattr(holder, decision)), name


def test_nothing_depends_on_who_calls():
    """No Python frames but where a warning looks for the user's line; no words of errors."""
    for path in SOURCES:
        frames = re.findall(r"_getframe|\bf_back\b|\bf_code\b|tb_frame", path.read_text())
        assert not frames or path.name == "fallback.py", path
        assert not re.search(r"in str\((error|e)\)|metaclass=", path.read_text()), path


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_functions_have_examples(path):
    """Every function and class that `__init__` exports has a doctested example."""
    init = (ROOT / "jmask" / "__init__.py").read_text()
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        is_signature = any(getattr(x, "id", None) == "overload" for x in node.decorator_list)
        if f"from {module} import {node.name} as" in init and not is_signature:
            doc = ast.get_docstring(node) or ""
            assert ">>>" in doc or "Warning" in node.name, f"{node.name} has no example"


def test_supported_versions_are_the_same_everywhere():
    """The classifiers, the interpreters and oldest packages of make, and the Quickstart."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [re.fullmatch(r".*Python :: (3\.\d+)", x) for x in project["classifiers"]]
    versions = [match[1] for match in found if match]
    makefile = (ROOT / "Makefile").read_text()
    (line,) = re.findall(r"^PYTHON \?= .*interpreter (.*)\)$", makefile, re.M)
    assert versions[::-1] == line.split()
    pins = re.findall(r"[\w-]+==\S+", re.findall(r"^PACKAGES_oldest.*$", makefile, re.M)[0])
    assert pins == [x.replace(">=", "==") for x in project["dependencies"]]
    assert project["requires-python"] == f">={versions[0]}"
    page = (ROOT / "docs" / "quickstart.md").read_text()
    rows = re.findall(r"^\| \w+ \| (3\.\d+) \|", page, re.M)
    assert rows == versions[::-1]


def test_parameters_of_equations_are_read_in_one_place():
    """All that depends on how JAX writes programs is in `_base.forms`."""
    for path in SOURCES:
        if path.name != "forms.py":
            assert not re.search(
                r"\b(eqn|twin|equation)\.params(\[|\.get)", path.read_text()
            ), path


def test_every_method_is_a_function_of_jmask_numpy():
    names = " ".join(methods._METHODS.values()).split()
    assert len(names) >= 30
    for name in (*names, "transpose", "matrix_transpose", "imag", "real", "conj", "ravel"):
        assert callable(getattr(jmask.numpy, name)), name


def test_nothing_is_imported_late():
    """Imports inside functions hide circles; bridges import their other end when called."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            for inner in ast.walk(node) if isinstance(node, ast.FunctionDef) else ():
                if isinstance(inner, ast.ImportFrom):
                    assert not (inner.module or "").startswith("jmask"), (path.name, node.name)


def test_import_does_not_need_extras():
    """Run-time dependencies are jax, jaxlib and optax; a bridge needs its other end."""
    needed = {"jax", "jaxlib", "optax", "numpy", "jmask"}
    bridges = {"sparsecore.py": {"jax_tpu_embedding"}, "nnx.py": {"flax"}}
    for path in SOURCES:
        allowed = needed | bridges.get(path.name, set()) | sys.stdlib_module_names
        assert {name.split(".")[0] for name in imported(path)} <= allowed, path


def test_annotations_say_what_an_argument_is():
    """At most one parameter in twenty is annotated `Any`: see `_base.types` for names."""
    annotations = [
        (getattr(argument.annotation, "id", None), f"{path.name}:{node.lineno}")
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.arg not in ("self", "cls")
    ]
    places = [place for name, place in annotations if name == "Any"]
    assert len(places) <= len(annotations) / 20, places


# --- rooms: imports point up, every file is on a list ---------------------------------

FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "jmask").rglob("*.py"))
ROOMS = re.findall(r"^\| `(_\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)


def _level(module):
    """The number of the room of a module, as its path or its dotted name; faces come last."""
    parts = re.split(r"[./]", str(module))
    return ROOMS.index(parts[1]) if len(parts) > 1 and parts[1] in ROOMS else len(ROOMS)


def test_the_table_has_every_room():
    folders = (path.name for path in (ROOT / "jmask").iterdir() if path.is_dir())
    assert sorted(ROOMS) == sorted(name for name in folders if name != "__pycache__")


def test_imports_point_up():
    for file in FILES:
        for name in imported(ROOT / file):
            if name.startswith("jmask."):
                assert _level(name) <= _level(file), f"{file} imports {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_is_on_the_list_of_its_room(room):
    """Lines of the docstring: names of files, at least two spaces, and what they are."""
    tree = ast.parse((ROOT / "jmask" / room / "__init__.py").read_text())
    doc = ast.get_docstring(tree) or ""
    lines = re.findall(r"^ *((?:\w+, )*\w+)  ", doc, re.M)
    listed = [name for line in lines for name in line.split(", ")]
    files = [path.stem for path in (ROOT / "jmask" / room).glob("*.py")]
    assert sorted([*listed, "__init__"]) == sorted(files)
