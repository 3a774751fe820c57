# `make fuzz`: random engines under both sanitizers, FUZZ_SECONDS each, from a new seed every time.
FUZZ_SECONDS ?= 120
FUZZ_SEED ?= $(shell date +%s)
.PHONY: fuzz
fuzz: setup
	@set -e; for sanitizer in address thread; do \
	  PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/fuzz-$$sanitizer -G Ninja -DMOEBIUS_SANITIZE=$$sanitizer \
	    -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" > build/fuzz.configure.log; \
	  PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/fuzz-$$sanitizer --target moebius_fuzz; \
	  build/fuzz-$$sanitizer/moebius_fuzz --seed $(FUZZ_SEED) --cases 1000000000 --seconds $(FUZZ_SECONDS); done
