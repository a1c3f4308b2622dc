"""A trace, heads and variants become rounds."""
