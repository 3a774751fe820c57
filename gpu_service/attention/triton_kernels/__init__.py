"""Paged attention as Triton kernels. Imported only for a CUDA device, or by tests in Triton's interpreter."""
