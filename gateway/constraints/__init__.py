"""Builds the engine's constraints on an output: for answers in a format, and for tool calls."""
