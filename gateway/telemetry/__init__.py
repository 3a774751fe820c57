"""Metrics, traces and repeated log lines of the gateway, and the port that serves them."""
