"""Settings of the whole test suite."""

import hypothesis
import jax

# For the tests over several devices; all others run on the first.
jax.config.update("jax_num_cpu_devices", 4)

# Compilation makes the first example slow, and results must not depend on the day.
hypothesis.settings.register_profile(
    "jmask", deadline=None, derandomize=True, max_examples=25, database=None
)
hypothesis.settings.load_profile("jmask")
