"""Counts, on the device, which routed experts are chosen."""
