# Every target creates what it needs: `make demo` and `make test` run on a machine that has Python
# and pip. ARGS goes to the program: `make dlrm ARGS="--values 10"`, `make test ARGS=-x`. Another
# interpreter for the newest versions: `make test PYTHON=path`, after `make clean`.
PYTHON ?= $(shell scripts/interpreter 3.14 3.13 3.12 3.11)
PYTHON_between ?= $(shell scripts/interpreter 3.12)
PYTHON_oldest ?= $(shell scripts/interpreter 3.11)
$(foreach x,torch peers mxnet addons,$(eval PYTHON_$x ?= $$(PYTHON_oldest)))# newer: large, or none

# What .venv-NAME has, and what is installed there alone; .venv has extras of pyproject.toml.
PACKAGES_between := -e '.[test,examples]' 'jax==0.11.*' 'jaxlib==0.11.*'
PACKAGES_oldest := -e '.[test,examples]' jax==0.10.0 jaxlib==0.10.0 optax==0.2.8
PACKAGES_torch := -e '.[test]' torch==2.13.0
PACKAGES_peers := -e '.[test]' absl-py scikit-learn expecttest torch==2.13.0 dm-haiku numpyro
PACKAGES_accelerators := -e '.[test]' 'jax[tpu,cuda12-local]' 'rich>=13'# compilers, no libraries
PACKAGES_tensorflow := tensorflow-cpu==2.21.0
PACKAGES_mxnet := mxnet==1.9.1 numpy==1.23.5
PACKAGES_addons := tensorflow-addons==0.23.0 tensorflow-cpu==2.15.1
PACKAGES_docs := -e '.[docs]'
ALONE_torch := fbgemm-gpu-cpu==1.8.0
ALONE_accelerators := jax-tpu-embedding==0.1.0 nvidia-cuda-nvcc-cu12

# Bytecode is written for what is imported, and kept: for all that is installed it takes longer.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
PY := .venv/bin/python
# Each of two processes begins with half of the files: what a file compiles is compiled in one.
PYTEST := -m pytest -n 2 --dist worksteal -q
# Only files with such tests are read: to import all others takes longer than some of the tests.
NEEDS = "needs(what='$1')$(if $2, and $2)" $(ARGS) $(shell grep -rl --include=*.py 'what="$1"' tests)
AHEAD := JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
	TF_CPP_MIN_LOG_LEVEL=2 PYTHONPATH=. .venv-accelerators/bin/python
PEERS := .venv-peers/bin/python -m pytest -q -o addopts= -o filterwarnings=

.PHONY: $(shell sed -n 's/^\([a-z -]*\):.*/\1/p' Makefile)

# Examples: `make hash-grid ARGS=--help`; examples/README.md has a table of them.
demo: word2vec
dense-equivalent hash-grid low-precision masked-adagrad sequences sparse-linear: .venv/examples.stamp
	$(PY) examples/$(subst -,_,$@).py $(ARGS)
open-vocabulary table-on-disk: .venv/examples.stamp ; $(PY) examples/$(subst -,_,$@).py $(ARGS)
dlrm knowledge-graph light-gcn ngram-memory two-tower word2vec: .venv/examples.stamp
	$(PY) examples/$(subst -,_,$@)/train.py $(ARGS)
sharded: .venv/examples.stamp ; $(PY) examples/sharded_embedding.py --processes 2 $(ARGS)
knowledge-graph: .venv/pykeen.stamp

# Tiers of tests: the default one, `slow`, and what needs a library or compiler of its own.
test: .venv/test.stamp .venv/examples.stamp ; $(PY) $(PYTEST) $(ARGS)
test-slow: .venv/test.stamp .venv/examples.stamp ; $(PY) $(PYTEST) -m "slow and not needs" $(ARGS)
test-oldest test-between: test-%: .venv-%/ready.stamp
	.venv-$*/bin/python $(PYTEST) $(ARGS)
test-torch: .venv-torch/ready.stamp ; .venv-torch/bin/python $(PYTEST) -m $(call NEEDS,torch)
# Compiled ahead of time, with no TPU or GPU.
test-tpu: .venv-accelerators/ready.stamp ; $(AHEAD) $(PYTEST) -m $(call NEEDS,libtpu,not slow)
test-tpu-slow: .venv-accelerators/ready.stamp ; $(AHEAD) $(PYTEST) -m $(call NEEDS,libtpu,slow)
test-gpu: .venv-accelerators/ready.stamp
	$(AHEAD) $(PYTEST) -m $(call NEEDS,jax_cuda12_plugin,not slow)
