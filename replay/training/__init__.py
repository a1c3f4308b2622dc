"""Heads that are being trained: their accept length between two steps of a training loop."""
