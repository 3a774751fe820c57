"""`moebius bench engine`: the engine in this process, its expert servers, and what bounds a step."""
