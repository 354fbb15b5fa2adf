"""The methods of `MaskedTensor`: functions of other modules by name."""

from typing import Any

from jmask._methods import TensorMethods, method


class MaskedMethods(TensorMethods):
    """What `MaskedTensor` can do, apart from what it is; see the functions named."""

    __slots__ = ()

    __getitem__ = method("_masked_index", "getitem")
    __treescope_ndarray_adapter__ = method("_treescope", "array_adapter")
    __treescope_repr__ = method("_treescope", "rendering")

    @property
    def at(self) -> Any:
        """`x.at[index].set(...)`, as `jax.Array.at`; see `jmask._masked_at`."""
        from jmask._masked_at import At

        return At(self)  # type: ignore[arg-type]

    argsort = method("_masked_shape", "argsort")
    diagonal = method("_masked_shape", "diagonal")
    repeat = method("_masked_shape", "repeat")
    sort = method("_masked_shape", "sort")

    # --- Python values ------------------------------------------------------------------

    def item(self, *index: int) -> Any:
        """The single entry, or that at `index`, as a Python number; None if masked."""
        from jmask._masked_storage import to_numpy_ma

        array = to_numpy_ma(self)
        return None if array.mask.item(*index) else array.data.item(*index)

    def tolist(self) -> Any:
        """The entries as nested lists of Python numbers; None where masked."""
        from jmask._masked_storage import to_numpy_ma

        return to_numpy_ma(self).tolist()
