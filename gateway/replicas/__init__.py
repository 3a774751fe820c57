"""Several gpu_service replicas behind one gateway: which of them a request goes to, and what if one fails."""
