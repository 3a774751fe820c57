"""Which routed experts are on the GPU, and what is recorded of routing to decide it."""
