"""Rules about the source itself."""

import ast
import io
import pkgutil
import re
import runpy
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

import jmask
from jmask._tensors import methods
from tests.sampling import smoke_tests

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "jmask").rglob("*.py"))
EVERYTHING = [
    *SOURCES,
    *(ROOT / "examples").rglob("*.py"),
    *(ROOT / "benchmarks").rglob("*.py"),
    *(p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__)),
]


def for_checkers(tree):
    """What stands under `if TYPE_CHECKING:` and is never run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            yield from (inner for x in node.body for inner in ast.walk(x))


def imported(path):
    """The full names of all that a file imports when it runs.

    Imports for a type checker alone may point down, and take what is not installed.
    """
    tree = ast.parse(path.read_text())
    left_out = set(for_checkers(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in left_out:
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


@pytest.mark.each
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
    found = [x for kind in (methods.TensorMethods, methods.MaskedMethods) for x in vars(kind)]
    names = [name for name in found if name[0] != "_" and hasattr(jmask.numpy, name)]
    assert len(names) >= 34
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


# --- types: what is `Any` --------------------------------------------------------------

TYPES = ROOT / "jmask" / "_base" / "types.py"
# Such arguments have types. Trees hold several: "arrays, `RowSparse` and `MaskedTensor`".
KIND = re.compile(r"(an? |the )?(\w+ )?(`[A-Z]\w+`|(array|tensor|matrix|integers?|number)\b)")


def names_that_are_any(path):
    """The names that a module gives to `Any`, alone or as what a function takes and returns."""
    any_names = {"Any"}
    for node in ast.parse(path.read_text()).body:
        is_name = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        text = ast.unparse(node.value) if is_name else ""
        if text in any_names or "Any" in re.findall(r"\w+", text):
            any_names.add(node.targets[0].id)
    return any_names - {"Any"}


def test_three_names_are_any():
    """A tree, a function of the user's, and what is handed over; all else is checked.

    `Any` itself stands in `_base.types` alone. Other names are unions and protocols, which hold
    at run time what they hold for a checker: classes of later rooms are named in strings.
    """
    assert names_that_are_any(TYPES) == {"PyTree", "Argument", "Function"}
    for path in SOURCES:
        assert path == TYPES or not re.search(r"\bAny\b(?!\.)", code_of(path)), path
        assert path == TYPES or not {"Argument", "PyTree"} & aliased(path), path


def code_of(path):
    """The source without strings and comments."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    in_fstring = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)  # Python 3.12
    left_out = (tokenize.STRING, tokenize.COMMENT, in_fstring)
    return " ".join(x.string for x in tokens if x.type not in left_out)


def aliased(path):
    """The names to which a module gives another name."""
    nodes = [x for x in ast.parse(path.read_text()).body if isinstance(x, ast.Assign)]
    return {x.value.id for x in nodes if isinstance(x.value, ast.Name)}


def described(function):
    """The parameters of a function: name, names in the annotation, first line of its text."""
    doc = ast.get_docstring(function) or ""
    arguments = function.args
    for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        inside = ast.walk(x.annotation) if x.annotation else ()
        names = {node.id for node in inside if isinstance(node, ast.Name)}
        line = re.search(rf"^ *(?:\w+, )*{x.arg}(?:, \w+)*(?: \(.*?\))?: (.*)", doc, re.M)
        yield x.arg, names, line[1] if line else ""


def test_arguments_of_known_kinds_have_types():
    """No parameter is `Any` whose docstring says that it is an array, a number or the like."""
    checked = 0
    for path in SOURCES:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for name, names, text in described(function):
                    is_any = names <= {"PyTree", "Argument", "None"} and names
                    assert not (is_any and KIND.match(text)), (path, function.name, name, text)
                    checked += bool(text)
    assert checked > 300


def test_the_rule_of_kinds_finds_what_it_is_for():
    source = 'def f(x: PyTree, y: Argument):\n    """Do.\n\n    Args:\n        x: {}\n    """'
    for text, is_wrong in (("an array (n,).", True), ("`RowSparse`", True), ("a tree", False)):
        (name, names, line), _ = described(ast.parse(source.format(text)).body[0])
        assert (name, names, bool(KIND.match(line))) == ("x", {"PyTree"}, is_wrong)


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


def test_smoke_tests_exist():
    """A test that is renamed leaves the default tier with no word."""
    for name in smoke_tests():
        file, test = name.split("::")
        assert re.search(rf"^(def|class) {test}\b", (ROOT / file).read_text(), re.M), name
