"""Writes `tests/data/checkpoints`: published models' tensors, by their configurations and naming rules."""
