"""Benchmarks that print our figure, the limit measured in the same run, and the ratio of the two."""
