"""The pages of the documentation site, gathered in one folder for the site generator.

    docs/*.md, CONTRIBUTING.md, CHANGELOG.md      copied; links out of docs/ are redirected
    benchmarks/results/*                          the table and the plots of the last benchmark
    api/*.md                                      written here: every public name of jmask

    python scripts/docs_pages.py build/docs       then `mkdocs build --strict`

A page of the API lists names; what is said of them comes from their docstrings when the site
is built. A public name of jmask that is on no page is an error that names it.
"""

import ast
import importlib
import itertools
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/jmask/jmask"
RESULTS = "benchmarks/results"
# Where `docs/performance.md` shows what `make bench` wrote.
RESULTS_MARK = "<!-- what `make bench` wrote -->"

# Titles, what a page is about, and the names of `jmask` on it, in the order of the page.
PAGES = {
    "tensors": (
        "Tensors and storage",
        """RowSparse MaskedTensor masked_tensor as_masked_tensor cast_storage todense
        sparse_mask retain dot add_n square_sum strict StorageFallbackWarning
        to_arrays from_arrays to_numpy_ma from_numpy_ma""",
    ),
    "gradients": (
        "Gradients",
        "value_and_grad grad explain gradcheck GradcheckError is_masked_function keep_memory",
    ),
    "optimizers": (
        "Optimizers",
        """lazy deferred densify apply_gradients apply_updates sgd adam adamw rowwise_adam
        adagrad rowwise_adagrad ftrl multi_steps skip_nonfinite drop_nonfinite_rows
        clip_by_row_norm max_row_norm ema touched rows_since stochastic_round
        from_torch_state to_torch_state""",
    ),
    "embeddings": (
        "Embeddings and tables",
        """embedding_lookup embedding_bag pad_bags PaddedBags renormalize packed
        quantize_rows sharded exchange_overflow""",
    ),
}
# Members of classes that users call: others are for the library itself. Other classes show all.
MEMBERS = {
    "RowSparse": """indices dtype row nse stype zeros random fromdense todense flat
        coalesce retain astype validate""",
    "MaskedTensor": """data mask shape dtype nbytes stype get_data get_mask to_tensor
        filled to_dense to_sparse to_sparse_csr to_row_sparse astype""",
    "PaddedBags": "weights bag_of_entry",
}
MODULES = ("numpy", "nn", "nnx", "tree", "host", "vocabulary", "sparsecore")

_ABOUT_TYPES = """Names in signatures that say what an argument is, beside `ArrayLike` and
`DTypeLike` of `jax.typing`. `PyTree`, `Argument` and `Function` are `Any` to a type checker."""

# Where a function of JAX that jmask lifts is documented.
_HOMES = ("jax.numpy", "jax.nn", "jax.scipy.special", "jax.lax")


def public_names(module: ModuleType) -> list[str]:
    """The names that a module offers: what it defines, assigns or imports `as` itself."""
    assert module.__file__ is not None
    names: list[str] = []
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            targets = [x for target in node.targets for x in ast.walk(target)]
            names += [x.id for x in targets if isinstance(x, ast.Name)]
        elif isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.name == alias.asname]
    return [name for name in names if not name.startswith("_")]


def site_pages() -> dict[str, str]:
    """Every page of the site: its path there and its Markdown."""
    pages = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
    pages = {name: _redirected(text, "docs") for name, text in pages.items()}
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        pages[name.lower()] = _redirected((ROOT / name).read_text(), ".")
    pages["performance.md"] = pages["performance.md"].replace(RESULTS_MARK, _results())
    return pages | api_pages()


def api_pages() -> dict[str, str]:
    """The pages of the API.

    Raises:
        ValueError: if a public name of jmask is on no page, or on one but not public.
    """
    import jmask

    listed = [name for _, names in PAGES.values() for name in names.split()]
    public = set(public_names(jmask)) - set(MODULES)
    if public != set(listed):
        raise ValueError(
            f"{sorted(public - set(listed))} of jmask are on no page of the API and "
            f"{sorted(set(listed) - public)} are no names of it: edit `PAGES` in {__file__}."
        )
    pages = {
        f"api/{stem}.md": _page(title, "", _documented(jmask, [[n] for n in names.split()]))
        for stem, (title, names) in PAGES.items()
    }
    pages |= {f"api/{name}.md": _module_page(f"jmask.{name}") for name in MODULES}
    return pages | {"api/types.md": _page("Types in signatures", _ABOUT_TYPES, _types())}


