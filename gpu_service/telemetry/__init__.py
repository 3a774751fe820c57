"""Metrics and spans of the engine."""
