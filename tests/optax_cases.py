"""Every public optax optimizer and transformation, with arguments to build it.

`test_tables_are_complete` in test_lazy_optax.py fails when optax gains one that is not
listed here.
"""

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from tests.expressions import functions


def by_name(names, *args):
    """Constructors of optax by their names there, called with these arguments."""

    def build(name):
        home, _, function = name.rpartition(".")
        return lambda: getattr(contrib if home else optax, function)(*args)

    return {name: build(name) for name in names.split()}


RATED = """
    adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad lion nadam nadamw novograd
    optimistic_gradient_descent optimistic_adam_v2 radam rmsprop rprop sgd sign_sgd signum yogi
    contrib.acprop contrib.ademamix contrib.adopt contrib.madgrad contrib.schedule_free_adamw
    contrib.schedule_free_sgd contrib.simplified_ademamix
"""
# Row-local: lifted exactly.
ROW_LOCAL = {
    **by_name(RATED, 0.1),
    **by_name("polyak_sgd contrib.cocob"),
    "optimistic_adam": lambda: optax.optimistic_adam(0.1, optimism=0.1),
}

# Refused: with the reason the error must give.
COUNTS_OTHER_ROWS = "rows outside the gradient would count"
COUNTS_ROWS = "depends on the number of rows"
MIXING = "fromage lamb lars contrib.dog contrib.dowg contrib.momo contrib.momo_adam"
REFUSED = {
    **{name: (build, COUNTS_OTHER_ROWS) for name, build in by_name(MIXING, 0.1).items()},
    "adafactor": (lambda: optax.adafactor(0.1), COUNTS_ROWS),
    "noisy_sgd": (lambda: optax.noisy_sgd(0.1, key=0), "by position"),
    "sm3": (lambda: optax.sm3(0.1), COUNTS_OTHER_ROWS),
    "lbfgs": (lambda: optax.lbfgs(0.1), "extra argument `grad`"),
    "contrib.dadapt_adamw": (lambda: contrib.dadapt_adamw(), COUNTS_OTHER_ROWS),
    "contrib.dpsgd": (
        # Norm, noise and seed, which is a key by name in the optax after 0.2.8.
        lambda: contrib.dpsgd(0.1, 1.0, 1.0, 0),
        "to have a batch dimension",
    ),
    "contrib.muon": (lambda: contrib.muon(0.1), COUNTS_ROWS),
    "contrib.prodigy": (lambda: contrib.prodigy(), COUNTS_OTHER_ROWS),
    "contrib.galore": (lambda: contrib.galore(0.1), COUNTS_ROWS),
    "contrib.sophia": (lambda: contrib.sophia(0.1), "obj_fn"),
}

# Chains and wrappers around row-local ones.


def nothing_if_not_finite(updates):
    bad = [jnp.any(~jnp.isfinite(x)) for x in jax.tree.leaves(updates)]
    return jax.tree.map(lambda x: jnp.where(jnp.any(jnp.stack(bad)), 0, x), updates)


def forgetful():
    """Its state, of the shape of the parameters, is zero after each step."""
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    return optax.GradientTransformation(zeros, lambda u, state, params=None: (u, zeros(u)))


