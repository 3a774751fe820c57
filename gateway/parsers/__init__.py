"""Reads what models write besides content: reasoning and tool calls, from their output as it grows."""
