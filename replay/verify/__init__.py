"""Acceptance: the rules, what each accepts of a draft, and what is expected where tokens are sampled."""
