"""Several models behind one port: which of them are loaded, and whose turn it is (docs/decisions/0040)."""
