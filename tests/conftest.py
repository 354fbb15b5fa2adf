"""Settings of the whole test suite."""

import gc
import itertools
import os
from collections.abc import Generator

import hypothesis
import jax
import pytest

from tests.compiled_programs import compiled_programs, remove_old
from tests.lowered_for import lower_for
from tests.sampling import leave_the_rest

# Most of the time goes into compiling small programs, and little into running them.
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

_ONE_IN = 15
# JAX keeps what each program was compiled from, and the more it keeps the longer it takes to
# lower the next: JAX 0.10 four times as long after 2,000 programs. The newest does not mind.
_TESTS_UNTIL_CLEARED = 25
_finished = itertools.count(1)

LOWERED_FOR = os.environ.get("JMASK_LOWERED_FOR")
if LOWERED_FOR is not None:
    lower_for(LOWERED_FOR)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None]:
    """Allow promotion where it is what a test, or a library it uses, is about.

    Some optimizers of optax promote dtypes, and so do other projects' tests.
    """

    def setting(promotion: str, refused: str, allowed: str) -> str:
        marks = map(item.get_closest_marker, [promotion, "peers"])
        return allowed if any(marks) else refused

    with (
        jax.numpy_rank_promotion(setting("rank_promotion", "raise", "allow")),
        jax.numpy_dtype_promotion(setting("dtype_promotion", "strict", "standard")),
    ):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if LOWERED_FOR is None:  # no other job has the rest of these
        leave_the_rest(items)
    # `make test` has some of each job that has a target of its own and needs nothing more.
    for mark in ("devices", "examples"):
        of_job = [x for x in items if x.get_closest_marker(mark)]
        alone = [x for x in of_job if not x.get_closest_marker("exhaustive")]
        for item in alone[::_ONE_IN]:
            item.add_marker(pytest.mark.sample)
    reason = f"reads how a CPU does it, and here it does as {LOWERED_FOR} would"
    for item in items if LOWERED_FOR else ():
        if item.get_closest_marker("of_cpus"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_teardown() -> None:
    if next(_finished) % _TESTS_UNTIL_CLEARED == 0:
        jax.clear_caches()


def pytest_collection_finish() -> None:
    # What is alive now stays so. To look through it again and again takes a tenth of the time.
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)
