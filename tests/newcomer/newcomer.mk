# `make test-newcomer`: the commands of README and docs/install.md on bare systems (debootstrap roots); run.sh says how.
# SUITES=bookworm takes one of them. Needs root and the Debian package debootstrap.
SUITES ?= bookworm trixie noble
.PHONY: test-newcomer test-wheel
test-newcomer:
	@for suite in $(SUITES); do tests/newcomer/run.sh $$suite || exit 1; done

# A wheel installed with pip, pipx and uv, each with the demo.
test-wheel: wheel
	tests/newcomer/wheel.sh $$(ls -t $(DIST)/moebius-*.whl | head -n 1)
