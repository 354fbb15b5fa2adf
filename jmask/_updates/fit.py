"""Gradients and parameters as optimizers take them: fitted to each other, once for a step.

    gradients   {"t": BCOO, "w": array}          masked rows of "t", array
    parameters  Model(t=RowSparse of all rows,   array, array, None
                      w=array, activation=relu)

New parameters get the form of those that were given: `Fit.as_given`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jmask._base.leaves import Model
from jmask._base.row_ids import id_dtype
from jmask._tensors.row_sparse import RowSparse
from jmask._updates.checks import check_gradient, is_full, model_of
from jmask._updates.masked_gradient import as_gradients


@dataclasses.dataclass(frozen=True)
class Fit:
    """Gradients beside the parameters that they belong to.

    Attributes:
        gradients: a tree of arrays, `RowSparse` and `MaskedTensor`.
        params: arrays and stored tables in a tree of the same structure; None if not given.
        model: what was given as parameters.
    """

    gradients: Any
    params: Any
    model: Model

    @classmethod
    def unchecked(cls, gradients: Any, params: Any) -> "Fit":
        """Gradients or updates, and parameters or None.

        Raises:
            TypeError: see `as_gradients`.
        """
        return cls(as_gradients(gradients), dense_parameters(params), model_of(params))

    @classmethod
    def of(cls, gradients: Any, params: Any) -> "Fit":
        """Gradients, and parameters that they fit, or None.

        Raises:
            TypeError, ValueError: see `as_gradients`, `check_gradient`.
        """
        fit = cls.unchecked(gradients, params)
        if params is not None:
            check_gradient(fit.gradients, fit.params)
        return fit

    def as_given(self, new: Any) -> Any:
        """New parameters in the form that they had: a model, and `RowSparse` of all rows."""

        def stored(old: Any, x: Any) -> Any:
            if not is_full(old):
                return x
            ids = jnp.arange(old.shape[0], dtype=id_dtype(old.shape[0]))
            return RowSparse.of_rows(ids, x, old.shape, coalesced=True)

        is_leaf = lambda x: is_full(x) or x is None
        new = jax.tree.map(stored, self.model.parameters, new, is_leaf=is_leaf)
        return self.model.with_parameters(new)


def dense_parameters(params: Any) -> Any:
    """The tree with each `RowSparse` that stores all its rows as the array it is.

    Of a model that holds functions the parameters alone, None for all else.
    """
    params = model_of(params).parameters
    return jax.tree.map(lambda x: x.todense() if is_full(x) else x, params, is_leaf=is_full)
