"""The engine process: knows tokens and tensors, knows nothing of HTTP or text."""
