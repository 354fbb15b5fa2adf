# Every target creates what it needs; `make demo` and `make test` run on a fresh machine.
#
# Everything runs on the newest Python and JAX that install, and the tests on the oldest that
# pyproject.toml allows as well, and on versions between. Another interpreter for the newest:
# `make test PYTHON=path`, after `make clean`.
PYTHON ?= $(shell scripts/interpreter 3.13 3.12 3.11)
PYTHON_BETWEEN ?= $(shell scripts/interpreter 3.12)
PYTHON_OLDEST ?= $(shell scripts/interpreter 3.11)
# torch is compared with in the version that has a small build, for CPUs: it is for Python 3.11,
# and the newest JAX for that is 0.10.
PYTHON_OF_TORCH ?= $(PYTHON_OLDEST)
BIN := .venv/bin
# Bytecode is made of what is imported: of all that is installed it takes longer than the rest.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# It is kept, then: processes that are started by the hundred would each make it again.
unexport PYTHONDONTWRITEBYTECODE
# Each of two processes begins with half of the files: what a file compiles is compiled in one.
TESTS := -m pytest -n 2 --dist worksteal -q

.PHONY: demo sparse-linear test test-rest test-examples test-devices test-devices-exhaustive test-exhaustive test-oldest test-between test-all test-tpu \
	test-gpu test-lowered test-torch test-wheel bench scaling lint format docs wheel clean

demo: .venv/examples.stamp
	$(BIN)/python examples/word2vec.py

sparse-linear: .venv/examples.stamp
	$(BIN)/python examples/sparse_linear.py

.PHONY: dense-equivalent

# Dense, lazy and deferred tables: losses, distances and times.
dense-equivalent: .venv/examples.stamp
	$(BIN)/python examples/dense_equivalent.py

.PHONY: two-tower dlrm

# The framework of the model: `make two-tower FRAMEWORK=nnx`, or linen, equinox, plain.
two-tower: .venv/examples.stamp
	$(BIN)/python examples/two_tower.py --framework $(or $(FRAMEWORK),plain)

# On click logs of Criteo's: `make dlrm DLRM="--data train.txt --checkpoint run"`; with bags:
# `make dlrm DLRM="--values 10"`.
dlrm: .venv/examples.stamp
	$(BIN)/python examples/dlrm.py $(DLRM)

.PHONY: knowledge-graph

# TransE on a graph of pykeen's: `make knowledge-graph KG="--graph kinships"`.
knowledge-graph: .venv/examples.stamp
	$(BIN)/python $(INSTALL) --no-deps pykeen==1.11.1
	$(BIN)/python examples/knowledge_graph.py $(KG)

.PHONY: light-gcn

# On who imports what: `make light-gcn GCN="--steps 500"`.
light-gcn: .venv/examples.stamp
	$(BIN)/python examples/light_gcn.py $(GCN)

.PHONY: ngram-memory

# Other sizes of the memory: `make ngram-memory NGRAM="--rows 1e6 1e8 --dtype bfloat16"`.
ngram-memory: .venv/examples.stamp
	$(BIN)/python examples/ngram_memory.py $(NGRAM)

.PHONY: sharded

# As two processes; with `make sharded SHARDED="--checkpoint run"` one may be killed.
sharded: .venv/examples.stamp
	$(BIN)/python examples/sharded_embedding.py --processes 2 $(SHARDED)

test: .venv/test.stamp .venv/examples.stamp
	$(BIN)/python $(TESTS)

# The programs of examples/, the code in the docs, flax and equinox, gradcheck, killed training.
test-examples: .venv/test.stamp .venv/examples.stamp
	$(BIN)/python $(TESTS) -m "examples and not exhaustive" tests

# Packed and sharded tables, on eight CPU devices, and in several processes.
test-devices: .venv/test.stamp .venv/examples.stamp
	$(BIN)/python $(TESTS) -m "devices and not exhaustive" tests

# All their combinations take a quarter of an hour: not in .ci/run.
test-devices-exhaustive: .venv/test.stamp .venv/examples.stamp
	$(BIN)/python $(TESTS) -m "devices and exhaustive" tests

# All combinations of what `make test` samples.
test-exhaustive: .venv/test.stamp .venv/examples.stamp
	$(BIN)/python $(TESTS) -m "exhaustive and not (devices or tpu)"

