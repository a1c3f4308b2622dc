"""Two variants on the same requests and anchors."""
