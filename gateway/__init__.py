"""The OpenAI-compatible HTTP process: knows text, knows nothing of GPUs or experts."""
