"""One module per CLI command; each has `register(app)` and imports its heavy parts only when it runs."""
