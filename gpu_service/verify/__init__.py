"""Whether loaded experts compute what the checkpoint says: at start, and for `moebius verify`."""
