"""Empty: imported at start, used for images only."""
