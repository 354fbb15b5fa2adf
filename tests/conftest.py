"""Settings of the whole test suite."""

import gc
import importlib.util
import itertools
import os

import hypothesis
import jax
import pytest

from jmask._kernels import update_rows
from tests.compilations import TOO_FEW_DEVICES, compiled_programs, remove_old
from tests.sampling import all_but_a_sample, mark_the_rest_slow

ON_GPU = os.environ.get("JAX_PLATFORMS", "").split(",")[0] in ("cuda", "gpu", "rocm")
if ON_GPU:  # XLA takes fewer digits there by default, and each worker most of the memory
    jax.config.update("jax_default_matmul_precision", "highest")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
elif "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    # Most of the time goes into compiling small programs, and little into running them.
    # `XLA_FLAGS=--xla_backend_optimization_level=3 make test` is as users compile.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    )

# What was compiled once is read from files, by all processes and targets of a run, by the next
# run and by other checkouts. Programs are traced and lowered anew, so changed code is compiled
# anew.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if jax.config.jax_compilation_cache_dir is None:
    programs = compiled_programs()
    jax.config.update("jax_compilation_cache_dir", str(programs))
    if not IS_WORKER and programs.exists():
        remove_old(programs)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# As in JAX's own tests: nothing is broadcast to more dimensions than it has, and no dtype is
# another, without saying so.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# For the tests over several devices; all others run on the first.
jax.config.update("jax_num_cpu_devices", 8)

# Compilation makes the first example slow, and results must not depend on the day.
hypothesis.settings.register_profile(
    "jmask", deadline=None, derandomize=True, max_examples=20, database=None
)
hypothesis.settings.load_profile("jmask")

# JAX keeps what each program was compiled from, and the more it keeps the longer it takes to
# lower the next: JAX 0.10 four times as long after 2,000 programs. The newest does not mind.
_TESTS_UNTIL_CLEARED = 25
_finished = itertools.count(1)
# What tests need besides what `make test` installs, and the target that has it.
_NEEDED = {
    "torch": "make test-torch",
    "libtpu": "make test-tpu",
    "jax_cuda12_plugin": "make test-gpu",
    "expecttest": "make test-peers",
    "haiku": "make test-peers",
    "numpyro": "make test-peers",
}

# JMASK_LOWERED_FOR=cuda, or tpu: where jmask computes differently on each platform, this CPU
# takes the way of that one. Its results are tested without such a device, by another compiler.
LOWERED_FOR = os.environ.get("JMASK_LOWERED_FOR")
if LOWERED_FOR is not None:
    jax.lax.platform_dependent = lambda *args, default=None, **of: of.get(LOWERED_FOR, default)(
        *args
    )
    ways = {
        "cuda": update_rows.each(update_rows._defined),
        "tpu": update_rows.each(update_rows.summed_first(update_rows._in_one_round)),
    }
    update_rows._update_rows.lower(ways[LOWERED_FOR], platform="cpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Allow promotion where it is what a test, or a library it uses, is about."""
    rank = "allow" if item.get_closest_marker("rank_promotion") else "raise"
    dtype = "standard" if item.get_closest_marker("dtype_promotion") else "strict"
    with jax.numpy_rank_promotion(rank), jax.numpy_dtype_promotion(dtype):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Divide the tests into tiers: default, slow, and those that need what is not here."""
    # As others compute, all that is not slow is run: no other job has the rest of these.
    left_out = set((mark_the_rest_slow if LOWERED_FOR is None else all_but_a_sample)(items))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    missing = {what for what in _NEEDED if importlib.util.find_spec(what) is None}
    for item in items:
        for mark in item.iter_markers("needs"):
            what = mark.kwargs["what"]
            reason = f"needs {what}, which is not installed here: {_NEEDED[what]}"
            if what in missing:
                item.add_marker(pytest.mark.skip(reason=reason))
        if (LOWERED_FOR or ON_GPU) and item.get_closest_marker("of_cpus"):
            who = f"it does as {LOWERED_FOR} would" if LOWERED_FOR else "is a GPU"
            item.add_marker(pytest.mark.skip(reason=f"reads how a CPU does it, and here {who}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip tests over more devices than there are GPUs."""
    try:
        return (yield)
    except ValueError as error:
        if ON_GPU and TOO_FEW_DEVICES in str(error):
            pytest.skip(f"needs more devices than the {len(jax.devices())} GPUs")
        raise


def pytest_runtest_teardown():
    if next(_finished) % _TESTS_UNTIL_CLEARED == 0:
        jax.clear_caches()


def pytest_collection_finish():
    # What is alive now stays so. To look through it again and again takes a tenth of the time.
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)
