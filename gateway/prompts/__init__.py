"""Requests become prompts in processes of their own: whatever one of them costs, streams go on."""
