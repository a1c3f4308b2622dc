"""The lint: what a head, its target and a server say of themselves, held against known faults."""
