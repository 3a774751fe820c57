"""Scripted conversations with clients; run in an environment of their own, see tests/clients/run.py."""
