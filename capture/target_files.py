"""Which checkpoint a trace was made with, told without reading all of it."""

import hashlib
from pathlib import Path

from replay.errors import CaptureError

_SAMPLE = 1 << 16  # bytes of weights read from the middle and the end of each file: two fine-tunes differ there


def fingerprint_target(folder: Path) -> str:
    """SHA-256 over config.json and, of each safetensors file, its name, header and two samples of its weights.

    Raises CaptureError where the folder holds no safetensors file or one that is cut short.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CaptureError(f"{folder} holds no safetensors file: save the target's weights as safetensors")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if size < 8 + length:
                raise CaptureError(f"{path} is cut short ({size} bytes): copy or download it again")
            digest.update(path.name.encode() + b"\0" + file.read(length))
            for start in ((size + 8 + length) // 2, max(8 + length, size - _SAMPLE)):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
