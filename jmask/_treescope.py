"""How tensors and tables look in treescope, the printer of notebooks, penzai and flax.

    RowSparse(indices=<int32(4,)>, values=<float32(4, 64)>, shape=(1000, 64), coalesced=False)

Like a dataclass, and each array inside as treescope shows arrays: the row ids as integers, not
in the opaque form of the pytree, and nothing of what only a gradient program needs. A masked
tensor on dense storage is moreover an array to `treescope.render_array`, which leaves masked
entries out. treescope calls these functions, so that it is there when they import it.
"""

import contextlib
from typing import Any

from jmask._storage import is_sparse


def rendering(x: Any, path: str | None, subtree_renderer: Any) -> Any:
    """The rendering of a `RowSparse`, `MaskedTensor` or stored table (`__treescope_repr__`)."""
    from treescope import repr_lib

    return repr_lib.render_object_constructor(
        object_type=type(x),
        attributes=_attributes(x),
        path=path,
        subtree_renderer=subtree_renderer,
        roundtrippable=not hasattr(x, "tap"),
    )


def _attributes(x: Any) -> dict[str, Any]:
    """What is shown of a tensor, by name; of nodes that hold no arrays, their leaves."""
    children = {key.name: child for key, child in x.tree_flatten_with_keys()[0]}
    if hasattr(x, "tap"):
        del children["tap"]
        return {"shape": x.shape, **children}
    if hasattr(x, "index_leaf"):
        with contextlib.suppress(AttributeError, TypeError, IndexError):  # of a node of flags
            children["indices"] = x.indices
        return {**children, "shape": x.shape, "coalesced": x.coalesced}
    return children


def array_adapter(x: Any) -> Any:
    """How treescope reads a masked tensor as an array; None on sparse storage."""
    from treescope import type_registries

    if is_sparse(x.storage):
        return None
    of_data = type_registries.lookup_ndarray_adapter(x.storage)
    return None if of_data is None else _masked(of_data)


def _masked(of_data: Any) -> Any:
    """The adapter of the data, with the mask of the tensor beside that of the caller."""

    class Adapter(type(of_data)):  # type: ignore[misc]
        def get_axis_info_for_array_data(self, array: Any) -> Any:
            return of_data.get_axis_info_for_array_data(array.storage)

        def get_array_data_with_truncation(
            self, array: Any, mask: Any, edge_items_per_axis: Any
        ) -> Any:
            valid = array.valid if mask is None else array.valid & mask
            return of_data.get_array_data_with_truncation(
                array.storage, valid, edge_items_per_axis
            )

        def get_array_summary(self, array: Any, fast: bool) -> Any:
            shape = ", ".join(map(str, array.shape))
            return f"MaskedTensor {array.dtype}({shape})"

        def get_numpy_dtype(self, array: Any) -> Any:
            return of_data.get_numpy_dtype(array.storage)

        def get_sharding_info_for_array_data(self, array: Any) -> Any:
            return of_data.get_sharding_info_for_array_data(array.storage)

        def should_autovisualize(self, array: Any) -> bool:
            return of_data.should_autovisualize(array.storage)

    return Adapter()
