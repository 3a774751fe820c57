# `make demo` and `make test` are the two commands of this project; the rest is for its developers.
# Empty: the first Python from 3.11 to 3.13 that is found.
PYTHON ?=
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Containers often set it; the hundreds of processes of the tests would each compile the same sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test test-fast test-all test-newest test-fuzz test-tls test-kernels-all setup lock vendor kernels lint types types-tests unit coverage protos wheels-gpu wheel recipes docs clean
.DEFAULT_GOAL := help
help:
	@echo "make demo    answer one chat request on this machine, GPU or not"
	@echo "make serve   the same, staying up on http://127.0.0.1:8000"
	@echo "make test    lint, types and the test suite; CONTRIBUTING.md lists smaller and larger ones"

demo: setup
	$(BIN)/moebius demo

serve: setup
	$(BIN)/moebius serve demo --expert-servers 2 --port 8000

# Types are checked while the tests run, which wait for their processes now and then.
test: setup lint
	@$(MAKE) --no-print-directory --jobs 2 types unit

# A system's Python that was replaced takes its environments with it.
$(shell test ! -e $(READY) || $(BIN)/python -c "" 2>/dev/null || rm -f $(READY))
# An editable install has a table of packages, so a new one is not found until it is made again.
PACKAGES := $(shell find moebius app lab gateway gpu_service expert_service -name __init__.py)
$(READY): pyproject.toml lab/pyproject.toml CMakeLists.txt tools/setup $(wildcard deploy/locks/*/*.txt) $(PACKAGES) $(shell find kernels -name '*.cc' -o -name '*.h')
	@PYTHON=$(PYTHON) tools/setup $(VENV)
setup: $(READY)

# deploy/locks: what is installed, by developers and in images. UPGRADE=transformers takes a newer one, UPGRADE=all of everything.
UPGRADE ?=
lock:
	@test -e $(BIN)/uv || $(MAKE) setup
	$(BIN)/python tools/lock $(if $(UPGRADE),--upgrade $(filter-out all,$(UPGRADE)))

# The page's libraries, in the exact versions of tools/vendor; needs npm.
vendor:
	python3 tools/vendor

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# The tests' own types; less strict than those of the packages (pyproject.toml, [tool.mypy.overrides]).
types-tests: setup
	$(BIN)/mypy --package tests

# A file's tests stay together, so that what they share is made once (tests/spreading.py). Two workers more than a small
# machine has cores: tests of services, which two workers run, wait for their processes half of the time.
# tests/selection.py chooses what runs.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile
unit: setup
	$(PYTEST)

# The lines and branches that the tests of COVERAGE_TESTS run, in the processes that they start, too.
COVERAGE_TESTS ?= tests
coverage: setup
	$(PYTEST) -p pytest_cov.plugin --cov --cov-report=term:skip-covered $(COVERAGE_TESTS)

test-fast: setup lint
	$(PYTEST) --fast

test-all: setup lint types
	$(PYTEST) --full

# The newest release of every package within pyproject.toml's ranges, or with BEYOND=1 whatever they say, in build/newest: all
# of `make test` (TESTS="tests/parity -k llama4" takes a part), and which package breaks what. Status 1: one does.
TESTS ?=
test-newest: setup
	$(BIN)/python -m tests.tools.try_newest $(if $(BEYOND),--beyond) --numprocesses $(WORKERS) --dist loadfile $(TESTS)

# The tests that draw their cases, with all of them: sanitizers, requests, parsers, families' configurations, and every
# property that hypothesis checks.
test-fuzz: setup
	$(BIN)/python -m pytest --full --hypothesis-profile=explore tests/kernels/test_fuzz_sanitizers.py \
	  tests/service/test_gateway_fuzz.py
	$(BIN)/python -m tests.tools.fuzz_parsers
	$(BIN)/python -m tests.tools.fuzz_families

# Everything that talks to processes, once more with mutual TLS between them and HTTPS to clients: faults, clients, APIs.
# TLS_TESTS=tests/service/test_end_to_end_faults.py takes a part.
TLS_TESTS ?= tests/service
test-tls: setup
	$(PYTEST) --tls $(TLS_TESTS)

# All kernels at the sizes of all published models, for all architectures; docs/gpu-architectures.md has the table.
test-kernels-all: setup
	@mkdir -p build/triton
	for arch in 80 86 89 90 100 120; do TRITON_CACHE_DIR=$(CURDIR)/build/triton \
	  $(BIN)/python -m tests.helpers.compile_kernels all $$arch > build/triton/$$arch.jsonl || exit 1; done
	$(BIN)/python -m tests.helpers.compile_kernels --table build/triton/*.jsonl

protos: setup
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/engine.proto protos/expert.proto protos/ranks.proto protos/smg_common.proto protos/vllm_engine.proto

# sdist, and from it a wheel for this Python and any x86-64 Linux with this machine's glibc or a newer one: the kernels
# choose their instruction set when they run. docs/install.md says how either is installed.
DIST ?= dist
wheel: setup
	@rm -rf build/wheel && mkdir -p build/wheel $(DIST)
	$(BIN)/python -m build --no-isolation --outdir build/wheel
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m auditwheel repair --wheel-dir $(DIST) build/wheel/*.whl
	@cp build/wheel/*.tar.gz $(DIST) && ls -l $(DIST)

# docs/recipes, from what `moebius plan` says of published models.
recipes: setup
	$(BIN)/python -m tests.tools.make_recipes

# The site of docs/, in build/site; a link that leads nowhere is an error.
docs: setup
	$(BIN)/python -m mkdocs build --strict

# Everything that an install on a CUDA machine without a network needs (docs/install-gpu.md), about 3 GB.
WHEELS ?= wheels
WHEELS_PYTHON = $(or $(PYTHON),python3)
LOCKS = deploy/locks/python$(shell $(WHEELS_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
wheels-gpu:
	$(WHEELS_PYTHON) -m pip wheel --wheel-dir $(WHEELS) --require-hashes --only-binary :all: \
	  -r $(LOCKS)/serve.txt -r $(LOCKS)/cuda.txt -r $(LOCKS)/gpu.txt
	$(WHEELS_PYTHON) -m pip wheel --wheel-dir $(WHEELS) --no-deps .
	@du -sh $(WHEELS)

clean:
	rm -rf $(VENV) build

-include kernels/build.mk
-include kernels/lint.mk
-include tests/numa/numa.mk
-include tests/newcomer/newcomer.mk
-include tests/kernels/fuzz/fuzz.mk
-include tests/drills/drills.mk
-include tests/web/web.mk
-include k8s/k8s.mk
-include tests/clients/clients.mk
