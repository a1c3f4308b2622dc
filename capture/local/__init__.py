"""Capture with a Transformers target in this process."""
