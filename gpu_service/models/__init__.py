"""One small file per family: composition only."""
