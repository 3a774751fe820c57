"""`moebius bench serve`: load on any OpenAI-compatible endpoint, and how it answers."""
