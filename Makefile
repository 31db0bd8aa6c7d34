# Each target makes .venv, installs what it needs into it and runs; second runs start in seconds.
# Needed beforehand: python3 >= 3.10 and a C++20 compiler (scripts/preflight.sh checks). CMake and ninja come with pip.

PYTHON ?= python3
ifeq ($(origin CXX),default)
CXX := c++
endif
export CXX
# Ranks are processes that import the library: they start from what the first one has compiled, as those of users do.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMPS := .venv/stamps
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
# Targets that compile the native core, or install large packages, show their progress.
INSTALL = @scripts/pip_install.sh $(BIN)/python --no-build-isolation -Ccmake.define.UNISONO_WERROR=$(WERROR) --editable
NATIVE := $(shell find transports/native -type f | LC_ALL=C sort)
# A stamp names the state of the project that it was made for, so that no clock and no checkout can confuse it.
KEY := $(shell cat pyproject.toml CMakeLists.txt $(NATIVE) | sha256sum | cut -c1-16)
TOOLS := $(STAMPS)/tools-$(KEY)

has = $(shell command -v $(1))
space := $(subst ,, )
# The native core with its tests and without Python.
NATIVE_BUILD = $(BIN)/cmake -S . -G Ninja -DUNISONO_MODULE=OFF -DUNISONO_TESTS=ON -DUNISONO_WERROR=ON \
  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) --log-level=WARNING
# Where it is built only to be tested: most of the time goes into reading headers and optimising, so files are compiled
# many at a time, with line numbers and no more for debuggers.
CHECKED_BUILD = $(NATIVE_BUILD) -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=12 \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1"
CHECK = $(BIN)/ctest --output-on-failure --timeout 400 --parallel 2
FUZZERS := control frames plans shm tcp
# The fuzzing targets belong to the build under the address sanitizer, so that the core is compiled once for both. libFuzzer
# comes with clang.
FUZZED := build/sanitize-address,undefined
LIBFUZZER = $(if $(call has,clang++),-DUNISONO_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++)
# Another processor can change kernels, wire formats and plans. An emulator does not show its races between threads.
AARCH64_TESTS := channels frames kernels plans tagged tcp

# What the targets pass on: make bench BENCH="broadcast -n 2 --against gloo", make peers PEERS="gloo",
# make test PYTEST="-k plans".
BENCH ?=
PEERS ?=
COMPARED := gloo openmpi impi oneccl
GPU ?=
TRIALS ?= 3000
SCALE ?= 1
PYTEST ?=
# The groups of tests that the gate runs, as pytest names them by marks: make gate GATE=pure,jobs.
GATE ?= pure,contract,jobs,clients
comma := ,
# Processes in which tests run at the same time; 0 runs them one by one. Many tests wait for most of their time.
WORKERS ?= 3
# Whether warnings of the compiler are errors in the build of the module. All targets share that build, so that no target
# compiles again what another one has compiled. `.ci/run` says ON; a user's compiler may be newer than ours.
WERROR ?= OFF
# How long each fuzzing target runs: the seconds, or else its share of this number of executions. And whether the counts of instructions are recorded anew.
FUZZ_S ?= 6
EXECUTIONS ?=
UPDATE ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: setup everything demo test gate torch torch-newest torch-versions torch-clients torch-own-tests horovod-own-tests mpi4py-own-tests mpi4py-clients mpi4py-osu engines tensorflow jax jax-versions keras cuda cuda-versions mpi ucx coverage lint sanitize debian aarch64 aarch64-tests fuzz counts counted-paths package wheel bench compared-bench campaign leaks gpu gpu-wheel peers docs clean help

setup: $(STAMPS)/dev-$(KEY) ## Make .venv with the library, editable, and all tools of development

everything: $(STAMPS)/everything-$(KEY) ## Make .venv with everything: setup, torch, jax, cuda, ucx, docs and demo in one call of pip

demo: $(STAMPS)/demo-$(KEY) ## Train on real data with 1 rank and with a rank per core, then measure allreduce
	@$(BIN)/python examples/demo.py

# Tests that are named begin at once.
test: $(STAMPS)/dev-$(KEY) $(if $(PYTEST),,lint) ## Build, lint and run all tests, or only PYTEST="tests/tuning"
	@$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not packaging and not slow" $(PYTEST)

gate: $(STAMPS)/dev-$(KEY) ## Run the tests that every change must pass (GATE=pure runs one group of tests/README.md)
	@$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "($(subst $(comma), or ,$(GATE))) and not night and not packaging and not slow"

