"""Conventions as data: what an engine does with a head, wirings, precisions, and how it runs a head."""
