"""What MXNet itself makes of calls: run by an interpreter that has it, see `test_mxnet`.

A pickle on stdin, of (kind, name, arguments, options) by a key of each call, is answered by
another, of results. Arrays are lists, since MXNet's NumPy does not read pickles of today's; a
sparse array is a tuple of its parts: (values, ids, shape) of rows, (data, indices, indptr,
shape) of CSR. `test_mxnet` takes `plain` from here, where there is no MXNet.
"""

import pickle
import sys
from operator import attrgetter


def plain(x):
    """Return arrays as lists, and all else as it is."""
    if isinstance(x, tuple | list):
        return type(x)(map(plain, x))
    return x.tolist() if hasattr(x, "tolist") else x


def serve():
    import mxnet as mx

    sparse = {3: mx.nd.sparse.row_sparse_array, 4: mx.nd.sparse.csr_matrix}
    parts = {"row_sparse": ("data", "indices"), "csr": ("data", "indices", "indptr")}

    def array(x):
        if isinstance(x, tuple):
            return sparse[len(x)](tuple(x[:-1]), shape=x[-1])
        return mx.nd.array(x) if isinstance(x, list) else x

    def answer(x):
        arrays = [getattr(x, part).asnumpy() for part in parts.get(x.stype, ())]
        return plain((*arrays, x.shape) if arrays else x.asnumpy())

    def optimizer(name, table, gradients, **options):
        """The table after a step for each of the gradients."""
        rule, weight = attrgetter(name)(mx)(**options), array(table)
        state = rule.create_state(0, weight)
        for gradient in gradients:
            rule.update(0, weight, array(gradient), state)
        return answer(weight)

    def function(name, *arguments, **options):
        return answer(attrgetter(name)(mx)(*map(array, arguments), **options))

    kinds = {"optimizer": optimizer, "function": function}
    results = {}
    for key, (kind, name, arguments, options) in pickle.load(sys.stdin.buffer).items():
        results[key] = kinds[kind](name, *arguments, **options)
    pickle.dump(results, sys.stdout.buffer)


if __name__ == "__main__":
    serve()
