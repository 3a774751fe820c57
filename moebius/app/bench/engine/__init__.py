"""`moebius bench engine`: the engine in this process, expert servers beside it, and what bounds a step."""