test-gpu-slow: .venv-accelerators/ready.stamp
	$(AHEAD) $(PYTEST) -m $(call NEEDS,jax_cuda12_plugin,slow)
# The CPU computes as GPUs do, or TPUs: `make test-lowered PLATFORM=tpu`.
test-lowered: .venv/test.stamp .venv/examples.stamp
	JMASK_LOWERED_FOR=$(or $(PLATFORM),cuda) $(PY) $(PYTEST) $(or $(ARGS), \
		tests/optim/test_named_optimizers.py tests/lazy/test_lazy_one_pass.py \
		tests/optim/test_conditional_steps.py tests/optim/test_inside_programs.py)
# Other projects' own tests, which come with their packages, with jmask in place of what they test.
test-peers: .venv-peers/ready.stamp .venv-mxnet/ready.stamp .venv-addons/ready.stamp
	$(PEERS) $(ARGS) $(addprefix tests/,$(addsuffix .py,peers/test_mxnet peers/test_other_programs \
		against_torch/test_porting))
	$(PEERS) -m $(call NEEDS,expecttest)
	$(PEERS) -p tests.peers.numpy_ma --pyargs $(addprefix numpy.ma.tests.test_,core old_ma extras)
	$(PEERS) -p tests.peers.optax_lifted --pyargs optax._src.alias_test optax._src.transform_test \
		optax._src.combine_test $(addprefix optax.transforms._,clipping_test adding_test)
test-wheel: wheel
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python $(INSTALL) dist/*.whl mypy
	.venv-wheel/bin/python scripts/check_wheel.py dist
test-wheels: ; for p in 14 13 12 11; do $(MAKE) test-wheel PYTHON=`scripts/interpreter 3.$$p` || exit; done
test-all: lint docs test test-slow test-oldest test-between test-torch test-tpu test-tpu-slow \
	test-gpu test-gpu-slow test-lowered test-peers test-wheel

lint: .venv/lint.stamp .venv/test.stamp
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy
format: .venv/lint.stamp ; $(PY) -m ruff check --fix . && $(PY) -m ruff format .
docs: .venv-docs/ready.stamp .venv/test.stamp .venv/examples.stamp
	$(PY) $(PYTEST) -m "" tests/project/test_docs.py # all of it: other tiers have a sample
	.venv-docs/bin/python scripts/docs_pages.py build/docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build
wheel: .venv/build.stamp ; rm -rf dist && $(PY) -m build --outdir dist .
clean: ; rm -rf build dist .venv .venv-*

bench: .venv/examples.stamp # without those that do not install here
	-$(MAKE) -k $(patsubst %,.venv-%/ready.stamp,torch tensorflow mxnet)
	$(PY) benchmarks/bench.py $(ARGS)
	$(PY) benchmarks/vocabulary.py
bench-vocabulary: .venv/examples.stamp ; $(PY) benchmarks/vocabulary.py $(ARGS)
bench-cores: .venv/examples.stamp .venv-torch/ready.stamp ; $(PY) benchmarks/cores.py $(ARGS)
scaling: .venv-accelerators/ready.stamp ; $(AHEAD) benchmarks/scaling.py $(ARGS)
tpu-cost: .venv-accelerators/ready.stamp ; $(AHEAD) benchmarks/tpu_cost.py $(ARGS)

.venv/bin/python: ; $(PYTHON) -m venv .venv
.venv/%.stamp: pyproject.toml | .venv/bin/python
	$(PY) $(INSTALL) -e '.[$*]'
	@touch $@
.venv/pykeen.stamp: .venv/examples.stamp
	$(PY) $(INSTALL) --no-deps pykeen==1.11.1 && touch $@
.venv-%/ready.stamp: pyproject.toml
	$(or $(PYTHON_$*),$(PYTHON)) -m venv .venv-$*
	.venv-$*/bin/python $(INSTALL) $(PACKAGES_$*)
	$(if $(ALONE_$*),.venv-$*/bin/python $(INSTALL) --no-deps $(ALONE_$*))
	@touch $@
