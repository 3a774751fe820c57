"""The mailbox's client as GPU work: kernels that ring expert servers and wait for them, inside graphs."""
