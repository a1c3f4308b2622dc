"""A draft head on disk: its config, the tensors it must have, and how they are read."""
