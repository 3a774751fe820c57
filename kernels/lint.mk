# `make lint-cpp`: the form of the C++ lines that changed since LINT_BASE, and clang-tidy over everything that is compiled
# but the testing module, whose _mm_hint is gcc's (FILES='kernels/pool/.*' takes a part). Its two programs, 150 MB, have an
# environment of their own: the demo needs neither.
LINT_BASE ?= $(shell git merge-base HEAD main 2>/dev/null || echo HEAD)
FILES ?= kernels/(?!testing/).*
LINT_CPP := build/lint-cpp
.PHONY: lint-cpp
lint-cpp: setup $(LINT_CPP)/.ready
	PATH="$(CURDIR)/$(LINT_CPP)/bin:$$PATH" git clang-format --diff $(LINT_BASE) -- kernels gpu_service tests
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" > build/dev.configure.log || (cat build/dev.configure.log; exit 1)
	$(LINT_CPP)/bin/python $(LINT_CPP)/bin/run-clang-tidy.py -clang-tidy-binary $(LINT_CPP)/bin/clang-tidy -quiet \
	  -p build/dev '$(CURDIR)/$(FILES)[.]cc$$'

$(LINT_CPP)/.ready: tools/lint-cpp.txt
	$(BIN)/python -m venv $(LINT_CPP)
	$(LINT_CPP)/bin/pip install --quiet --requirement $<
	touch $@
