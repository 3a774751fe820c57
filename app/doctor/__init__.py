"""`moebius doctor`: what a host, or a Pod's node, lacks to serve fast, and what provides it."""
