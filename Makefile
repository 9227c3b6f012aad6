# fusedcomm: every target sets up what it needs, and reuses it the next time.
#
#   make demo    take real steps with each wire on two ranks of this machine, and compare them   ARGS="--seconds 60"
#   make test    run the tests; those that need a GPU are skipped without one. Of a large matrix of cases a sample runs,
#                in which every value appears. Compiles nothing. 5 minutes on two cores     ARGS="-k codec -x"
#   make check   what else guards a merge: lost and late ranks, jobs that lose and gain ranks, torch's own tests, stand-ins
#                for a GPU, the pages' code, times. 7 minutes
#   make test-all    both with every case: more than an hour
#   make test-torches    build with each torch of TORCHES, in a copy of this folder, and run a few tests with it. Each is
#                a version, for which build/torches gets an environment, or the folder of one that has torch and pytest
#   make bench   run every benchmark in bench/: hours; some minutes with ARGS=--quick. Each one says what
#                it needs: python bench/NAME.py --help                                       ARGS=--quick
#   make gpu     on a machine with a CUDA GPU: build, run the tests that need one, and measure; twenty minutes at most.
#                It can be split into three calls of at most nine minutes, the most valuable first: --call 1, 2, 3. Each
#                call adds its result to bench/results/<gpu>-torch<version>.json            ARGS="--call 1"
#   make gpus    on a machine with several GPUs: sums and steps of fusedcomm, of NCCL and of torch's hooks, in six
#                minutes; writes build/gpus.json                                            ARGS="--ranks 4"
#   make sanitize    run the stress programs of tests/native under each sanitizer     SANITIZERS=thread ARGS=engine
#   make build, lint, types, format, clean
#
# Needs Python >= 3.10 (with venv and headers), a C++ compiler and make. Variables, with their defaults:
#
#   PYTHON    the interpreter that makes the environment (python3)
#   VENV      the environment's folder (.venv). If it is empty, as in `make test VENV=`, PYTHON's own packages are used
#             and nothing is installed. Use this where a CUDA build of torch must stay as it is.
#   TORCH     what pip installs when it makes the environment (torch==2.13.0). If your index serves a CUDA build of
#             several GB, a CPU build is enough: TORCH="torch==2.13.0 --index-url <an index of CPU builds>"
#   PIP_ARGS  options for every pip install, for a mirror or a proxy for example

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_ARGS ?=
ARGS ?=
TORCHES ?= 2.11.0 2.13.0 2.14.1

# Exit code of pytest that counts as success, too. With ARGS, 5: no test was selected. Without, -1, which never occurs.
NONE_LEFT = $(if $(strip $(ARGS)),5,-1)

# The packages that PYTHON must have with `VENV=`. Targets below add theirs.
PACKAGES := torch>=2.11 setuptools>=77 ninja numpy

CSRC := $(shell find csrc -name "*.cpp" -o -name "*.h")

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

# PATH includes ninja and the formatters, even if the environment has not been activated.
ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY := check-packages
BUILT := build/.built
export PYTHONPATH := $(CURDIR)$(addprefix :,$(PYTHONPATH))
export PATH := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))' 2> /dev/null):$(PATH)
else
PY := $(VENV)/bin/python
READY := $(VENV)/.torch
BUILT := $(VENV)/.built
FORMATTERS := $(VENV)/.lint
CHECKER := $(VENV)/.types
KERNELS := $(VENV)/.kernels
export PATH := $(abspath $(VENV))/bin:$(PATH)
endif

.PHONY: help demo test check test-all test-torches bench gpu gpus build sanitize lint types format clean check-tools check-packages FORCE

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

demo: build
	$(PY) -m fusedcomm probe --seconds 20 --json build/probe.json $(ARGS)

# One worker more than cores, because tests wait half of the time. With ARGS, no test may be selected.
PYTEST = workers=$$($(PY) -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))'); \
	$(PY) -m pytest -n $$workers --dist worksteal $(WHICH) $(ARGS) || [ $$? -eq $(NONE_LEFT) ]

