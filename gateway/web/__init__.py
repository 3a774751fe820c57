"""Serves the page at `/`: chat and live view as static files, and the figures for the live view."""
