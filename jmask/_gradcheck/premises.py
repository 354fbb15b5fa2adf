"""What must hold before derivatives can be compared.

| premise                                                        | else                      |
|----------------------------------------------------------------|---------------------------|
| the function returns the same for the same input               | differences are noise     |
| no output is nan                                               | nor has it differences    |
| plain semantics: a stored zero is the same as an unstored one  | it jumps where an entry   |
|                                                                | is stored: no derivative  |
"""

import numpy as np

from jmask._gradcheck.message import GradcheckError
from jmask._gradcheck.problem import Problem


def check_premises(problem: Problem) -> None:
    """Raise a `GradcheckError` that names what is missing for a check."""
    again = problem.values({}, "running the function again")
    for output, first, second in zip(problem.outputs, problem.base, again, strict=True):
        if not np.array_equal(first, second, equal_nan=True):
            at = np.flatnonzero(first.ravel() != second.ravel())[0]
            raise GradcheckError(
                f"{output.described(int(at))} was {first.flat[at]:.9g} and then "
                f"{second.flat[at]:.9g} for the same input: the function is not deterministic. "
                "To try: fix its random key or state."
            )
        if np.isnan(first).any():
            at = np.flatnonzero(np.isnan(first).ravel())[0]
            raise GradcheckError(
                f"{output.described(int(at))} is nan at the given input, so it has no "
                "derivative there. To try: an input at which the function is defined."
            )
    if not problem.setting.masked:
        _check_stored_zeros(problem)


def _check_stored_zeros(problem: Problem) -> None:
    for number, x in enumerate(problem.inputs):
        if not len(x.unspecified):
            continue
        what = f"storing zeros at the unspecified entries of {x.path}"
        advice = (
            f"\n  semantics   {problem.setting.semantics()}"
            f"\n  to try      {problem.setting.advice_on_masks()}"
        )
        try:
            stored = problem.values({number: x.full()}, what)
        except GradcheckError:
            raise
        except Exception as reason:
            raise GradcheckError(
                f"{what} made the function raise {type(reason).__name__}: {reason}{advice}"
            ) from reason
        for output, here, there in zip(problem.outputs, problem.base, stored, strict=True):
            close = np.isclose(here, there, rtol=1e-9, atol=1e-9, equal_nan=True)
            if not close.all():
                at = int(np.flatnonzero(~close.ravel())[0])
                raise GradcheckError(
                    f"{what} changed {output.described(at)} from {here.flat[at]:.9g} to "
                    f"{there.flat[at]:.9g}: the function tells an unspecified entry from a "
                    f"zero, so it has no derivative there.{advice}"
                )
