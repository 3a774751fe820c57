"""Checkpoints of published shapes with random weights: what speed is measured on where no weights can be had.

They are complete (`moebius serve` takes them like any other), written at the speed of memory, and their
routers can be skewed as trained ones are.
"""

from lab.random_model.build import RandomModelOptions, write_random_model

__all__ = ["RandomModelOptions", "write_random_model"]
