"""The trace and rounds files: the two joints between recording, simulating and analysing (see SPEC.md)."""
