"""Stands in for torchvision, which SGLang and Transformers import for image models; no text model calls it.

The real one must be built for the installed torch to be imported at all. Only what is imported at start is here.
"""

__version__ = "0.28.0"  # Transformers compares it
