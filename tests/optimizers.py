"""Optimizers by name, which tests hold against each other: one for each way to make a step."""

import jax
import optax

import jmask

# Of optax, not lifted.
OPTAX = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "adagrad": optax.adagrad(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
}
# On arrays, and on tables of every other form.
OF_ALL_TABLES = {
    "sgd": jmask.sgd(0.1),
    "momentum": jmask.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "adam": jmask.adam(0.1),
    "adam per row": jmask.adam(0.1, count="per_row"),
    "adamw": jmask.adamw(0.1, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "adagrad": jmask.adagrad(0.1, weight_decay=0.1),
    "rowwise adagrad": jmask.rowwise_adagrad(0.1),
    "rowwise adam": jmask.rowwise_adam(0.1),
    "ftrl": jmask.ftrl(0.1),
    "optax.adamw": jmask.lazy(optax.adamw(0.1)),
    "clipped optax.adagrad": jmask.lazy(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1))
    ),
}
OPTIMIZERS = {
    **OF_ALL_TABLES,
    "sgd with all terms": jmask.sgd(
        0.1, momentum=0.9, nesterov=True, weight_decay=0.1, clip_gradient=1.0
    ),
    "adam with weight decay": jmask.adam(0.1, weight_decay=0.1),
    "adagrad with decoupled decay": jmask.adagrad(
        0.1, weight_decay=0.1, decay_mode="decoupled"
    ),
    "rowwise adam with weight decay": jmask.rowwise_adam(0.1, weight_decay=0.1),
    "adam unless not finite": jmask.skip_nonfinite(jmask.adam(0.1)),
    "adam without bad rows": optax.chain(jmask.drop_nonfinite_rows(), jmask.adam(0.1)),
    "adam within norms": optax.chain(
        jmask.clip_by_row_norm(0.5), jmask.adam(0.1), jmask.max_row_norm(2.0)
    ),
    "clipped optax.adam": jmask.lazy(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    ),
    "injected optax.adam": jmask.lazy(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)),
    "optax.sgd with momentum": jmask.lazy(optax.sgd(0.1, momentum=0.9)),
    "optax.adam": jmask.lazy(optax.adam(0.1)),
    "optax.adagrad": jmask.lazy(optax.adagrad(0.1)),
    "optax.rmsprop": jmask.lazy(optax.rmsprop(0.1, momentum=0.9)),
    "optax.adan": jmask.lazy(optax.adan(0.1)),
    "optax.optimistic_adam": jmask.lazy(optax.optimistic_adam_v2(0.1)),
}
# Those of jmask itself, which need no promotion of dtypes.
NAMED = {name: tx for name, tx in OPTIMIZERS.items() if "optax" not in name}
# Zero semantics: rows that are not in the batch move, too.
NOT_LAZY = {
    "densify": optax.chain(jmask.densify(), optax.adam(0.1)),
    "not lazy": jmask.adam(0.1, lazy_update=False),
}
