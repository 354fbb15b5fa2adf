# Every target creates what it needs; `make demo` and `make test` run on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: demo sparse-linear test test-exhaustive test-all test-tpu test-torch bench lint format clean

demo: .venv/examples.stamp
	$(BIN)/python examples/word2vec.py

sparse-linear: .venv/examples.stamp
	$(BIN)/python examples/sparse_linear.py

test: .venv/test.stamp .venv/examples.stamp
	$(BIN)/python -m pytest -n 2 -q

# All combinations of what `make test` samples.
test-exhaustive: .venv/test.stamp .venv/examples.stamp
	$(BIN)/python -m pytest -n 2 -q -m exhaustive

test-all: lint test test-exhaustive test-torch test-tpu

# Compared with torch and FBGEMM themselves. In an environment of its own: torch is large.
test-torch: .venv-torch/ready.stamp
	.venv-torch/bin/python -m pytest -n 2 -m torch -q tests

# Compiled ahead of time for TPUs, without one. In an environment of its own: libtpu, which
# two test processes may load at once since neither opens a device.
test-tpu: .venv-tpu/ready.stamp
	JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
		.venv-tpu/bin/python -m pytest -n 2 -m tpu -q tests

# Beside torch, FBGEMM and a C loop; `make bench BENCH=--quick` takes under two minutes.
bench: .venv-bench/ready.stamp
	.venv-bench/bin/python benchmarks/bench.py $(BENCH)

lint: .venv/lint.stamp .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/lint.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-torch .venv-tpu .venv-bench

.venv/bin/python:
	$(PYTHON) -m venv .venv

# One stamp for each extra of pyproject.toml.
.venv/%.stamp: pyproject.toml | .venv/bin/python
	$(BIN)/python $(INSTALL) -e '.[$*]'
	@touch $@

.venv-torch/ready.stamp: pyproject.toml
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python $(INSTALL) -e '.[test]' torch==2.13.0
	.venv-torch/bin/python $(INSTALL) --no-deps fbgemm-gpu-cpu==1.8.0
	@touch $@

.venv-bench/ready.stamp: pyproject.toml
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python $(INSTALL) -e '.[examples]' torch==2.13.0
	.venv-bench/bin/python $(INSTALL) --no-deps fbgemm-gpu-cpu==1.8.0
	@touch $@

.venv-tpu/ready.stamp: pyproject.toml
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python $(INSTALL) -e '.[test]' 'jax[tpu]'
	@touch $@
