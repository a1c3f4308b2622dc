"""Used for images only; releases before 0.5.22 import one name of it at start."""

decode_jpeg = None
