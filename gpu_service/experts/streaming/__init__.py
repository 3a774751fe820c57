"""Experts of the expert servers, copied from their memory to the GPU while a step computes."""
