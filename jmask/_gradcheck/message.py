"""The errors of a gradient check: where it fails, in which semantics, and what to try."""

import dataclasses

_ADVICE = {
    "specified": "compare with modes=('rev',) and ('fwd',), and look for stop_gradient, kinks, "
    "casts (with float32 inside: eps=1e-2, atol=1e-2) and custom derivative rules",
    "unspecified, masked=True": "if the function treats unspecified entries as zeros, check it "
    "with masked=False; or apply jmask.sparse_mask to its input first",
    "unspecified, masked=False": "read the input by jmask.todense(x) for a gradient "
    "everywhere, or check with masked=True; a function that mixes both needs "
    "jmask.sparse_mask on its input",
    "hidden": "what lies under a mask and in padding may not reach a gradient: select before "
    "the function, f(jnp.where(mask, x, safe)), not after it",
    "not linear": "the rule is right for single entries and wrong for their combination or "
    "their multiples: it must be linear in the cotangent (vjp) or tangent (jvp), and use it",
    "mask": "an input at which no entry is at the border of being masked; if unspecified "
    "entries are not meant to be zeros, masked=True; or fill them first: jmask.todense(x)",
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
    """Hold semantics, tolerances and order of a check; see `gradcheck`."""

    masked: bool = False
    eps: float = 1e-6
    atol: float = 1e-5
    rtol: float = 1e-3
    order: int = 1

    def error(self, what: str, advice: str, mode: str = "", **fields: str) -> GradcheckError:
        """Return an error, a line for each field; `advice` is a key of `_ADVICE`, or text."""
        fields["semantics"] = (
            "masked (masked=True): only specified entries exist and have gradients"
            if self.masked
            else "plain (masked=False): every entry counts, unspecified ones are zeros"
        )
        if mode:
            fields["mode"] = f"{_MODES[mode]}, order {self.order}"
        if advice == "unspecified":
            advice += f", masked={self.masked}"
        fields["to try"] = _ADVICE.get(advice, advice)
        lines = (f"  {name:<11} {text}" for name, text in fields.items())
        return GradcheckError("\n".join([what, *lines]))
