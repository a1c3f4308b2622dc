"""Which layers each target captures for an EAGLE-3 head, by release of SGLang."""
