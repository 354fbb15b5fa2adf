"""What torch calls functions of `jmask.numpy`, where it is not the same: docs/porting.md."""

import re
from pathlib import Path

_PAGE = (Path(__file__).parents[1] / "docs" / "porting.md").read_text()
(_TABLE,) = re.findall(r"^\| torch \| `jmask.numpy` \|\n(.*?)\n\n", _PAGE, re.S | re.M)

TORCH_NAMES = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", _TABLE, re.M))


def name_here(name: str) -> str:
    """The name in `jmask.numpy` of a function of torch."""
    return TORCH_NAMES.get(name, name)
