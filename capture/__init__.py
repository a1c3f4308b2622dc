"""Everything that meets a target: prompts in, a trace out."""
