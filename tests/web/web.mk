# The page in headless Chromium; needs the Debian packages chromium and chromium-driver.
.PHONY: test-web axe screenshots
test-web: setup
	$(BIN)/python -m pytest -rs tests/web tests/service/test_gateway_web.py

# axe-core, with which tests/web/test_accessibility.py looks for what keeps people out; it is skipped without. Needs npm.
AXE = axe-core-4.14.1
AXE_SHA512 = 1477dafa598d8d065f273d6af302aa203c02e83131707b7fa648cd41bd3d6b734f8c22a0dab86ee6a6f64b8afbe804b214d36db85a2826965edfb3a0b9d546b5
axe:
	@mkdir -p build/axe
	cd build/axe && npm pack --silent $(subst core-,core@,$(AXE)) && \
	  echo "$(AXE_SHA512)  $(AXE).tgz" | sha512sum --check --quiet && \
	  tar xzf $(AXE).tgz --strip-components 1 package/axe.min.js && rm $(AXE).tgz

# The pictures of terminals and of the page in docs, made again; needs poppler-utils, too.
screenshots: setup
	$(BIN)/python -m tests.tools.screenshots
	$(BIN)/python -m tests.web.screenshots
