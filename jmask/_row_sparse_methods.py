"""The methods of `RowSparse` that are functions of other modules, by name."""

from typing import Any

import numpy as np

from jmask._methods import TensorMethods, method


class RowSparseMethods(TensorMethods):
    """What `RowSparse` can do beside storing rows; see the functions named."""

    __slots__ = ()

    __getitem__ = method("_row_index", "getitem")
    __treescope_repr__ = method("_treescope", "rendering")

    def __len__(self) -> int:
        return self.shape[0]  # type: ignore[attr-defined]

    def __bool__(self) -> bool:
        raise TypeError(
            "a RowSparse has no truth value: use jmask.numpy.any(x) or jmask.numpy.all(x)."
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("`copy`=False: a RowSparse has no dense array to share.")
        return np.asarray(self.todense(), dtype)  # type: ignore[attr-defined]
