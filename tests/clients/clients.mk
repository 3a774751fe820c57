# Conversations of nine clients with our servers. They get an environment of their own: what they need does not
# have to fit what we need. `make test-clients CLIENTS=...` takes one that is there; `test-clients-tls` is the same with
# HTTPS to clients and mutual TLS between our processes.
CLIENTS ?= build/clients-venv
.PHONY: test-clients test-clients-tls
test-clients: setup $(CLIENTS)/.ready
	$(BIN)/python -m tests.clients.run $(CLIENTS)/bin/python --write
test-clients-tls: setup $(CLIENTS)/.ready
	$(BIN)/python -m tests.clients.run $(CLIENTS)/bin/python --tls

build/clients-venv/.ready: tests/clients/requirements.txt
	$(BIN)/python -m venv build/clients-venv
	build/clients-venv/bin/pip install --quiet --no-deps --requirement tests/clients/requirements.txt
	touch $@