test check test-all: PACKAGES += pytest>=9 pytest-timeout hypothesis pytest-xdist
test: WHICH = --part test
check: WHICH = --part check
test-all: WHICH = --all
check test-all: $(CHECKER)
test check test-all: build $(KERNELS)
test:
	$(PYTEST)
check test-all:
	$(PYTEST)

test-torches: | check-tools
	PYTHON='$(PYTHON)' PIP_ARGS='$(PIP_ARGS)' bash tests/helpers/test_torches.sh $(TORCHES)

# bench/gpus.py, which needs several GPUs and has no --quick, is `make gpus`.
bench: PACKAGES += scikit-learn tqdm
bench: build
	failed=; for file in $(filter-out bench/gpus.py,$(wildcard bench/[!_]*.py)); do echo "== $$file"; $(PY) "$$file" $(ARGS) || failed+=" $$file"; done; \
	[ -z "$$failed" ] || { echo "Not measured:$$failed. What needs root and network namespaces says so above." >&2; exit 1; }

# bench/_gpu.py builds by calling make again with the same variables, so that the build counts toward the call's time.
# A dry run runs the benchmarks only. It needs no GPU, but the build must exist.
gpu: PACKAGES += triton>=3.6 pytest>=9 hypothesis tqdm
gpu: | $(READY) $(if $(findstring --dry-run,$(ARGS)),build $(KERNELS))
	$(PY) bench/_gpu.py $(ARGS)

gpus: PACKAGES += triton>=3.6
gpus: build
	$(PY) bench/gpus.py $(ARGS)

sanitize:
	bash tests/native/run_sanitizers.sh $(ARGS)

# ---- the extension

build: $(BUILT)

# pip's editable install builds the extension, too. Either way object files are in build/objects, and ninja decides what
# is compiled again. Without --force setuptools would not ask ninja.
$(BUILT): pyproject.toml setup.py csrc/bindings/stubs.py $(CSRC) build/.built-for | $(READY)
	@echo "Building fusedcomm._C (a minute or two the first time)"
	@if [ -n '$(strip $(VENV))' ] && [ ! '$(VENV)/.installed' -nt pyproject.toml ]; then \
	  PYTHONWARNINGS=ignore::UserWarning $(PY) -m pip install --quiet --no-build-isolation $(PIP_ARGS) -e '.[test,bench]'; \
	  touch '$(VENV)/.installed'; \
	else \
	  $(PY) setup.py --quiet build_ext --inplace --force; \
	fi
	touch $@

# The built library has the same name with any version of Python or torch, so this file records both: it changes, and
# the library is built again, when either changes.
build/.built-for: FORCE | $(READY)
	@if [ '$(origin TORCH)' = 'command line' ] && [ -s '$(VENV)/.torch' ] && [ "$$(cat '$(VENV)/.torch')" != '$(TORCH)' ]; then \
	  echo "$(VENV) was made with $$(cat '$(VENV)/.torch'), and TORCH is $(TORCH): remove $(VENV), or name another: make VENV=..." >&2; exit 1; \
	fi
	@mkdir -p build
	@$(PY) -c 'import sys; from importlib.metadata import version; print(sys.executable, sys.version, version("torch"))' > $@.now
	@if cmp -s $@.now $@; then rm $@.now; else mv $@.now $@; fi

# ---- the environment

ifneq ($(strip $(VENV)),)
$(VENV)/.torch: | check-tools
	@echo "Making $(VENV) with $(TORCH) (once; a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --upgrade pip 'setuptools>=77' wheel ninja numpy
	$(PY) -m pip install $(PIP_ARGS) $(TORCH)
	echo '$(TORCH)' > $@

