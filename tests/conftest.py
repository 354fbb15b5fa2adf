"""Settings of the whole test suite."""

import os

import hypothesis
import jax

# Most of the time goes into compiling small programs, and little into running them.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
)

# For the tests over several devices; all others run on the first.
jax.config.update("jax_num_cpu_devices", 8)

# Compilation makes the first example slow, and results must not depend on the day.
hypothesis.settings.register_profile(
    "jmask", deadline=None, derandomize=True, max_examples=20, database=None
)
hypothesis.settings.load_profile("jmask")
