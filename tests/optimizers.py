"""Optimizers by name, which tests hold against each other: one for each way to make a step."""

import jax
import optax

import jmask
from tests.expressions import named

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


def built(text):
    """The optimizers of a table of rows, by their names."""
    names = {**vars(jmask), "jax": jax, "optax": optax, "__file__": __file__}
    return {name: make() for name, make in named("", names)(text).items()}


# On arrays, and on tables of every other form.
OF_ALL_TABLES = built("""
    sgd | sgd(0.1)
    momentum | sgd(0.1, momentum=0.9, weight_decay=0.1)
    adam | adam(0.1)
    adam per row | adam(0.1, count="per_row")
    adamw | adamw(0.1, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
    adagrad | adagrad(0.1, weight_decay=0.1)
    rowwise adagrad | rowwise_adagrad(0.1)
    rowwise adam | rowwise_adam(0.1)
    ftrl | ftrl(0.1)
    optax.adamw | lazy(optax.adamw(0.1))
    clipped optax.adagrad |
        lazy(optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1)))
""")
OPTIMIZERS = OF_ALL_TABLES | built("""
    sgd with all terms |
        sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, clip_gradient=1.0)
    adam with weight decay | adam(0.1, weight_decay=0.1)
    adagrad with decoupled decay | adagrad(0.1, weight_decay=0.1, decay_mode="decoupled")
    rowwise adam with weight decay | rowwise_adam(0.1, weight_decay=0.1)
    adam unless not finite | skip_nonfinite(adam(0.1))
    adam without bad rows | optax.chain(drop_nonfinite_rows(), adam(0.1))
    adam within norms | optax.chain(clip_by_row_norm(0.5), adam(0.1), max_row_norm(2.0))
    clipped optax.adam | lazy(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)))
    injected optax.adam | lazy(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    optax.sgd with momentum | lazy(optax.sgd(0.1, momentum=0.9))
    optax.adam | lazy(optax.adam(0.1))
    optax.adagrad | lazy(optax.adagrad(0.1))
    optax.rmsprop | lazy(optax.rmsprop(0.1, momentum=0.9))
    optax.adan | lazy(optax.adan(0.1))
    optax.optimistic_adam | lazy(optax.optimistic_adam_v2(0.1))
    averaged optax.adam | lazy(optax.chain(optax.adam(0.1), ema(0.9), touched()))
    optax.adam within norms |
        lazy(optax.chain(clip_by_row_norm(0.5), optax.adam(0.1), max_row_norm(2.0)))
""")
# Those of jmask itself, which need no promotion of dtypes.
NAMED = {name: tx for name, tx in OPTIMIZERS.items() if "optax" not in name}
# Zero semantics: rows that are not in the batch move, too.
NOT_LAZY = {
    "densify": optax.chain(jmask.densify(), optax.adam(0.1)),
    "not lazy": jmask.adam(0.1, lazy_update=False),
}