def _types() -> str:
    """A table of the names in `jmask/_base/types.py`, with the docstrings below them."""
    nodes = ast.parse((ROOT / "jmask" / "_base" / "types.py").read_text()).body
    rows = [
        f"| `{ast.unparse(node.targets[0])}` | {below.value.value} |"
        for node, below in itertools.pairwise(nodes)
        if isinstance(node, ast.Assign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    ]
    return "\n".join(["| name | what it is |", "|---|---|", *rows, ""])


def _module_page(path: str) -> str:
    module = importlib.import_module(path)
    same: dict[int, list[str]] = {}
    for name in public_names(module):
        same.setdefault(id(getattr(module, name)), []).append(name)
    own: list[list[str]] = []
    lifted: list[list[str]] = []
    for names in same.values():
        function = getattr(module, names[0])
        (lifted if _is_lifted(function) else own).append(names)
    table = _table_of_lifted(module, lifted) if lifted else ""
    return _page(f"`{path}`", module.__doc__ or "", table + _documented(module, own))


def _is_lifted(function: Any) -> bool:
    """Whether it is a function of JAX on other storages: JAX documents what it computes."""
    return hasattr(function, "__wrapped__") or not function.__module__.startswith("jmask")


def _page(title: str, about: str, entries: str) -> str:
    return f"# {title}\n\n{about}\n\n{entries}"


def _documented(module: ModuleType, groups: Iterable[list[str]]) -> str:
    """Entries that the site generator fills in from docstrings, and what these do not say."""
    path, entries = module.__name__, []
    for names in groups:
        found = getattr(module, names[0])
        name = found.__name__
        entry = f"::: {path}.{name}\n"
        if name in MEMBERS:
            members = ", ".join(MEMBERS[name].split())
            entry += f"    options:\n      members: [{members}]\n"
        for other in sorted(set(names) - {name}):
            entry += f"\n[](){{ #{path}.{other} }}`{other}` is another name of `{name}`.\n"
        entries.append(entry + _methods(found))
    return "\n".join(entries)


def _methods(found: Any) -> str:
    """What a class of tensors inherits: functions that are documented elsewhere, by name."""
    from jmask._tensors.methods import TensorMethods

    if not (isinstance(found, type) and issubclass(found, TensorMethods)):
        return ""
    names = [
        name for name in dir(found) if not name.startswith("_") and name not in vars(found)
    ]
    return (
        "\nAll operators of Python, and the methods and properties of JAX arrays that are "
        f"functions of [`jmask.numpy`](numpy.md): {', '.join(f'`{name}`' for name in names)}.\n"
    )


def _table_of_lifted(module: ModuleType, groups: Iterable[list[str]]) -> str:
    lines = ["## Functions of JAX", "", "| here | in JAX |", "|---|---|"]
    for names in sorted(groups, key=lambda names: names[0].lower()):
        here = ", ".join(f"[](){{ #{module.__name__}.{name} }}`{name}`" for name in names)
        lines.append(f"| {here} | {_in_jax(getattr(module, names[0]))} |")
    return "\n".join([*lines, "", "## Functions of jmask", "", ""])


def _in_jax(function: Any) -> str:
    name, (said, *_) = function.__name__, (function.__doc__ or "").split("\n", 1)
    for home in _HOMES:
        of_jax = getattr(importlib.import_module(home), name, None)
        if of_jax is not None:
            page = f"https://docs.jax.dev/en/latest/_autosummary/{home}.{name}.html"
            ours = "" if function.__doc__ == of_jax.__doc__ else f": {said}"
            return f"[`{home}.{name}`]({page}){ours}"
    return said


def _redirected(text: str, folder: str) -> str:
    """A page with its links out of the site: to the repository, or where the site has it."""

    def redirect(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = (ROOT / folder / target).resolve()
        if not path.exists():
            return match[0]  # an anchor, an address, or a mistake that the build reports
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith("docs/"):
            relative = relative.removeprefix("docs/")
        elif relative in ("CONTRIBUTING.md", "CHANGELOG.md"):
            relative = relative.lower()
        else:
            relative = f"{REPOSITORY}/blob/main/{relative}"
        return f"]({relative}{anchor})"

    return re.sub(r"\]\(([^)#\s:]+)(#[^)]*)?\)", redirect, text)


def _results() -> str:
    table = ROOT / RESULTS / "bench.md"
    parts = [table.read_text()] if table.exists() else []
    for plot in _plots():
        parts.append(f"![{plot.stem.replace('_', ' ')}](images/{plot.name})")
    return "\n\n".join(parts)


def _plots() -> list[Path]:
    return sorted((ROOT / RESULTS).glob("*.png"))


def write_site(folder: Path) -> None:
    """Write the pages and their pictures to `folder`, in place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "images", folder / "images")
    shutil.copy(ROOT / "docs" / "site.css", folder)
    for plot in _plots():
        shutil.copy(plot, folder / "images")
    for name, text in site_pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write_site(Path(sys.argv[1]))
