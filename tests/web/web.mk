# The page in headless Chromium; needs the Debian packages chromium and chromium-driver.
.PHONY: test-web
test-web: setup
	$(BIN)/python -m pytest -rs tests/web tests/service/test_gateway_web.py
