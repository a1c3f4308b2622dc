"""Rules on how head and target are shared out between GPUs.

Sources: SGLang 0.5.23 models/llama.py (LlamaAttention), models/kimi_k25_eagle3.py, models/deepseek_v2.py,
layers/linear.py (divide), speculative/draft_parallel.py, runtime_context.py (derive_attn_tp_size),
arg_groups/parallel_hook.py, arg_groups/validation_hook.py (check_server_args).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from replay.check.facts import Facts
from replay.check.finding import ERROR, Finding
from replay.check.server import Server
from replay.check.server_finding import at, flag
from replay.check.speculation import attention_dp, drafts
from replay.checkpoint.config_file import Settings

_ARGUMENT = "config.argument"
_SIZES = ("tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "ep_size", "moe_dp_size", "nnodes")
_MOST = 4096  # GPUs of which advice is looked for


@dataclass(frozen=True, slots=True)
class _Layout:
    """GPUs of the tensor-parallel group, how many of them share one attention of the target, and one of the head."""

    tp: int
    target: int
    head: int
    groups: int


def shares(facts: Facts) -> Iterator[Finding]:
    """What does not divide. At most one finding of the line, one of the head and one of the target."""
    server = facts.server
    if server.engine != "sglang" or server.live or (server.text("device") or "").startswith("cpu"):
        return  # on a CPU the heads are padded (configs/update_config.py)
    wrong = next(_line(facts), None)
    if wrong is not None:
        yield wrong
        return
    layout = _layout(server)
    if drafts(server):
        yield from _head(facts, layout)
    yield from _target(facts, layout)


def _layout(server: Server) -> _Layout:
    tp, cp, groups = server.integer("tp_size") or 1, server.integer("attn_cp_size") or 1, attention_dp(server)
    shared = tp // groups // cp
    return _Layout(tp, shared, shared if groups > 1 else tp, tp // shared)


def _line(facts: Facts) -> Iterator[Finding]:
    """Sizes that contradict each other."""
    server = facts.server
    small = next((name for name in _SIZES if (server.integer(name) or 1) < 1 or server.integer(name) == 0), None)
    if small is not None:
        yield at(facts, _ARGUMENT, ERROR, f"SGLang stops: {flag(small)} {server.integer(small)} is no number of parts",
                 small, "at least 1", f"{flag(small)} 1")  # fmt: skip
        return
    tp, pp, nodes = (server.integer(name) or 1 for name in ("tp_size", "pp_size", "nnodes"))
    cp, groups, ep = server.integer("attn_cp_size") or 1, attention_dp(server), server.integer("ep_size") or 1
    replicas = 1 if server.flag("enable_dp_attention") else server.integer("dp_size") or 1
    if groups > 1 and replicas > 1:
        yield at(facts, _ARGUMENT, ERROR, "SGLang stops: replicas and attention data parallelism exclude each other",
                 "dp_size", "1", "start the server without --dp-size")  # fmt: skip
    elif tp % (groups * cp):
        field = "attn_dp_size" if "attn_dp_size" in server.arguments else "dp_size" if groups > 1 else "attn_cp_size"
        yield at(facts, _ARGUMENT, ERROR, f"SGLang stops: {tp} GPUs cannot be shared out between {groups * cp} groups "
                 "of attention", field, f"a divisor of {tp}", f"{flag(field)} {tp}")  # fmt: skip
    elif ep > 1 and tp % ep:
        yield at(facts, _ARGUMENT, ERROR, f"SGLang stops: {ep} shares of experts do not divide {tp} GPUs", "ep_size",
                 f"a divisor of {tp}", f"--ep-size {tp}")  # fmt: skip
    elif server.integer("moe_dense_tp_size") not in (None, 1, tp):
        yield at(facts, _ARGUMENT, ERROR, f"SGLang stops: dense layers are shared by 1 or all {tp} GPUs",
                 "moe_dense_tp_size", f"1 or {tp}", "--moe-dense-tp-size 1")  # fmt: skip
    elif tp * pp % nodes:
        yield at(facts, _ARGUMENT, ERROR, f"SGLang stops: {nodes} nodes do not divide {tp * pp} GPUs", "nnodes",
                 f"a divisor of {tp * pp}", "give --tp-size for all nodes together")  # fmt: skip


def _head(facts: Facts, layout: _Layout) -> Iterator[Finding]:
    config = facts.draft.config
    uneven = _uneven(config, layout.head, facts.draft.mla, "intermediate_size")
    if uneven is not None:
        yield _found(facts, layout, "the head", *uneven)


def _target(facts: Facts, layout: _Layout) -> Iterator[Finding]:
    config = facts.target.config
    uneven = _uneven(config, layout.target, _whole(config, "kv_lora_rank") is not None)
    if uneven is not None:
        yield _found(facts, layout, "the target", *uneven)


def _uneven(config: Settings, parts: int, latent: bool, *more: str) -> tuple[int, str, int] | None:
    """The first size that ``parts`` GPUs cannot share, its name, and the most GPUs that can."""
    sizes = {name: _whole(config, name) for name in ("num_attention_heads", *more)}
    groups = None if latent else _whole(config, "num_key_value_heads")

    def fits(parts: int) -> str | None:
        odd = next((name for name, size in sizes.items() if size is not None and size % parts), None)
        if odd is None and groups is not None and (groups % parts if groups >= parts else parts % groups):
            return "num_key_value_heads"
        return odd

    name = fits(parts)
    if name is None:
        return None
    fewer = next(fewer for fewer in range(min(parts - 1, _MOST), 0, -1) if fits(fewer) is None)
    return _whole(config, name) or 0, name, fewer


def _found(facts: Facts, layout: _Layout, whose: str, size: int, name: str, fewer: int) -> Finding:
    words = {"num_attention_heads": "attention heads", "num_key_value_heads": "key-value heads"}
    said = f"{size} {words[name]}" if name in words else f"{name} of {size}"
    parts = layout.head if whose == "the head" else layout.target
    field = "tp_size" if "tp_size" in facts.server.arguments else "attn_dp_size"
    return at(facts, _ARGUMENT, ERROR, f"SGLang stops: {whose} has {said}, which {parts} GPUs cannot share evenly",
              field, f"at most {fewer * layout.groups} GPUs", f"--tp-size {fewer * layout.groups}")  # fmt: skip


def _whole(config: Settings, name: str) -> int | None:
    """A size that the config states once for all layers."""
    value = config.values.get(name)
    return value if type(value) is int and value > 0 else None
