"""A web page in one file."""
