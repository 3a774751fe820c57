# `make test-newcomer`: the README's commands on bare systems (debootstrap roots); tests/newcomer/run.sh says how.
# SUITES=bookworm takes one of them. Needs root and the Debian package debootstrap.
SUITES ?= bookworm trixie
.PHONY: test-newcomer
test-newcomer:
	@for suite in $(SUITES); do tests/newcomer/run.sh $$suite || exit 1; done
