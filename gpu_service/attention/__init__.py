"""Paged attention: backends over keys and values of heads, and (`mla`) over latents."""
