"""Arguments of tensors, gradients, lookups and stored tables; see test_wrong_values.py."""

import jax
import jax.numpy as jnp

import jmask
from tests.input.wrong_values import (
    ANY,
    ARRAY,
    DEFAULT,
    FILL,
    FLAG,
    FROM_THE_END,
    FUNCTION,
    INEXACT,
    INTEGER,
    NAME,
    NAN,
    NUMBER,
    OBJECTS,
    OF_THIS_SHAPE,
    OWN,
    REAL,
    WHATEVER,
    Arg,
    because,
    of,
)
from tests.mistakes import IDS, ROWS, TABLE, mesh, sharded

MASKED = jmask.masked_tensor(TABLE, TABLE > 0)
BAGS, SQUARE = jnp.array([[1, 2], [3, 4]]), jnp.ones((2, 2))

TENSOR_ARGUMENTS: dict[str, Arg] = {
    # --- tensors --------------------------------------------------------------------------
    "RowSparse(indices)": Arg(lambda v: jmask.RowSparse(v, SQUARE, (6, 2)), ARRAY),
    "RowSparse(values)": Arg(lambda v: jmask.RowSparse([1, 2], v, (6, 2)), ARRAY),
    "RowSparse(shape)": Arg(lambda v: jmask.RowSparse([1, 2], SQUARE, v), NUMBER, DEFAULT),
    "RowSparse(coalesced)": Arg(of(jmask.RowSparse, "coalesced", [1, 2], SQUARE, (6, 2)), FLAG),
    "RowSparse.with_values(values)": Arg(ROWS.with_values, ARRAY),
    "RowSparse.coalesce(nse)": Arg(ROWS.coalesce, INTEGER, DEFAULT),
    "RowSparse.retain(rows)": Arg(ROWS.retain, ARRAY),
    "RowSparse.astype(dtype)": Arg(ROWS.astype, NAME),
    "RowSparse.fromdense(x)": Arg(
        jmask.RowSparse.fromdense, ARRAY, {k: v for k, v in ANY.items() if k != "a scalar"}
    ),
    "RowSparse.fromdense(nse)": Arg(
        lambda v: jmask.RowSparse.fromdense(TABLE, v), INTEGER, DEFAULT
    ),
    "RowSparse.zeros(shape)": Arg(jmask.RowSparse.zeros, NUMBER),
    "RowSparse.random(key)": Arg(lambda v: jmask.RowSparse.random(v, (6, 2), 2), ARRAY),
    "masked_tensor(data)": Arg(jmask.masked_tensor, ARRAY, ANY),
    "masked_tensor(mask)": Arg(
        lambda v: jmask.masked_tensor(TABLE, v),
        ARRAY,
        DEFAULT | because("that is a mask", "booleans"),
    ),
    "as_masked_tensor(x)": Arg(jmask.as_masked_tensor, ARRAY, ANY),
    "MaskedTensor.to_tensor(fill_value)": Arg(MASKED.to_tensor, NUMBER, FILL),
    "MaskedTensor.to_sparse(nse)": Arg(MASKED.to_sparse, INTEGER, DEFAULT),
    "MaskedTensor.astype(dtype)": Arg(MASKED.astype, NAME),
    "MaskedTensor.with_values(values)": Arg(MASKED.with_values, ARRAY, OF_THIS_SHAPE),
    "cast_storage(x)": Arg(
        lambda v: jmask.cast_storage(v, "coo"),
        ARRAY,
        {k: v for k, v in ANY.items() if k != "a scalar"},
    ),
    "cast_storage(stype)": Arg(lambda v: jmask.cast_storage(TABLE, v), NAME),
    "cast_storage(nse)": Arg(of(jmask.cast_storage, "nse", TABLE, "coo"), INTEGER, DEFAULT),
    "retain(x)": Arg(lambda v: jmask.retain(v, [1]), ARRAY),
    "retain(rows)": Arg(lambda v: jmask.retain(ROWS, v), ARRAY),
    "dot(lhs)": Arg(lambda v: jmask.dot(v, TABLE.T), ARRAY, OF_THIS_SHAPE),
    "dot(rhs)": Arg(lambda v: jmask.dot(TABLE.T, v), ARRAY, OF_THIS_SHAPE),
    **{
        f"dot({name})": Arg(of(jmask.dot, name, SQUARE, SQUARE), FLAG)
        for name in ("transpose_a", "transpose_b", "masked_grad")
    },
    "dot(forward_stype)": Arg(of(jmask.dot, "forward_stype", SQUARE, SQUARE), NAME, DEFAULT),
    "add_n(tensors)": Arg(lambda v: jmask.add_n(TABLE, v), ARRAY, OF_THIS_SHAPE),
    "square_sum(x)": Arg(jmask.square_sum, ARRAY, ANY),
    "square_sum(axis)": Arg(
        lambda v: jmask.square_sum(ROWS, v),
        INTEGER,
        DEFAULT | FROM_THE_END | because("an index, for JAX as for Python", "True"),
    ),
    "square_sum(keepdims)": Arg(lambda v: jmask.square_sum(ROWS, 1, v), FLAG),
    "todense(x)": Arg(jmask.todense, ARRAY, ANY),
    "todense(masked_grad)": Arg(of(jmask.todense, "masked_grad", ROWS), FLAG),
    "sparse_mask(x)": Arg(lambda v: jmask.sparse_mask(v, ROWS), ARRAY, OF_THIS_SHAPE),
    "sparse_mask(mask)": Arg(
        lambda v: jmask.sparse_mask(TABLE, v), ARRAY, because("that is a mask", "booleans")
    ),
    "to_arrays(tree)": Arg(jmask.to_arrays, ARRAY, WHATEVER),
    "from_arrays(arrays)": Arg(lambda v: jmask.from_arrays(v, TABLE), ARRAY, NAN),
    "from_arrays(like)": Arg(
        lambda v: jmask.from_arrays({"a": TABLE}, {"a": v}),
        ARRAY,
        NAN,
        named=("like", "arrays"),
    ),
    "from_numpy_ma(x)": Arg(jmask.from_numpy_ma, ARRAY, ANY),
    "to_numpy_ma(x)": Arg(jmask.to_numpy_ma, ARRAY, ANY),
    "save_npz(file)": Arg(
        lambda v: jmask.save_npz(v, TABLE), {k: v for k, v in NUMBER.items() if k != "a string"}
    ),
    "load_npz(file)": Arg(
        jmask.load_npz, NUMBER, elsewhere=because("Python has no such file", "a string")
    ),
    "stochastic_round(x)": Arg(
        lambda v: jmask.stochastic_round(v, jnp.bfloat16, jax.random.key(0)),
        ARRAY,
        REAL | because("a tensor without dimensions", "a scalar"),
    ),
    "stochastic_round(dtype)": Arg(
        lambda v: jmask.stochastic_round(TABLE, v, jax.random.key(0)), NAME
    ),
    "stochastic_round(key)": Arg(
        lambda v: jmask.stochastic_round(TABLE, jnp.bfloat16, v), ARRAY
    ),
    # --- gradients ------------------------------------------------------------------------
    **{
        name: argument
        for f in (jmask.grad, jmask.value_and_grad)
        for name, argument in {
            f"{f.__name__}(fun)": Arg(lambda v, f=f: f(v)(TABLE), FUNCTION),
            f"{f.__name__}(argnums)": Arg(
                lambda v, f=f: f(lambda t: jnp.sum(t[IDS]), v)(TABLE), INTEGER, FROM_THE_END
            ),
            f"{f.__name__}(has_aux)": Arg(
                lambda v, f=f: f(lambda t: jnp.sum(t[IDS]), has_aux=v), FLAG
            ),
            f"{f.__name__}(fun)(table)": Arg(
                lambda v, f=f: f(lambda table: jnp.sum(table[IDS]))(v),
                ARRAY,
                REAL,
                because(OWN, "None", "a dict", "a scalar", "complex"),
            ),
        }.items()
    },
    "explain(loss_fn)": Arg(lambda v: jmask.explain(v, TABLE), FUNCTION),
    "explain(params)": Arg(
        lambda v: jmask.explain(lambda params: jnp.sum(params[IDS]), v),
        ARRAY,
        REAL,
        because(OWN, "None", "a dict", "a scalar", "complex"),
    ),
    "gradcheck(fun)": Arg(lambda v: jmask.gradcheck(v, jnp.ones(2)), FUNCTION),
    "gradcheck(args)": Arg(
        lambda v: jmask.gradcheck(lambda x: x * 2, v),
        ARRAY,
        because("any tensor of numbers", "complex", "a scalar", "another shape"),
        because(OWN, "None", "a dict") | because("no derivative at nan: GradcheckError", "nan"),
    ),
    **{
        f"gradcheck({name})": Arg(of(jmask.gradcheck, name, jnp.sin, 1.0), FLAG)
        for name in ("masked", "fast", "raise_exception")
    },
    **{
        f"gradcheck({name})": Arg(of(jmask.gradcheck, name, jnp.sin, 1.0), NUMBER)
        for name in ("eps", "atol", "rtol")
    },
    "gradcheck(modes)": Arg(of(jmask.gradcheck, "modes", jnp.sin, 1.0), NAME),
    "gradcheck(order)": Arg(of(jmask.gradcheck, "order", jnp.sin, 1.0), INTEGER),
    "is_masked_function(fun)": Arg(lambda v: jmask.is_masked_function(v, MASKED), FUNCTION),
    "is_masked_function(x)": Arg(
        lambda v: jmask.is_masked_function(lambda x: x, v),
        ARRAY,
        because("a tree of numbers", "a dict", "complex", "a scalar", "another shape", "nan"),
        named=("x", "args"),
    ),
    # --- lookups --------------------------------------------------------------------------
    "embedding_lookup(table)": Arg(
        lambda v: jmask.embedding_lookup(v, IDS),
        ARRAY,
        {k: v for k, v in ANY.items() if k != "a scalar"},
    ),
    "embedding_bag(table)": Arg(lambda v: jmask.embedding_bag(v, BAGS), ARRAY, INEXACT),
    "pad_bags(ids)": Arg(jmask.pad_bags, ARRAY),
    "pad_bags(offsets)": Arg(
        lambda v: jmask.pad_bags([0, 1, 2, 3, 4, 5], v), ARRAY, named=("offsets", "ids")
    ),
    "pad_bags(weights)": Arg(
        lambda v: jmask.pad_bags([0, 1, 2], [0, 2], weights=v), ARRAY, DEFAULT
    ),
    "pad_bags(num_bags)": Arg(of(jmask.pad_bags, "num_bags", [[1], [2]]), NUMBER, DEFAULT),
    "pad_bags(at_least)": Arg(of(jmask.pad_bags, "at_least", [[1], [2]]), NUMBER),
    "renormalize(table)": Arg(lambda v: jmask.renormalize(v, IDS, 1.0), ARRAY, INEXACT),
    **{
        f"{f.__name__}({argument})": Arg(
            lambda v, f=f, args=args, argument=argument: f(TABLE, *args, **{argument: v}),
            values,
            takes,
        )
        for f, args in ((jmask.embedding_lookup, (IDS,)), (jmask.embedding_bag, (BAGS,)))
        for argument, values, takes in (
            ("padding_id", INTEGER, DEFAULT | because("an id that no row has", "negative")),
            ("mode", NAME, {}),
            ("max_norm", NUMBER, DEFAULT),
            ("norm_type", NUMBER, because("the greatest entry", "infinity")),
        )
    },
    "embedding_lookup(ids)": Arg(lambda v: jmask.embedding_lookup(TABLE, v), ARRAY),
    "embedding_bag(ids)": Arg(lambda v: jmask.embedding_bag(TABLE, v), ARRAY),
    "embedding_bag(offsets)": Arg(of(jmask.embedding_bag, "offsets", TABLE, IDS), ARRAY),
    "embedding_bag(include_last_offset)": Arg(
        of(jmask.embedding_bag, "include_last_offset", TABLE, IDS, offsets=IDS[:0]), FLAG
    ),
    "embedding_bag(segment_ids)": Arg(
        of(jmask.embedding_bag, "segment_ids", TABLE, IDS, num_segments=2), ARRAY
    ),
    "embedding_bag(num_segments)": Arg(
        of(jmask.embedding_bag, "num_segments", TABLE, IDS, segment_ids=IDS), INTEGER, DEFAULT
    ),
    "embedding_bag(weights)": Arg(
        of(jmask.embedding_bag, "weights", TABLE, BAGS), ARRAY, DEFAULT
    ),
    "embedding_bag(combiner)": Arg(of(jmask.embedding_bag, "combiner", TABLE, BAGS), NAME),
    "renormalize(ids)": Arg(lambda v: jmask.renormalize(TABLE, v, 1.0), ARRAY),
    "renormalize(max_norm)": Arg(lambda v: jmask.renormalize(TABLE, IDS, v), NUMBER),
    "renormalize(norm_type)": Arg(
        of(jmask.renormalize, "norm_type", TABLE, IDS, 1.0),
        NUMBER,
        because("the greatest entry", "infinity"),
    ),
    "renormalize(padding_id)": Arg(
        of(jmask.renormalize, "padding_id", TABLE, IDS, 1.0),
        INTEGER,
        DEFAULT | because("an id that no row has", "negative"),
    ),
    # --- stored tables --------------------------------------------------------------------
    "sharded(table)": Arg(lambda v: jmask.sharded(v, mesh()), ARRAY, INEXACT),
    "sharded(mesh)": Arg(lambda v: jmask.sharded(TABLE, v), OBJECTS),
    **{
        f"sharded({name})": Arg(of(jmask.sharded, name, TABLE, mesh()), values, takes)
        for name, values, takes in (
            ("rows", NAME, DEFAULT),
            ("batch", NAME, DEFAULT),
            ("placement", NAME, {}),
            ("packed", FLAG, DEFAULT),
            ("capacity_factor", NUMBER, DEFAULT),
        )
    },
    "ShardedTable[ids]": Arg(lambda v: sharded()[v], ARRAY, named=("ids",)),
    "ShardedTable.with_placement(placement)": Arg(lambda v: sharded().with_placement(v), NAME),
    "packed(table)": Arg(of(jmask.packed, "table", platform="tpu"), ARRAY, INEXACT),
    "packed(platform)": Arg(of(jmask.packed, "platform", TABLE), NAME, DEFAULT),
    "huge_pages(tree)": Arg(jmask.huge_pages, ARRAY, WHATEVER),
}
