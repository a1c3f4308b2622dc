"""From the training metric down to what a server showed, step by step."""
