"""Experts whose weights are on the engine's own device; they stay in the packed form the CPU kernels use."""
