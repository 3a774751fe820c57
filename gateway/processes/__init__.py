"""What the gateway's processes have in common: counts that they share, and rare garbage collection."""
