"""What goes wrong in servers: one table of fault kinds, and what each changes."""
