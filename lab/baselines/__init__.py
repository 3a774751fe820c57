"""Other systems compared with ours: kernels on the same cores, servers on the same file."""
