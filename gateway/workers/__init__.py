"""Several gateway processes on one port: the first one starts, monitors and replaces the others."""
