"""Several gateway processes on one port: the first one starts, watches, replaces and asks the others."""
