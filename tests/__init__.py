"""Imported before conftest.py, and so before numpy: its OpenBLAS then reads how many threads it may have."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # One of several workers: more threads would only wait for one another's cores. Products of small matrices
    # took three times as long.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
