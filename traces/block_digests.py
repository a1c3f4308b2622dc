"""Digests of how token ids begin: one for each block of them, of all bytes from the first up to the block's end."""

import hashlib
from collections.abc import Iterator


def digests_by_block(tokens: bytes, size: int) -> Iterator[bytes]:
    """One for each whole block of ``size`` bytes, 16 bytes long; equal ones mean equal beginnings."""
    chain = hashlib.blake2b(digest_size=16)
    for end in range(size, len(tokens) + 1, size):
        chain.update(tokens[end - size : end])
        yield chain.copy().digest()
