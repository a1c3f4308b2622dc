"""Requests token by token."""
