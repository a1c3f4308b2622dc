"""The draft head's forward, in a server's rounding order."""
