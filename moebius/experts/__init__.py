"""Where routed experts are: which are resident on GPUs, and which part each server holds."""
