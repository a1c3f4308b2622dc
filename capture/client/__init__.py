"""Capture from a running server over HTTP."""