torch: $(STAMPS)/torch-$(KEY) ## Add torch to .venv, so that the tests of what works with it run

torch-clients: $(STAMPS)/torch-$(KEY) ## Test the backend under libraries that stand on torch, which are installed in .torch/clients
	@$(BIN)/python scripts/tests_with.py $@ $(PYTEST)

engines: $(STAMPS)/dev-$(KEY) ## Test the launchers of Ray and Dask, which are installed in .engines
	@$(BIN)/python scripts/tests_with.py $@ $(PYTEST)

tensorflow: $(STAMPS)/dev-$(KEY) ## Test what works with TensorFlow, which is installed in .tensorflow
	@$(BIN)/python scripts/tests_with.py $@ $(PYTEST)

torch-own-tests: $(STAMPS)/torch-$(KEY) ## Run torch's own tests of backends over Unisono and over Gloo, and compare
	@$(BIN)/python scripts/torch_own_tests.py

horovod-own-tests: $(STAMPS)/torch-$(KEY) ## Run Horovod's own tests over unisono.compat.horovod; make tensorflow comes first
	@$(BIN)/python scripts/horovod_own_tests.py
	@$(BIN)/python scripts/horovod_own_tests.py tensorflow

mpi4py-own-tests: $(STAMPS)/dev-$(KEY) ## Run mpi4py's own tests over unisono.compat.mpi4py
	@$(BIN)/python scripts/mpi4py_own_tests.py

mpi4py-clients: $(STAMPS)/dev-$(KEY) ## Test programs of mpi4py over Unisono and Open MPI; libraries are installed in .mpi4py-clients
	@$(BIN)/python scripts/tests_with.py $@ $(PYTEST)

mpi4py-osu: $(STAMPS)/dev-$(KEY) ## Measure mpi4py's OSU benchmarks over Unisono and over MPIs in turn
	@$(BIN)/python scripts/mpi4py_osu.py

jax: $(STAMPS)/jax-$(KEY) ## Add JAX to .venv, so that the tests of JAX arrays run

jax-versions: $(STAMPS)/jax-$(KEY) ## Run the tests of JAX with every version that Unisono claims to support, in .jax/
	@$(BIN)/python scripts/jax_environment.py $(JAX_VERSIONS)

keras: $(STAMPS)/torch-$(KEY) $(STAMPS)/jax-$(KEY) ## Test what works with Keras on torch and JAX; it is installed in .keras
	@$(BIN)/python scripts/tests_with.py $@ $(PYTEST)

cuda-versions: $(STAMPS)/cuda-$(KEY) ## Run the tests of the GPU's driver with the oldest bindings of CUDA 12 and 13, in .cuda/
	@$(BIN)/python scripts/cuda_environment.py $(CUDA_VERSIONS)

cuda: $(STAMPS)/cuda-$(KEY) ## Add NVRTC and NCCL's binding to .venv, so that kernels for GPUs are compiled by the tests, and read as machine code

ucx: $(STAMPS)/ucx-$(KEY) ## Add UCX to .venv, so that the tests of messages by it run

torch-newest: $(STAMPS)/torch-$(KEY) ## Run the tests of the backend with the newest torch, in .torch/
	@$(BIN)/python scripts/torch_environment.py $(lastword $(TORCH_VERSIONS)) -- $(BACKEND_TESTS)

torch-versions: $(STAMPS)/torch-$(KEY) ## Run the tests of torch with every version that Unisono claims to support
	@$(BIN)/python scripts/torch_environment.py $(TORCH_VERSIONS)

mpi: $(STAMPS)/dev-$(KEY) ## Make .mpi/openmpi and .mpi/mpich, where what works with MPI is tested
	@$(BIN)/python -m unisono.bench.peers mpi

coverage: $(STAMPS)/dev-$(KEY) ## Run the tests, ranks included, and show which lines of Python they reach
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not packaging and not slow" $(PYTEST)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report --skip-covered

