# `make test-numa`: topology, pinning and page locality on a real two-node kernel in an emulated guest; the demo and a
# served model in another one, whose CPU has AVX2 and no AVX-512, and a served model in one of two nodes
# (served_guest.py; KEYWORDS=desktop and KEYWORDS=two-nodes take them alone).
# Needs qemu-system-x86, cpio, g++ and a Debian cloud kernel; tests/numa/run_guest.sh says how to get them.
.PHONY: test-numa
test-numa:
	$(BIN)/python -m pytest -m numa tests/numa -rs $(if $(KEYWORDS),-k $(KEYWORDS))