def keeping():
    """A state of which nothing is computed: the last gradient, twice, and the one before."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros, zeros

    def update(updates, state, params=None):
        steps = jax.tree.map(lambda g, last: -0.1 * (2 * g - last), updates, state[0])
        return steps, (updates, updates, state[0])

    return optax.GradientTransformation(init, update)


MASK = {"table": True, "other": True, "dense": False}
_READ = functions("", vars(optax) | globals() | {"jax": jax})
CHAINS = _READ("""
    adamw(cosine_decay_schedule(0.1, 100)); sgd(linear_schedule(0.1, 0.2, 10), momentum=0.9);
    chain(clip(0.01), adam(0.1)); chain(clip_by_global_norm(0.1), adam(0.1));
    chain(add_decayed_weights(0.1), trace(0.9), scale(-0.1));
    inject_hyperparams(adamw)(learning_rate=0.1);
    inject_hyperparams(adam)(learning_rate=linear_schedule(0.1, 0.2, 10), b1=0.8);
    partition(
        {"fast": adam(0.1), "slow": sgd(0.01, momentum=0.9)},
        {"table": "fast", "other": "slow", "dense": "slow"}
    );
    partition({"all": adagrad(0.1)}, lambda p: jax.tree.map(lambda _: "all", p));
    partition(
        {"train": adam(0.1), "freeze": set_to_zero()},
        {"table": "train", "other": "freeze", "dense": "train"}
    );
    masked(adam(0.1), MASK); adamw(0.1, weight_decay=0.1, mask=MASK);
    apply_if_finite(adam(0.1), 3); sgd(0.1, momentum=0.9, nesterov=True);
    adam(0.1, mu_dtype=jnp.bfloat16); named_chain(("clip", clip(1.0)), ("adam", adam(0.1)));
    chain(centralize(), adam(0.1)); chain(zero_nans(), adam(0.1)); chain(sgd(0.1), ema(0.9));
    chain(sgd(0.1), keep_params_nonnegative());
    chain(
        stateless(lambda u, _: optax.tree.scale(1 / (1 + optax.tree.vdot(u, u)), u)), adam(0.1)
    );
    identity(); set_to_zero(); chain(clip(0.5), adamw(0.1));
    chain(clip_by_global_norm(0.5), sgd(0.1)); adagrad(linear_schedule(0.1, 0.2, 10));
    chain(clip(0.3), clip_by_global_norm(0.5), adamw(0.1)); keeping();
    chain(
        stateless(lambda updates, _: nothing_if_not_finite(updates)), clip_by_global_norm(0.5),
        adagrad(0.1)
    );
    chain(trace(0.9), forgetful(), scale(-0.1));
    inject_hyperparams(sgd)(learning_rate=0.1, momentum=0.9);
    chain(masked(add_decayed_weights(0.1), MASK), adam(0.1));
    chain(set_to_zero(), zero_nans())
""")

# Wrappers and parts that are not row-local, by the reason.
_REFUSED = {
    COUNTS_OTHER_ROWS: """
        chain(scale_by_adam(), clip_by_global_norm(1.0));
        chain(add_decayed_weights(0.1), clip_by_global_norm(1.0))
    """,
    COUNTS_ROWS: "clip_by_block_rms(1.0); adaptive_grad_clip(0.1)",
    "by position": "add_noise(0.1, 0.5, 0)",
    "number of rows of a table": "flatten(adam(0.1))",
    "MultiStepsState holds gradients back": """
        MultiSteps(adam(0.1), 2).gradient_transformation()
    """,
    "ApplyEvery holds gradients back": "chain(apply_every(2), sgd(0.1))",
    "SAMState holds the way back": "contrib.sam(sgd(0.1), sgd(1.0))",
}
REFUSED_CHAINS = {
    name: (build, reason)
    for reason, text in _REFUSED.items()
    for name, build in _READ(text).items()
}

# Extra arguments of update(): the value of the loss, or what line searches take.
NEEDS_VALUE = """
    polyak_sgd scale_by_polyak contrib.momo contrib.momo_adam contrib.reduce_on_plateau