# Packages that not every machine has wheels for. Without them, tests that need them are skipped. The oldest Triton that
# pyproject.toml allows goes into a folder of its own, where tests/helpers/compiling.py looks for it.
$(VENV)/.kernels: pyproject.toml $(VENV)/.torch
	$(PY) -m pip install --quiet $(PIP_ARGS) --group kernels || echo "The GPU kernels' tests will skip themselves." >&2
	oldest=$$(sed -n '/"triton>=/{s/.*"triton>=\([0-9.]*\),.*/\1/p;q}' pyproject.toml); \
	$(PY) -m pip install --quiet $(PIP_ARGS) --no-deps --upgrade --target $(VENV)/triton-oldest "triton==$$oldest.*" \
	  || echo "The test that compiles the GPU kernels with Triton $$oldest will skip itself." >&2
	touch $@

# mypy, which the tests of the public types use, too.
$(VENV)/.types: pyproject.toml $(VENV)/.torch
	$(PY) -m pip install --quiet $(PIP_ARGS) --group types \
	  || { echo "mypy cannot be installed: make types will fail, and the tests of the public types will skip themselves." >&2; }
	touch $@

$(VENV)/.lint: pyproject.toml $(VENV)/.torch
	$(PY) -m pip install --quiet $(PIP_ARGS) --group lint
	touch $@
endif

check-tools:
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON): not found. Install Python >= 3.10 (apt: python3 python3-venv python3-dev; dnf: python3 python3-devel), or name another: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@command -v $${CXX:-c++} > /dev/null || { echo "$${CXX:-c++}: no such C++ compiler. Install one (apt: g++; dnf: gcc-c++), or name another: make CXX=..." >&2; exit 1; }

# With `VENV=` nothing is installed, so this can only name missing packages.
check-packages: check-tools
	@$(PYTHON) -c "$$CHECK_PACKAGES" $(foreach package,$(PACKAGES),'$(package)')
	@# Installed, the package maps fusedcomm.kernels to kernels/. Used in place, it needs this link.
	@ln -sfn ../kernels fusedcomm/kernels

define CHECK_PYTHON
import importlib.util, pathlib, sys, sysconfig
name = sys.executable
if sys.version_info < (3, 10):
    sys.exit(f'{name} is Python {sys.version.split()[0]}, and fusedcomm needs 3.10 or later. Name another: make PYTHON=python3.12')
if not pathlib.Path(sysconfig.get_path('include'), 'Python.h').exists():
    sys.exit(f'{name} has no Python.h, which the extension includes. Install it (apt: python3-dev; dnf: python3-devel)')
if not all(map(importlib.util.find_spec, ('venv', 'ensurepip'))) and '$(strip $(VENV))':
    sys.exit(f'{name} cannot make virtual environments. Install what is missing (apt: python3-venv), or use the packages it has: make VENV=')
endef
export CHECK_PYTHON

define CHECK_PACKAGES
import re, shutil, sys
from importlib.metadata import PackageNotFoundError, version
def numbers(text): return tuple(int(n) for n in re.findall(r'\d+', text.split('+')[0])[:3])
def problem(wanted):
    name, _, least = wanted.partition('>=')
    if name == 'ninja' and shutil.which('ninja'): return None
    try: seen = version(name)
    except PackageNotFoundError: return wanted + ' (not there)'
    return f'{wanted} (it has {seen})' if numbers(seen) < numbers(least) else None
problems = list(filter(None, map(problem, sys.argv[1:])))
if problems: sys.exit(f'{sys.executable} lacks: ' + ', '.join(problems) + '. Install these with its pip, or let make do it in an environment of its own: make VENV=.venv')
endef
export CHECK_PACKAGES

# ---- style

lint: $(FORMATTERS)
	ruff check .
	ruff format --check .
	$(PYTHON) tests/helpers/budget.py
	clang-format --dry-run --Werror $(CSRC) $(wildcard tests/native/*.cpp tests/native/*.h)

# The build writes the extension's stub.
types: build $(CHECKER)
	$(PY) -m mypy

format: $(FORMATTERS)
	ruff check --fix .
	ruff format .
	clang-format -i $(CSRC) $(wildcard tests/native/*.cpp tests/native/*.h)

# The environment is kept. To make it again, remove $(VENV) by hand.
clean:
	rm -rf build out *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache fusedcomm/*.so fusedcomm/_C.torch fusedcomm/_C.pyi
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
