"""One model on several devices: who is which rank, and how ranks exchange tensors and messages."""
