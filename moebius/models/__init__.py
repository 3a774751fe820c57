"""One description of every model: how its files are read, what its tensors are called, what it computes."""
