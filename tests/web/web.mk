# The page in headless Chromium; needs the Debian packages chromium and chromium-driver.
.PHONY: test-web screenshots
test-web: setup
	$(BIN)/python -m pytest -rs tests/web tests/service/test_gateway_web.py

# The pictures of terminals and of the page in docs, made again; needs poppler-utils, too.
screenshots: setup
	$(BIN)/python -m tests.tools.screenshots
	$(BIN)/python -m tests.web.screenshots
