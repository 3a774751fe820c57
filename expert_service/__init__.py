"""One process per NUMA node: holds a slice of the routed experts and computes it on request."""