""".split()
NEEDS_GRADIENT = ("lbfgs", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch")


def extra_args(name, gradient):
    """The extra arguments that `update` of the transformation of this name takes."""
    value = {"value": jnp.float32(2.0)}
    if name in NEEDS_GRADIENT:
        return value | {"grad": gradient, "value_fn": lambda params: jnp.float32(1.0)}
    return value if name in NEEDS_VALUE else {}


# Placed un-lifted beside `lazy`: those that are exact there, all others must raise.
# Refused by optax itself before jmask sees a program: wrong or missing arguments.
REFUSED_BY_OPTAX = ("contrib.sophia", "contrib.dpsgd")
EXACT_UNLIFTED = ("identity", "set_to_zero", "freeze", "centralize", "snapshot")
# These map over their state, so that a whole `RowSparse` meets each array: its arithmetic is
# that of the dense gradient, on all rows.
DENSE_UNLIFTED = ("contrib.madgrad", "contrib.scale_by_madgrad")
_SGD = optax.sgd(0.1)
_ALL = {"table": True, "other": True, "dense": True}
_NONE = {"table": False, "other": False, "dense": False}
WITHOUT_ARGUMENTS = """
    centralize identity keep_params_nonnegative normalize_by_update_norm scale_by_adadelta
    scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief
    scale_by_distance_over_gradients scale_by_factored_rms scale_by_lbfgs scale_by_lion
    scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm
    scale_by_param_block_rms scale_by_polyak scale_by_radam scale_by_rms scale_by_rss
    scale_by_sign scale_by_sm3 scale_by_stddev scale_by_trust_ratio scale_by_yogi
    set_to_zero zero_nans contrib.normalize contrib.reduce_on_plateau
    contrib.scale_by_acprop contrib.scale_by_ademamix contrib.scale_by_adopt
    contrib.scale_by_cocob contrib.scale_by_galore contrib.scale_by_muon
    contrib.scale_by_simplified_ademamix
"""
_CALLS = """
    adaptive_grad_clip(0.5); add_decayed_weights(0.1); add_noise(0.1, 0.5, 0); apply_every(2);
    apply_if_finite(_SGD, 3); clip(0.1); clip_by_block_rms(0.1); clip_by_global_norm(0.1);
    conditionally_mask(_SGD, lambda step: step < 5);
    conditionally_transform(_SGD, lambda step: step < 5); ema(0.9); flatten(_SGD); freeze(_ALL);
    masked(_SGD, _ALL); measure_with_ema(lambda u: optax.tree.norm(u), 0.9);
    monitor({'norm': lambda u, **_: optax.tree.norm(u)}); multi_transform({'a': _SGD}, 'a');
    MultiSteps(_SGD, 2).gradient_transformation(); partition({'a': _SGD}, 'a'); scale(0.5);
    scale_by_backtracking_linesearch(5); scale_by_learning_rate(0.1); scale_by_rprop(0.1);
    scale_by_schedule(lambda count: 0.1); scale_by_zoom_linesearch(5);
    selective_transform(_SGD, freeze_mask=_NONE);
    snapshot('norm', lambda u, **_: jnp.float32(0));
    stateless(lambda g, _: jax.tree.map(lambda x: -x, g));
    stateless_with_tree_map(lambda g, _: -g); trace(0.9);
    contrib.differentially_private_aggregate(1.0, 1.0, 0); contrib.mechanize(_SGD);
    contrib.scale_by_madgrad(0.1); contrib.sam(_SGD, _SGD, opaque_mode=False);
    contrib.schedule_free(_SGD, 0.1); contrib.split_real_and_imaginary(_SGD)
"""
_UNLIFTED = functions("", vars(optax) | globals() | {"jax": jax})
UNLIFTED = {
    **by_name(WITHOUT_ARGUMENTS),
    **{call.partition("(")[0]: build for call, build in _UNLIFTED(_CALLS).items()},
    **{
        f"per_example_{kind}_norm_clip": lambda kind=kind: optax.stateless(
            lambda g, _: getattr(optax, f"per_example_{kind}_norm_clip")(g, 1.0)[0]
        )
        for kind in ("global", "layer")
    },
}

# Public functions that return a transformation and are not placed beside `lazy` here.
NOT_PLACED = {
    "chain": "it is how they are placed",
    "named_chain": "it is how they are placed",
    "inject_hyperparams": "makes constructors of the others; tested around and in lazy",
    "inject_stateful_hyperparams": "as inject_hyperparams",
    "with_extra_args_support": "returns its argument",
    "lookahead": "takes pairs of parameters, so it cannot stand in a chain",
}
