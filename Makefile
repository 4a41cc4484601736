# `make demo` and `make test` do everything, from a fresh clone on; see README.md.
#
#   PYTHON=...  the Python to use (python3). When it can import torch, that torch is used.
#   VENV=...    where the virtual environment goes (.venv). VENV= means: none, install into PYTHON itself.
#   JOBS=...    how many processes pytest uses, at most 8 (two for each core: tests of several processes wait half of
#               their time; under soak one).
#   UNITY=OFF   compile each C++ file separately, in a build folder of its own: a change of one file is rebuilt in
#               seconds. The result is slower, so this is not for benchmarks.
#   BUILD=...   the build folder (build/{wheel_tag}).
#   CUDA_VENV=...  where `make test-cuda` puts an environment with torch's CUDA build, 5 GB (.venv-cuda).
#   K=...       the doctest cases that `make native-test` runs: those whose names contain it. SANITIZER= is thread (the
#               default) or address.
#   TORCHES=..., PYTHONS=...  the versions that `make matrix` tests and `make wheels` builds for (those of
#               tools/matrix.sh).
#   IMAGE=...   the image of the container in which `make wheels` builds (none: this machine).
#   RELEASE=... the release whose section `make news` puts into CHANGELOG.md (none: the section is only printed).
#   ONLINE=1    let `make docs` link to the docs of Python and torch, whose indexes it downloads, and to other versions.
#   GPU_VENV=...  where `make gpu-kit` puts one with Python 3.12 and the torch of the machines with a GPU (.venv-gpu).

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell echo $$((2 * $$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc))))
UNITY ?= ON
CUDA_VENV ?= .venv-cuda
GPU_VENV ?= .venv-gpu
SANITIZER ?= thread

ifeq ($(strip $(VENV)),)
  PY := $(shell command -v $(PYTHON))
  STATE := build/state$(shell $(PYTHON) -c 'import sys; print(sys.prefix)')
else
  PY := $(abspath $(VENV))/bin/python
  STATE := $(VENV)/.cudafuture
endif
export PATH := $(dir $(PY)):$(PATH)
export NINJA_STATUS := [%f/%t, %e s]$() $()

BUILD_OPTIONS := $(if $(BUILD),-C build-dir=$(BUILD) )$(if $(filter OFF,$(UNITY)),-C cmake.define.CUDAFUTURE_UNITY=OFF $\
  -C build-dir=$(or $(BUILD),build/{wheel_tag})-files )
# Folders are listed too: they change when a file is added or taken away.
BUILD_INPUTS := CMakeLists.txt pyproject.toml cudafuture/_build_info.py.in $(shell find cmake cudafuture/_C cudafuture/_c10d rpc_ext/_C) \
  $(shell find cudafuture/testing/machine cudafuture/testing/sim -name __pycache__ -prune -o \( -type d -o -name '*.cpp' -o -name '*.h' \) -print)
STARTED := $(shell date +%s)
CPP := $(shell find cudafuture rpc_ext tests -name '*.h' -o -name '*.cpp')
# A worker that crashes is not replaced: pytest-xdist may fail, or hang, over the tests of the new one. The run ends there.
PYTEST = $(PY) -m pytest -n $(JOBS) --maxprocesses 8 --max-worker-restart 0 --dist loadgroup

.NOTPARALLEL:
.PHONY: setup setup-test demo test test-native native-test test-cuda gpu-kit matrix wheels soak lint bench docs news clean
setup: $(STATE)/built

setup-test: $(STATE)/built $(STATE)/has-test $(STATE)/has-demo

demo: $(STATE)/built $(STATE)/has-cli
	$(PY) examples/demo.py

# Tests of one process once more, with a simulated accelerator for the default device; the seed chooses its schedule.
# The examples in the docs need the host, and tests/prefetch/test_schedules.py chooses its own schedules.
EVERYWHERE = $(PYTEST) --sim-everywhere tests/future tests/collectives tests/rpc tests/prefetch tests/package \
  tests/examples/test_offload_activations.py --ignore tests/package/test_docs.py --ignore tests/prefetch/test_schedules.py

# Tests that run side by side compute with one thread each: threads of OpenMP that wait for each other spin.
test test-cuda: export OMP_NUM_THREADS = 1
# RPC over shared memory polls. Tests that show it ask for it.
test: export CUDAFUTURE_RPC_TRANSPORTS = uv
# Without the layout tests, which `make lint` runs.
test: $(STATE)/built $(STATE)/has-test $(STATE)/has-demo
	tools/build_beside.sh $(PY) $(PYTEST) --ignore tests/layout
	$(EVERYWHERE) -m "not world and not slow and not soak"
	$(MAKE) --no-print-directory test-native
	@echo "make test took $$(($$(date +%s) - $(STARTED))) s"

