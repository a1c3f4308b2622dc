"""Acceptance rules as they are spelled, to be held against the process itself."""

RULES = ["target-only", "target-only:single=0.5,acc=0.7", "target-only:acc=0.4", "typical", "typical:epsilon=0.3"]
TREE_RULES = ["target-only", "target-only:single=0.5,acc=0.7", "target-only:acc=0.4"]
