"""Files and batches of requests: kept on disk, computed beside live requests, continued after a restart."""