# What `make test` leaves out of these three, in one run: as .ci/run has it.
test-rest: .venv/test.stamp .venv/examples.stamp
	$(BIN)/python $(TESTS) -m "(devices or examples or exhaustive) and not sample \
		and not (devices and exhaustive) and not (tpu or gpu or torch or peers)"

# The same tests as `make test` on the oldest versions that pyproject.toml allows, and on those
# between them and the newest.
test-oldest: .venv-oldest/ready.stamp
	.venv-oldest/bin/python $(TESTS)

test-between: .venv-between/ready.stamp
	.venv-between/bin/python $(TESTS)

test-all: lint docs test test-rest test-devices-exhaustive test-oldest test-between test-torch test-tpu test-tpu-exhaustive test-gpu test-lowered test-wheel

# Compared with torch and FBGEMM themselves. In an environment of its own: torch is large.
test-torch: .venv-torch/ready.stamp
	.venv-torch/bin/python -m pytest -n 2 -m torch -q tests

.PHONY: test-peers

# Other projects' own tests, with jmask in place of what they test; each run says what it leaves
# out, and why. The tests come with the packages.
PEERS := .venv-peers/bin/python -m pytest -q -o addopts= -o filterwarnings=
test-peers: .venv-peers/ready.stamp
	$(PEERS) -m peers tests/peers
	$(PEERS) -p tests.peers.numpy_ma --pyargs \
		numpy.ma.tests.test_core numpy.ma.tests.test_old_ma numpy.ma.tests.test_extras
	$(PEERS) -p tests.peers.optax_lifted --pyargs optax._src.alias_test \
		optax._src.transform_test optax._src.combine_test \
		optax.transforms._clipping_test optax.transforms._adding_test

.venv-peers/ready.stamp: pyproject.toml
	$(PYTHON_OF_TORCH) -m venv .venv-peers
	.venv-peers/bin/python $(INSTALL) -e '.[test]' absl-py scikit-learn expecttest torch==2.13.0
	@touch $@

# Compiled ahead of time for TPUs, without one. Two test processes may load libtpu at once since
# neither opens a device.
AHEAD_OF_TIME := JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
	TF_CPP_MIN_LOG_LEVEL=2
test-tpu: .venv-accelerators/ready.stamp
	$(AHEAD_OF_TIME) .venv-accelerators/bin/python $(TESTS) \
		-m "tpu and not exhaustive" tests

.PHONY: test-tpu-exhaustive

# Every step for every generation: not in .ci/run.
test-tpu-exhaustive: .venv-accelerators/ready.stamp
	$(AHEAD_OF_TIME) .venv-accelerators/bin/python $(TESTS) \
		-m "tpu and exhaustive" tests

# Compiled ahead of time for GPUs, without one.
test-gpu: .venv-accelerators/ready.stamp
	$(AHEAD_OF_TIME) .venv-accelerators/bin/python -m pytest -n 2 -m gpu -q tests

# What GPUs are given to compute, on the CPU; or TPUs: `make test-lowered PLATFORM=tpu`. Here on
# what depends most on it; `make test-lowered LOWERED=tests` on everything.
LOWERED := tests/optim/test_named_optimizers.py tests/lazy/test_lazy_one_pass.py \
	tests/optim/test_conditional_steps.py tests/optim/test_inside_programs.py
test-lowered: .venv/test.stamp .venv/examples.stamp
	JMASK_LOWERED_FOR=$(or $(PLATFORM),cuda) $(BIN)/python $(TESTS) $(LOWERED)

# Sharded steps compiled for pods that are only described: the table of docs/scaling.md.
scaling: .venv-accelerators/ready.stamp
	.venv-accelerators/bin/python $(INSTALL) 'rich>=13'
	$(AHEAD_OF_TIME) PYTHONPATH=. .venv-accelerators/bin/python benchmarks/scaling.py

.PHONY: tpu-cost

# Estimates of steps on TPUs by the compiler's schedules: the table of docs/tpu.md. All of it takes
# half an hour; `make tpu-cost TPU_COST="--generations v5e --lookups 8192"`.
tpu-cost: .venv-accelerators/ready.stamp
	$(AHEAD_OF_TIME) PYTHONPATH=. .venv-accelerators/bin/python benchmarks/tpu_cost.py $(TPU_COST)

# Beside optax, a C loop, and torch, FBGEMM and TensorFlow, which are processes of their own, and
# MXNet with an interpreter that has it: `make bench BENCH="--mxnet-python PATH"`.
# `make bench BENCH=--quick`: about four minutes.
bench: .venv/examples.stamp .venv-bench-torch/ready.stamp .venv-bench-tf/ready.stamp
	$(BIN)/python benchmarks/bench.py $(foreach who,torch fbgemm, \
		--$(who)-python .venv-bench-torch/bin/python) \
		--tensorflow-python .venv-bench-tf/bin/python $(BENCH)

