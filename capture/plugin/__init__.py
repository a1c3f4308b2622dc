"""Recording inside a running SGLang server. The only room that imports sglang."""
