"""Schemas of request bodies. A field is implemented or refused by name; none is silently dropped."""
