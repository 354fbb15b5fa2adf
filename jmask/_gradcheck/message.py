"""The errors of a gradient check: where it fails, in which semantics, and what to try."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jmask._base.types import HostArray

_ORDERS = {1: "gradient", 2: "gradient of the gradient"}
_KINDS = {
    "specified": "the entries",
    "unspecified": "entries that are not specified",
    "hidden": "stored values that are no entries",
}
_MODES = {"rev": "reverse (vjp)", "fwd": "forward (jvp)"}


class GradcheckError(AssertionError):
    """A gradient is wrong, or the function has none; raised by `jmask.gradcheck`.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> jmask.gradcheck(jax.lax.stop_gradient, jnp.ones(2))
        Traceback (most recent call last):
            ...
        jmask.GradcheckError: the gradient is wrong: 2 of the 4 derivatives of this output ...
    """


@dataclasses.dataclass(frozen=True)
class Setting:
    """The semantics of a check, and its tolerances.

    Attributes:
        masked: the semantics.
        eps: the step of the central differences, times the size of the entry if over 1.
        atol, rtol: what a derivative may differ by, in all and relative to the numerical one.
        order: 1 for gradients, 2 for gradients of gradients.
        is_masked: whether the function does not depend on unspecified entries; only asked
            for a message.
    """

    masked: bool
    eps: float
    atol: float
    rtol: float
    order: int
    is_masked: Callable[[], bool]

    def semantics(self) -> str:
        """Return the semantics in words."""
        if self.masked:
            return "masked (masked=True): only specified entries exist and have gradients"
        return "plain (masked=False): every entry counts, unspecified ones are zeros"

    def advice_on_masks(self) -> str:
        """Say the semantics, and what to try where a mask of an output changes."""
        advice = "an input at which no entry is at the border of being masked"
        if not self.masked:
            advice = (
                "masked=True, if unspecified entries are not meant to be zeros; or fill them "
                "first: jmask.todense(x)"
            )
        return f"\n{_field('semantics', self.semantics())}\n{_field('to try', advice)}"


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A derivative that is not what it should be.

    Attributes:
        input, output: the two coordinates in words.
        kind: of the coordinate of the input; see `entries`.
        numerical, analytical: the derivative of one in the other.
        numerical_row, analytical_row: the same of all coordinates of the output.
        mode: "rev" or "fwd".
        failing, total: how many derivatives of this output in this input are wrong.
        sides: the difference quotients from the left and the right, or None.
        narrow: the dtype of an output computed in less than double precision, or "".
        linear: False if the derivative rule is right on single coordinates and wrong on
            their combinations.
    """

    input: str
    output: str
    kind: str
    numerical: float
    analytical: float
    numerical_row: HostArray
    analytical_row: HostArray
    mode: str
    failing: int
    total: int
    sides: tuple[float, float] | None = None
    narrow: str = ""
    linear: bool = True

    def message(self, setting: Setting) -> str:
        lines = [
            f"the {_ORDERS[setting.order]} is wrong: {self.failing} of the {self.total} "
            f"derivatives of this output at {_KINDS[self.kind]} of this input. The worst:",
            _field("input", self.input),
            _field("output", self.output),
            _field("numerical", _number(self.numerical)),
            _field("analytical", _number(self.analytical)),
            _field("semantics", setting.semantics()),
            _field("mode", f"{_MODES[self.mode]}, order {setting.order}"),
        ]
        if 1 < self.numerical_row.size <= 16:
            rows = (self.numerical_row, self.analytical_row)
            texts = [np.array2string(row, precision=5, max_line_width=200) for row in rows]
            lines.append(_field("all outputs", f"numerical  {texts[0]}"))
            lines.append(_field("", f"analytical {texts[1]}"))
        lines.extend(_field("to try", advice) for advice in self._advice(setting))
        return "\n".join(lines)

    def _advice(self, setting: Setting) -> list[str]:
        if self.narrow:
            return [
                f"the output is {self.narrow} although the inputs are in double precision: "
                "remove the cast, or give eps=1e-2, atol=1e-2"
            ]
        if not self.linear:
            return [
                "the rule is right for single entries and wrong for their combination or their "
                "multiples: it must be linear in the cotangent (vjp) or tangent (jvp), and use "
                "it"
            ]
        if self.kind == "hidden":
            return [
                "what lies under a mask and in padding may not reach a gradient: select before "
                "the function, f(jnp.where(mask, x, safe)), not after it"
            ]
        if self.kind == "unspecified":
            return [self._on_unspecified(setting)]
        return self._on_specified()

    def _on_unspecified(self, setting: Setting) -> str:
        if setting.masked and not setting.is_masked():
            return (
                "this function treats unspecified entries as zeros: check it with "
                "masked=False, or apply jmask.sparse_mask to its input first"
            )
        if setting.masked:
            return (
                "the function does not depend on this entry, but its gradient does not know: "
                "multiply the gradient by the mask, or apply jmask.sparse_mask to the input"
            )
        if not self.analytical_row.any():
            return (
                "the gradient of this function goes to specified entries only: check it with "
                "masked=True, or read the input by jmask.todense(x) for a gradient everywhere"
            )
        return (
            "if the function mixes operations with plain gradients (jmask.todense) and masked "
            "ones (x @ y of sparse x): apply jmask.sparse_mask to its input first, or use one "
            "kind"
        )

    def _on_specified(self) -> list[str]:
        if not np.isfinite(self.analytical):
            return [
                "the derivative is not finite: select before the function that causes it, "
                "f(jnp.where(ok, x, safe)), or use jmask.numpy on a masked tensor"
            ]
        if self.sides is not None:
            left, right = map(_number, self.sides)
            return [
                f"the function has a kink here (slope {left} on the left, {right} on the "
                "right): choose another input"
            ]
        guess = _guess(self.numerical_row, self.analytical_row)
        general = "compare with modes=('rev',) and ('fwd',), and look for stop_gradient, casts"
        return [*([guess] if guess else []), f"{general} and custom derivative rules"]


def unsupported(mode: str, setting: Setting, reason: Exception) -> GradcheckError:
    """Return the error of a function that JAX cannot differentiate in this mode."""
    other = {"rev": "fwd", "fwd": "rev"}[mode]
    text = str(reason).strip().splitlines()
    return GradcheckError(
        f"JAX cannot differentiate the function in this mode ({type(reason).__name__}: "
        f"{text[0] if text else ''})\n"
        + "\n".join([
            _field("semantics", setting.semantics()),
            _field("mode", f"{_MODES[mode]}, order {setting.order}"),
            _field("to try", f"modes=({other!r},) to check the other mode alone"),
        ])
    )  # fmt: skip


def _guess(numerical: HostArray, analytical: HostArray) -> str:
    """Guess the fault from a row of the Jacobian."""
    used = np.abs(numerical) > 1e-6 * np.max(np.abs(numerical), initial=1e-3)
    if not analytical.any():
        return "the derivative is zero: is the gradient stopped or a term dropped?"
    if not used.any():
        return "the function does not depend on this entry: is its gradient that of another?"
    if analytical[~used].any():
        return ""
    ratios = analytical[used] / numerical[used]
    if not np.allclose(ratios, ratios[0], rtol=1e-3):
        return ""
    if np.isclose(ratios[0], -1, rtol=1e-3):
        return "the sign is wrong"
    return f"a factor of {ratios[0]:.6g} is too much"


def _field(name: str, text: str) -> str:
    return f"  {name:<11} {text}"


def _number(x: float) -> str:
    return f"{x:.9g}"
