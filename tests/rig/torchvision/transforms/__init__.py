"""What sglang/srt/configs/deepseek_ocr.py and transformers/image_utils.py import at start."""

from torchvision.transforms.functional import InterpolationMode as InterpolationMode
