"""One rounds file, shown."""
