"""Empty: transformers imports the module ``functional`` from here."""
