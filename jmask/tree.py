"""Arithmetic on whole gradients: trees of arrays, `RowSparse` and `MaskedTensor`.

    g = {"table": RowSparse(rows 3, 7), "w": array}      h = {"table": RowSparse(row 7), ...}
    add(g, h)       {"table": RowSparse(rows 3, 7, 7), "w": the sum}
    norm(g)         the root of the sum of the squares of all entries
    psum(g, "i")    the sum over the devices of the axis: rows are gathered, not added

`jax.tree.map` and `optax.tree` would map over the ids and the values of a `RowSparse`, which
raises; names and order of arguments are as in `optax.tree`.

**Capacity.** A sum has the capacity of all its terms. Where it must not grow, in the
carry of a scan, `add(g, h, like=g)` keeps the capacity of `like`: more different rows than
that are an error, or nan under jit. `merge`, which sums what a scan or vmap stacked, needs no
`like`:

    stacked = lax.map(lambda batch: jmask.grad(loss)(params, batch), batches)
    gradient = jmask.tree.scale(1 / k, jmask.tree.merge(stacked))
"""

from jmask._ops.tree import add as add
from jmask._ops.tree import leaves as leaves
from jmask._ops.tree import map as map
from jmask._ops.tree import mean as mean
from jmask._ops.tree import merge as merge
from jmask._ops.tree import norm as norm
from jmask._ops.tree import pmean as pmean
from jmask._ops.tree import psum as psum
from jmask._ops.tree import scale as scale
from jmask._ops.tree import size as size
from jmask._optim.touched import put as put
from jmask._optim.touched import take as take
