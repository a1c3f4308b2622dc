"""What transformers/image_utils.py and sglang/srt/multimodal/internvl_utils.py import at start."""

from enum import Enum


class InterpolationMode(Enum):
    """The names that Transformers puts into a table."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(picture: object) -> None:
    """Not to be had here."""
    raise NotImplementedError("the CPU rig has no image functions")
