"""`moebius bench steps`: what a GPU does in ten decode steps, from the profiler's own events."""
