"""Kinds of device: what is there, and how kernels for it are made and launched."""
