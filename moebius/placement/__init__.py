"""Which routed experts are resident on GPUs: the same decision by engine, expert servers and planning."""