.PHONY: bench-cores

# What a step gains from one core to all: `make bench-cores CORES="--only DLRM"`.
bench-cores: .venv/examples.stamp .venv-bench-torch/ready.stamp
	$(BIN)/python benchmarks/cores.py $(foreach who,torch fbgemm, \
		--$(who)-python .venv-bench-torch/bin/python) $(CORES)

# The documentation, in build/site; every warning is an error.
docs: .venv-docs/ready.stamp
	.venv-docs/bin/python scripts/docs_pages.py build/docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

# The source distribution, and the wheel built from it, in dist.
wheel: .venv/build.stamp
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

# In an environment made for it, which has the wheel and what that brings.
test-wheel: wheel
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python $(INSTALL) dist/*.whl mypy
	.venv-wheel/bin/python scripts/check_wheel.py dist

.PHONY: test-wheels

# The same with each Python that is supported: before a release.
test-wheels:
	for python in $(PYTHON) $(PYTHON_BETWEEN) $(PYTHON_OLDEST); do \
		$(MAKE) test-wheel PYTHON=$$python || exit 1; \
	done

lint: .venv/lint.stamp .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/lint.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .venv .venv-*

.venv/bin/python:
	$(PYTHON) -m venv .venv

# One stamp for each extra of pyproject.toml.
.venv/%.stamp: pyproject.toml | .venv/bin/python
	$(BIN)/python $(INSTALL) -e '.[$*]'
	@touch $@

.venv-torch/ready.stamp: pyproject.toml
	$(PYTHON_OF_TORCH) -m venv .venv-torch
	.venv-torch/bin/python $(INSTALL) -e '.[test]' torch==2.13.0
	.venv-torch/bin/python $(INSTALL) --no-deps fbgemm-gpu-cpu==1.8.0
	@touch $@

# Environments of their own, since the benchmark does not need them: what does not install is
# left out, and the next run tries again.
.venv-bench-torch/ready.stamp:
	{ $(PYTHON_OF_TORCH) -m venv .venv-bench-torch && \
		.venv-bench-torch/bin/python $(INSTALL) numpy torch==2.13.0 && \
		.venv-bench-torch/bin/python $(INSTALL) --no-deps fbgemm-gpu-cpu==1.8.0 && \
		touch $@; } || echo 'torch and FBGEMM do not install here: going on without them'

.venv-bench-tf/ready.stamp:
	{ $(PYTHON) -m venv .venv-bench-tf && \
		.venv-bench-tf/bin/python $(INSTALL) tensorflow-cpu==2.21.0 && touch $@; } || \
		echo 'TensorFlow does not install here: going on without it'

.venv-docs/ready.stamp: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(INSTALL) -e '.[docs]'
	@touch $@

OLDEST := 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*(wanted.replace(">=", "==") for wanted in project["dependencies"]))'

.venv-oldest/ready.stamp: pyproject.toml
	$(PYTHON_OLDEST) -m venv .venv-oldest
	.venv-oldest/bin/python $(INSTALL) -e '.[test,examples]' $$($(PYTHON_OLDEST) -c $(OLDEST))
	@touch $@

.venv-between/ready.stamp: pyproject.toml
	$(PYTHON_BETWEEN) -m venv .venv-between
	.venv-between/bin/python $(INSTALL) -e '.[test,examples]' 'jax==0.11.*' 'jaxlib==0.11.*'
	@touch $@

OF_THIS_JAXLIB := 'from importlib.metadata import version; jaxlib = version("jaxlib"); \
	print(f"jax-cuda12-plugin=={jaxlib} jax-cuda12-pjrt=={jaxlib}")'

# Compilers only: of CUDA what compiling needs, and none of the libraries that running would.
.venv-accelerators/ready.stamp: pyproject.toml
	$(PYTHON) -m venv .venv-accelerators
	.venv-accelerators/bin/python $(INSTALL) -e '.[test]' 'jax[tpu]'
	.venv-accelerators/bin/python $(INSTALL) --no-deps jax-tpu-embedding==0.1.0 \
		nvidia-cuda-nvcc-cu12 $$(.venv-accelerators/bin/python -c $(OF_THIS_JAXLIB))
	@touch $@
