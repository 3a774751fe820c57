"""Resident experts as Triton kernels. Imported only for a CUDA device, or by tests in its interpreter."""
