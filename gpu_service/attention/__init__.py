"""Paged attention backends behind one facade."""
