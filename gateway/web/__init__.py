"""The page at `/`: chat and live view as static files, and the figures that the live view shows."""
