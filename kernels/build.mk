# `make kernels`: rebuild the two C++ modules and put them next to their typed faces, without a reinstall.
# The lock lets several shells ask at once; the rename never changes a file that a process has mapped.
# An editable install imports its own copy, so that one is replaced too.
.PHONY: kernels
kernels:
	@mkdir -p build
	@flock build/dev.lock $(MAKE) --no-print-directory kernels-locked

.PHONY: kernels-locked
kernels-locked:
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" > build/dev.configure.log || (cat build/dev.configure.log; exit 1)
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/dev
	@set -e; for target in moebius $(wildcard $(VENV)/lib/python*/site-packages/moebius); do \
	  for file in build/dev/_kernels*.so; do \
	    cmp -s $$file $$target/$$(basename $$file) && continue; \
	    cp $$file $$target/.$$(basename $$file).new; mv $$target/.$$(basename $$file).new $$target/$$(basename $$file); \
	  done; done
