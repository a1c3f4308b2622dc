"""Used for images only; SGLang before 0.5.22 and Transformers before 5.19 import these names at start."""

from enum import Enum

decode_jpeg = decode_image = None


class ImageReadMode(Enum):
    """Transformers has it in annotations."""

    RGB = "RGB"