lint: $(STAMPS)/dev-$(KEY) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples/*.py tests/typing/*.py
	@echo "clang-format --dry-run -Werror (C++ and CUDA)"
	@$(BIN)/clang-format --dry-run -Werror $(filter-out %/c_api.h,$(filter %.h %.cpp,$(NATIVE))) tests/native/*.h tests/native/*.cpp \
	  tests/native/fuzz/*.h tests/native/fuzz/*.cpp transports/cuda/kernels/*.cuh

# Warnings are judged by the ordinary build: gcc adds its own about what the thread sanitizer cannot follow.
sanitize: sanitize-address,undefined sanitize-thread ## Build and test the native core under the sanitizers

sanitize-%: $(STAMPS)/dev-$(KEY) debian
	$(CHECKED_BUILD) -B build/sanitize-$* -DUNISONO_SANITIZE=$* $(if $(filter address%,$*),$(LIBFUZZER))
	$(BIN)/cmake --build build/sanitize-$*
	$(CHECK) --test-dir build/sanitize-$*

debian: ## Install the tools of aarch64, fuzz and counts, and a browser for the tests, if root
	@scripts/debian-packages.sh

# What there is, is looked up when the tools have been installed: the recipes below are expanded only then.
aarch64: $(STAMPS)/dev-$(KEY) debian ## Build the native core for aarch64 and run its tests under qemu
	@$(if $(and $(call has,aarch64-linux-gnu-g++),$(call has,qemu-aarch64-static)),$(MAKE) --no-print-directory aarch64-tests,\
	  echo "skipped: no aarch64-linux-gnu-g++ or no qemu-aarch64-static")

aarch64-tests:
	$(CHECKED_BUILD) -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=$(abspath scripts/aarch64.cmake)
	$(BIN)/cmake --build build/aarch64 --target $(AARCH64_TESTS:%=test_%)
	$(CHECK) --test-dir build/aarch64 -R '^native_($(subst $(space),|,$(AARCH64_TESTS)))$$'

# Inputs that reach new code stay in the folder of the build, and the next run begins with them. The fuzzing of Python
# needs no compiler, but a Python for which atheris is built.
fuzz: $(STAMPS)/fuzz-$(KEY) debian ## Fuzz all parsers with clang and atheris (EXECUTIONS=10000000); without clang, run seeds and changes of them
	$(CHECKED_BUILD) -B $(FUZZED) -DUNISONO_SANITIZE=address,undefined $(LIBFUZZER)
	$(BIN)/cmake --build $(FUZZED) --target $(FUZZERS:%=fuzz_%)
	@$(if $(call has,clang++),scripts/fuzz.sh $(FUZZED) "$(FUZZ_S)" "$(EXECUTIONS)" $(FUZZERS),\
	  $(CHECK) --test-dir $(FUZZED) -R fuzz_)

counts: $(STAMPS)/dev-$(KEY) debian ## Compare the instructions of the hot paths with those recorded (UPDATE=1 records them)
	@$(if $(call has,valgrind),$(MAKE) --no-print-directory counted-paths,echo "skipped: no valgrind")

counted-paths:
	$(NATIVE_BUILD) -B build/counts -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build build/counts --target hot_paths
	@$(BIN)/python scripts/count_instructions.py build/counts/tests/native/hot_paths $(if $(UPDATE),--update)

package: $(STAMPS)/dev-$(KEY) ## Build sdist and wheel, install them in fresh environments and import them
	@$(BIN)/pytest -m packaging tests/package/test_packaging.py

wheel: $(STAMPS)/dev-$(KEY) ## Build a manylinux wheel into dist/ and test it without a compiler (ARCH=aarch64 for another processor)
	@$(BIN)/python scripts/wheel.py $(if $(ARCH),--arch $(ARCH))

# A peer that cannot be installed, because it is not made for this processor, is named and not measured.
bench: $(STAMPS)/bench-$(KEY) ## Measure allreduce beside four other libraries in 5 minutes (BENCH="broadcast -n 4" measures that alone)
	@$(if $(BENCH),$(BIN)/unisono bench $(BENCH),$(MAKE) --no-print-directory compared-bench)

compared-bench:
	@-$(BIN)/python -m unisono.bench.peers install $(COMPARED)
	@$(BIN)/unisono bench allreduce -n 2 --sizes 8,1K,64K,1M,16M,64M --rounds 3 --seconds 0.3 \
	  --against "$$(for name in $(COMPARED); do test -e .peers/$$name/complete && echo $$name; done | paste -sd,)" \
	  --out build/bench.json --html build/bench.html

# Without .venv and without a network: it builds for itself what it needs, from what is installed there.
campaign: $(STAMPS)/dev-$(KEY) ## Plant seeded faults into jobs, and count how each ends (TRIALS=3000)
	@$(BIN)/python -m unisono.bench.studies.campaign --trials $(TRIALS)

leaks: $(STAMPS)/dev-$(KEY) ## Count what 10,000 communicators, a million calls and 1,000 aborts leave behind (SCALE=1)
	@for transport in shm tcp; do $(BIN)/python -m unisono.bench.studies.leaks --transport $$transport --scale $(SCALE) || exit; done

gpu: ## Build, test and measure everything on a machine with a GPU (GPU="--only kernels")
	@$(PYTHON) bench/gpu.py $(GPU)

# A wheel for the Python of a machine that has a GPU and neither a network nor the time for a build. The folder gpu/ travels.
gpu-wheel: ## Build the wheel that make gpu takes along into gpu/ (PYTHON=python3.12)
	test -x build/gpu-wheel/bin/pip || $(PYTHON) -m venv build/gpu-wheel
	build/gpu-wheel/bin/python -m pip -qq --disable-pip-version-check install "pip>=25.1"
	build/gpu-wheel/bin/python -m pip -qq --disable-pip-version-check install --group build
	PATH="$(abspath build/gpu-wheel/bin):$$PATH" build/gpu-wheel/bin/python -m pip -q --disable-pip-version-check wheel --no-deps \
	  --no-build-isolation -w gpu .
	@ls gpu/*.whl

peers: $(STAMPS)/bench-$(KEY) ## Install the libraries to measure against, each in its own environment
	@$(BIN)/python -m unisono.bench.peers install $(PEERS)

docs: $(STAMPS)/docs-$(KEY) ## Build the documentation into site/
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going -d build/docs docs site

clean: ## Remove what was built; .venv, .peers, .mpi, .torch, .jax, .cuda and .keras stay
	rm -rf build dist site jupyter_execute $(STAMPS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
	find . -name __pycache__ -not -path './.venv/*' -not -path './.peers/*' -not -path './.mpi/*' -not -path './.torch/*' \
	  -not -path './.jax/*' -not -path './.cuda/*' -not -path './.keras/*' -prune -exec rm -rf {} +

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(TOOLS):
	@scripts/preflight.sh $(PYTHON) $(CXX)
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(PIP) install --upgrade "pip>=25.1"
	$(PIP) install --group build
	@mkdir -p $(STAMPS)
	@find $(STAMPS) -type f -not -name '*-$(KEY)' -delete
	@touch $@

# The version is fixed because the newest brings gigabytes that no test here needs.
TORCH := torch==2.13.0
# The tests whose results depend on the version of torch.
BACKEND_TESTS := tests/frameworks/test_torch.py tests/frameworks/test_torch_versions.py \
  --deselect tests/frameworks/test_torch.py::test_torch_ddp_example_learns_digits_under_torchrun
# The others that are tested: the last patch of each minor version, the newest last.
TORCH_VERSIONS := 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.14.1
# JAX, and the optimizers that an example uses.
JAX := jax optax
# The oldest JAX, and the last of each other minor version. Those that this Python cannot have are skipped: the newest
# need `make jax-versions PYTHON=python3.13` in a folder without .venv.
JAX_VERSIONS := 0.5.0 0.6.2 0.7.2 0.8.3 0.9.2 0.10.2 0.11.2 0.12.0.1
# The oldest binding of the driver of each major version; the extra cuda13 has the newest.
CUDA_VERSIONS := 12.9.1 13.0.3
# The version that is tested; it brings the UCX that goes with it, some 250 MB.
UCX := ucxx-cu13==0.52.*

# By one call of pip, which builds the library once.
$(STAMPS)/everything-$(KEY): $(TOOLS)
	$(INSTALL) ".[cuda,nccl]" --group dev --group docs --group disassembler $(TORCH) $(JAX) $(UCX)
	@touch $(foreach name,cuda demo dev docs everything jax torch ucx,$(STAMPS)/$(name)-$(KEY))

$(STAMPS)/torch-$(KEY): $(STAMPS)/dev-$(KEY)
	$(PIP) install $(TORCH)
	@touch $@

$(STAMPS)/jax-$(KEY): $(STAMPS)/dev-$(KEY)
	$(PIP) install $(JAX)
	@touch $@

$(STAMPS)/ucx-$(KEY): $(STAMPS)/dev-$(KEY)
	$(PIP) install $(UCX)
	@touch $@

$(STAMPS)/fuzz-$(KEY): $(STAMPS)/dev-$(KEY)
	$(PIP) install --group fuzz
	@touch $@

$(STAMPS)/cuda-$(KEY): $(STAMPS)/dev-$(KEY)
	$(INSTALL) ".[cuda,nccl]" --group disassembler
	@touch $@

$(STAMPS)/%-$(KEY): $(TOOLS)
	$(INSTALL) . --group $*
	@touch $@