test-native: $(STATE)/has-build
	tools/doctest.sh
	tools/native_tests.sh $(PY) thread
	tools/native_tests.sh $(PY) address

native-test: $(STATE)/has-build
	tools/doctest.sh
	tools/native_tests.sh $(PY) $(SANITIZER)$(if $(K), -tc="*$(K)*")

# CUDA's own code paths, on fake devices. The environment is a second one, with torch's CUDA build.
test-cuda:
	tools/cuda_torch.sh $(PYTHON) $(CUDA_VENV)
	$(MAKE) --no-print-directory VENV=$(CUDA_VENV) BUILD=build/cuda-{wheel_tag} setup-test
	JOBS=$(JOBS) tools/test_cuda.sh $(abspath $(CUDA_VENV))/bin/python

# The folder .whl, with which tools/gpu_check.sh needs neither a build nor a network.
gpu-kit:
	tools/gpu_kit.sh $(GPU_VENV)

matrix:
	tools/matrix.sh$(if $(TORCHES), --torch "$(TORCHES)")$(if $(PYTHONS), --python "$(PYTHONS)")

# A wheel for each torch and Python, in build/wheels/torch-2.N.
wheels:
	tools/wheels.sh$(if $(TORCHES), --torch "$(TORCHES)")$(if $(PYTHONS), --python "$(PYTHONS)")$(if $(IMAGE), --image $(IMAGE))

# Tests that record traces themselves: a process has one recording at a time.
RECORDING = tests/trace tests/package/test_docs.py tests/examples/test_train_digits.py tests/examples/test_demo.py

soak: export CUDAFUTURE_SOAK = 1
soak: JOBS = auto
soak: $(STATE)/built $(STATE)/has-test $(STATE)/has-demo
	$(PYTEST) --timeout 3600 -o faulthandler_timeout=4000
	$(EVERYWHERE) -m "not world" --timeout 3600 -o faulthandler_timeout=4000
	CUDAFUTURE_DEBUG=origin $(PYTEST) --timeout 3600 -o faulthandler_timeout=4000
	CUDAFUTURE_TRACE=$(abspath build/trace) $(PYTEST) $(RECORDING:%=--ignore %) --timeout 3600 -o faulthandler_timeout=4000
	CUDAFUTURE_TEST_BACKEND=cudafuture $(PYTEST) tests/collectives --timeout 3600 -o faulthandler_timeout=4000
	$(MAKE) --no-print-directory test-native
	$(PY) -m pip wheel --no-build-isolation --no-deps -C build-dir=build/{wheel_tag}-files -C cmake.define.CUDAFUTURE_UNITY=OFF -w build/files .
	$(MAKE) --no-print-directory test-cuda
	$(MAKE) --no-print-directory gpu-kit
	tools/gpu_rehearsal.sh $(GPU_VENV)
	tools/wheels.sh
	tools/matrix.sh

lint: $(STATE)/built $(STATE)/has-lint $(STATE)/has-test $(STATE)/has-demo
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -c 'import clang_format; clang_format.clang_format()' --dry-run -Werror $(CPP)
	$(PY) -m pytest -q tests/layout

# Suites that need no disk; storage, remote and swap take 12 GiB and fio.
SUITES = core interrupt collectives device rpc debug trace prefetch images pipeline

bench: $(STATE)/built $(STATE)/has-demo
	for suite in $(SUITES); do $(PY) -m cudafuture bench $$suite --check --json build/$$suite.json || exit 1; done

docs: $(STATE)/built $(STATE)/has-docs
	$(PY) -m sphinx -W --keep-going $(if $(ONLINE),-t online )-b html docs build/docs

news: $(STATE)/has-news
	$(PY) -m towncrier build $(if $(RELEASE),--yes --version $(RELEASE),--draft --version unreleased)

clean:
	rm -rf build $(STATE)

# What has been done leaves an empty file in $(STATE); it is done again when something it was made from is newer.
$(STATE)/python: tools/venv.sh
	$(if $(strip $(VENV)),tools/venv.sh $(PYTHON) $(VENV))
	mkdir -p $(STATE) && touch $@

$(STATE)/has-%: $(STATE)/python pyproject.toml tools/environment.py
	$(PY) tools/environment.py $*
	touch $@

$(STATE)/built: $(STATE)/has-build $(BUILD_INPUTS)
	$(PY) -m pip install -v --no-build-isolation --no-deps $(BUILD_OPTIONS)-e .
	touch $@
