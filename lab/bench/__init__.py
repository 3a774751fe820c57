"""Benchmarks of parts of the system: our figure, the limit measured in the same run, and their ratio."""
