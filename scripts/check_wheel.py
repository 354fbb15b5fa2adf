"""What users get from the wheel: all of jmask, nothing else, and it works without this folder.

dist/jmask-*.whl       the modules of jmask, `py.typed`, and its metadata
a user's program       trains, and type-checks with `mypy --strict`, in an empty folder

python scripts/check_wheel.py dist       in an environment with the wheel and mypy
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests" / "typing" / "user_code.py"


def check_contents(wheel: Path) -> None:
    """Raise if the wheel lacks a file of jmask, or holds another."""
    files = [path for path in (ROOT / "jmask").rglob("*") if path.suffix in (".py", ".typed")]
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if found != expected or "jmask/py.typed" not in found:
        raise SystemExit(
            f"{wheel.name} lacks {sorted(expected - found)} and should not hold "
            f"{sorted(found - expected)}."
        )


def check_use() -> None:
    """Run and type-check the program where only what is installed can be found."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(PROGRAM, folder)
        for command in (
            [PROGRAM.name],
            ["-m", "mypy", "--strict", "--follow-untyped-imports", PROGRAM.name],
        ):
            subprocess.run([sys.executable, *command], cwd=folder, check=True)


if __name__ == "__main__":
    (wheel,) = Path(sys.argv[1]).glob("*.whl")
    check_contents(wheel)
    check_use()
