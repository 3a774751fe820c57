"""`moebius top`: figures of `/v1/live`, over time, in a terminal."""
