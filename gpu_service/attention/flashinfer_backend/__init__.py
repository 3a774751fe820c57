"""Paged attention by FlashInfer (0.6.13 to 0.7). Imported only where FlashInfer is installed."""
