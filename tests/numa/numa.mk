# `make test-numa`: topology, pinning and page locality on a real two-node kernel in an emulated guest.
# Needs qemu-system-x86, cpio, g++ and a Debian cloud kernel; tests/numa/run_guest.sh says how to get them.
.PHONY: test-numa
test-numa:
	$(BIN)/python -m pytest -m numa tests/numa -rs
