"""What models write besides content: reasoning and tool calls, read from their output as it grows."""
