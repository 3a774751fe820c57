"""Free functions with one signature for the reference and for fast implementations."""
