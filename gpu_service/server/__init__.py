"""The gRPC server: calls, what they may ask for, messages, probes, the live view and profiles."""
