"""Where an engine runs a head otherwise than it was trained: biases that it reads or not, norms that it has or not.

Sources: SGLang 0.5.23 models/llama_eagle3.py (q, k and v without bias, ``hidden_norm`` at the entry of every layer, a
final norm in any case), models/llama_eagle.py (layers of models/llama.py ``LlamaDecoderLayer``, whose attention has
biases for ``attention_bias`` or ``bias``, and whose o_proj llama_eagle3.py keeps), models/dflash.py.
"""

from collections.abc import Iterator

from replay.checkpoint.config import HeadConfig
from replay.engines.profiles import EngineProfile


def reads_qkv_bias(config: HeadConfig, profile: EngineProfile) -> bool:
    """Whether the biases of q, k and v are added; that of o_proj is wherever a head has one."""
    engines = profile.attention_bias or config.vllms or config.block is not None or config.builds_bias
    return config.attention_bias and engines


def departures(config: HeadConfig, profile: EngineProfile) -> Iterator[str]:
    """Notes on what ``profile`` does otherwise than the head's trainer, each a sentence."""
    if config.attention_bias and not reads_qkv_bias(config, profile):
        yield f"{profile.name} builds q, k and v without the bias that this head has"
    if profile.name != "sglang":
        return
    biased = {"q, k, v": config.attention_bias, "o_proj": config.output_bias}
    lacking = [name for name, there in biased.items() if not there]
    if config.builds_bias and lacking:
        yield (
            f"{profile.name} builds {' and '.join(lacking)} with biases that this head lacks and leaves them as they "
            "are in memory; it is replayed without them"
        )
    if config.family != "eagle3" or config.vllms:
        return
    if config.num_layers > 1 and config.later_norm != "hidden_norm":
        yield (
            f"{profile.name} norms the stream of layers after the first by a hidden_norm that this head lacks; it is "
            f"replayed as it was trained, by {config.later_norm}"
        )
    if not config.last_norm:
        yield (
            f"{profile.name} has a norm in front of lm_head that this head lacks; it is replayed as it was trained, "
            "without one"
        )
