"""A processor that takes text only."""

from typing import Any, ClassVar

from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor


class TextOnly(BaseMultimodalProcessor):
    """Holds what SGLang reads of a processor; nothing of images is set up."""

    models: ClassVar[list[type]] = [KimiK25ForConditionalGeneration]

    def __init__(self, hf_config: Any, server_args: Any, _processor: Any, *args: Any, **kwargs: Any) -> None:
        self._processor, self.hf_config, self.server_args = _processor, hf_config, server_args

    async def process_mm_data_async(self, *args: Any, **kwargs: Any) -> Any:
        """Never asked of text."""
        raise NotImplementedError("the rig has no images")
