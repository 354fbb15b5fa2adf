"""The errors of a gradient check: where it fails, in which semantics, and what to try."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jmask._base.types import HostArray

_KINDS = {
    "specified": "the entries",
    "unspecified": "entries that are not specified",
    "hidden": "stored values that are no entries",
}
_MODES = {"rev": "reverse (vjp)", "fwd": "forward (jvp)"}
_ADVICE = {
    "specified": "compare with modes=('rev',) and ('fwd',), and look for stop_gradient, kinks, "
    "casts (with float32 inside: eps=1e-2, atol=1e-2) and custom derivative rules",
    "unspecified, masked": "if the function treats unspecified entries as zeros, check it with "
    "masked=False; or apply jmask.sparse_mask to its input first",
    "unspecified, plain": "read the input by jmask.todense(x) for a gradient everywhere, or "
    "check with masked=True; a function that mixes both needs jmask.sparse_mask on its input",
    "hidden": "what lies under a mask and in padding may not reach a gradient: select before "
    "the function, f(jnp.where(mask, x, safe)), not after it",
    "not linear": "the rule is right for single entries and wrong for their combination or "
    "their multiples: it must be linear in the cotangent (vjp) or tangent (jvp), and use it",
    "mask": "an input at which no entry is at the border of being masked; if unspecified "
    "entries are not meant to be zeros, masked=True; or fill them first: jmask.todense(x)",
}


class GradcheckError(AssertionError):
    """A gradient is wrong, or the function has none; raised by `jmask.gradcheck`.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> jmask.gradcheck(jax.lax.stop_gradient, jnp.ones(2))
        Traceback (most recent call last):
            ...
        jmask.GradcheckError: the gradient is wrong: 2 of the 4 derivatives of this output ...
    """


class Coordinate(NamedTuple):
    """One real number of the arguments or the results in words: args[0]['w'], entry (0, 1)."""

    path: str
    kind: str
    entry: str

    def __str__(self) -> str:
        return f"{self.path}, {self.entry}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is checked, in which semantics and to which tolerances; see `gradcheck`."""

    masked: bool
    eps: float
    atol: float
    rtol: float
    order: int = 1

    def fields(self, advice: str, mode: str = "") -> str:
        """Return the last lines of a message; `advice` is one of the table, or the text."""
        semantics = "plain (masked=False): every entry counts, unspecified ones are zeros"
        if self.masked:
            semantics = "masked (masked=True): only specified entries exist and have gradients"
        if advice == "unspecified":
            advice += ", masked" if self.masked else ", plain"
        lines = [_field("semantics", semantics), _field("to try", _ADVICE.get(advice, advice))]
        if mode:
            lines.insert(1, _field("mode", f"{_MODES[mode]}, order {self.order}"))
        return "\n".join(lines)

    def mismatch(
        self,
        mode: str,
        names: tuple[Coordinate, Coordinate],
        derivatives: tuple[float, float],
        excess: HostArray,
        advice: str,
    ) -> GradcheckError:
        """Return the error of the worst of some wrong derivatives.

        Args:
            names: of its input and its output.
            derivatives: the numerical and the analytical one.
            excess: by how much each of all of them exceeds its tolerance, if positive.
        """
        what = "gradient" if self.order == 1 else "gradient of the gradient"
        lines = [
            f"the {what} is wrong: {np.count_nonzero(excess > 0)} of the {excess.size} "
            f"derivatives of this output at {_KINDS[names[0].kind]} of this input. The worst:",
            _field("input", str(names[0])),
            _field("output", str(names[1])),
            _field("numerical", f"{derivatives[0]:.9g}"),
            _field("analytical", f"{derivatives[1]:.9g}"),
            self.fields(advice, mode),
        ]
        return GradcheckError("\n".join(lines))

    def unsupported(self, mode: str, reason: Exception) -> GradcheckError:
        """Return the error of a function that JAX cannot differentiate in this mode."""
        text = str(reason).strip().partition("\n")[0]
        other = {"rev": "fwd", "fwd": "rev"}[mode]
        advice = self.fields(f"modes=({other!r},) to check the other mode alone", mode)
        return GradcheckError(
            f"JAX cannot differentiate the function in this mode ({type(reason).__name__}: "
            f"{text})\n{advice}"
        )


def _field(name: str, text: str) -> str:
    return f"  {name:<11} {text}"
