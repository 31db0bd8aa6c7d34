# Each target makes .venv, installs what it needs into it and runs; second runs start in seconds.
# Needed beforehand: python3 >= 3.10 and a C++20 compiler (scripts/preflight.sh checks). CMake and ninja come with pip.

PYTHON ?= python3
ifeq ($(origin CXX),default)
CXX := c++
endif
export CXX

BIN := .venv/bin
STAMPS := .venv/stamps
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
NATIVE := $(shell find transports/native -type f | LC_ALL=C sort)
# A stamp names the state of the project that it was made for, so that no clock and no checkout can confuse it.
KEY := $(shell cat pyproject.toml CMakeLists.txt $(NATIVE) | sha256sum | cut -c1-16)
TOOLS := $(STAMPS)/tools-$(KEY)

# What the targets pass on: make bench BENCH="broadcast -n 2", make peers PEERS="gloo", make test PYTEST="-k plans".
BENCH ?= allreduce -n 2 --sizes 8:64M
PEERS ?=
PYTEST ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: setup demo test torch coverage lint sanitize package bench peers docs clean help

setup: $(STAMPS)/dev-$(KEY) ## Make .venv with the library, editable, and all tools of development

demo: $(STAMPS)/demo-$(KEY) ## Train on real data with 1 and 4 ranks, then measure allreduce
	@$(BIN)/python examples/demo.py

test: $(STAMPS)/dev-$(KEY) lint ## Build with warnings as errors, lint, and run the tests
	@$(BIN)/pytest -m "not packaging" $(PYTEST)

torch: $(STAMPS)/torch-$(KEY) ## Add torch to .venv, so that the tests of what works with it run

coverage: $(STAMPS)/dev-$(KEY) ## Run the tests, ranks included, and show which lines of Python they reach
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not packaging" $(PYTEST)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report --skip-covered

lint: $(STAMPS)/dev-$(KEY) ## Check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples/*.py
	$(BIN)/lint-imports --no-logo
	$(BIN)/clang-format --dry-run -Werror $(filter %.h %.cpp,$(NATIVE)) tests/native/*.h tests/native/*.cpp

# Warnings are judged by the ordinary build: gcc adds its own about what the thread sanitizer cannot follow.
sanitize: sanitize-address,undefined sanitize-thread ## Build and test the native core under the sanitizers

sanitize-%: $(STAMPS)/dev-$(KEY)
	$(BIN)/cmake -S . -B build/sanitize-$* -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DUNISONO_SANITIZE=$* \
	  -DUNISONO_MODULE=OFF -DUNISONO_TESTS=ON -DUNISONO_WERROR=ON -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  --log-level=WARNING
	$(BIN)/cmake --build build/sanitize-$*
	$(BIN)/ctest --test-dir build/sanitize-$* --output-on-failure --timeout 120

package: $(STAMPS)/dev-$(KEY) ## Build sdist and wheel, install them in fresh environments and import them
	@$(BIN)/pytest -m packaging

bench: $(STAMPS)/bench-$(KEY) ## Measure Unisono beside its peers (make peers installs them)
	@$(BIN)/unisono bench $(BENCH)

peers: $(STAMPS)/bench-$(KEY) ## Install the libraries to measure against, each in its own environment
	@$(BIN)/python -m unisono.bench.peers install $(PEERS)

docs: $(STAMPS)/docs-$(KEY) ## Build the documentation into site/
	$(BIN)/mkdocs build --strict --quiet

clean: ## Remove what was built; .venv and .peers stay
	rm -rf build dist site $(STAMPS) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage*
	find . -name __pycache__ -not -path './.venv/*' -not -path './.peers/*' -prune -exec rm -rf {} +

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(TOOLS):
	@scripts/preflight.sh $(PYTHON) $(CXX)
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(PIP) install --upgrade "pip>=25.1"
	$(PIP) install --group build
	@mkdir -p $(STAMPS)
	@find $(STAMPS) -type f -not -name '*-$(KEY)' -delete
	@touch $@

# Warnings are errors for those who change the code, not for those who only use it with a compiler newer than ours.
$(STAMPS)/dev-$(KEY): CONFIG := -Ccmake.define.UNISONO_WERROR=ON

# The version is fixed because the newest brings gigabytes that no test here needs.
$(STAMPS)/torch-$(KEY): $(STAMPS)/dev-$(KEY)
	$(PIP) install torch==2.13.0
	@touch $@

$(STAMPS)/%-$(KEY): $(TOOLS)
	$(PIP) install --no-build-isolation $(CONFIG) --editable ".[$*]"
	@touch $@
