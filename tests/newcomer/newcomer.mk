# `make test-newcomer`: the commands of README and docs/install.md on bare systems (debootstrap roots); run.sh says how.
# SUITES=bookworm takes one of them. Needs root and the Debian package debootstrap.
SUITES ?= bookworm trixie noble
.PHONY: test-newcomer test-wheel test-wheels
test-newcomer:
	@for suite in $(SUITES); do tests/newcomer/run.sh $$suite || exit 1; done

# A wheel installed with pip, pipx and uv, each with the demo: of this machine's Python; of those of the bare systems
# (3.11, 3.13 and 3.12).
test-wheel: wheel
	tests/newcomer/wheel.sh $$(ls -t $(DIST)/moebius-*.whl | head -n 1)
test-wheels:
	@for suite in $(SUITES); do STEPS=wheel tests/newcomer/run.sh $$suite || exit 1; done
