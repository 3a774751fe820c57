"""Turns requests into prompts in separate processes, so that no request's cost delays running streams."""
