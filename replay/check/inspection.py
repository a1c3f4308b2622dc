"""What lies in a trace or a draft head's folder: counted, then rendered. Behind ``replay inspect``."""

import os
import re
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from replay.check.mistaken import refuse_no_head
from replay.checkpoint.config import ARCHITECTURES, FAMILY_NAMES, HeadConfig
from replay.checkpoint.config_file import CONFIG, is_word, read_config
from replay.checkpoint.files import BINARY
from replay.errors import CheckpointError, UsageError
from replay.printable import html_table
from replay.traces.files import HEADER, describe_path
from replay.traces.remote import as_source, size_of
from replay.traces.weights import INDEX, SINGLE

if TYPE_CHECKING:
    from replay.traces.reader import Trace

_FIELDS_OF_HEADS = {"draft_vocab_size", "eagle_config", "num_aux_hidden_states", "target_hidden_size"}
_GENERATES = ("ForCausalLM", "ForConditionalGeneration")  # how transformers ends the names of models that write text


class _Table:
    """A notebook shows every field in a row."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = [[field.name.replace("_", " "), str(getattr(self, field.name))] for field in fields(self)]  # type: ignore
        return html_table(type(self).__name__, (), rows)


@dataclass(frozen=True, slots=True)
class TraceFacts(_Table):
    """A trace in numbers; tokens and bytes are sums over its requests and files."""

    path: str
    state: str
    target: str
    layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    engine: str
    taps: tuple[str, ...]
    tap_requests: dict[str, int]
    topk: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    categories: dict[str, int]
    finish_reasons: dict[str, int]
    sources: dict[str, int]
    temperature: float
    max_new_tokens: int
    observed_requests: int
    fed_rows: int
    shared_rows: int
    missing: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class DraftFacts(_Table):
    """A draft head in numbers, and the layer ids that its config states."""

    path: str
    family: str
    parameters: int
    bytes: int
    hidden_size: int
    target_hidden_size: int
    taps: int
    layers: int
    attention: str
    intermediate_size: int
    vocabulary: str
    lm_head: str
    rope: str
    switches: tuple[str, ...]
    dtype: str | None
    layer_ids: tuple[int, ...] | None
    block: str | None
    notes: tuple[str, ...]


def kind_of(path: Path) -> str:
    """``trace`` or ``draft``, by the file that marks each. Raises UsageError, which says what the folder is instead."""
    if os.path.lexists(path / HEADER):  # of one that is no plain file a strict reading says so
        return "trace"
    if not os.path.isdir(path):
        raise UsageError(f"{path} {describe_path(path)}; give the folder of a trace or of a draft head")
    if not os.path.lexists(path / CONFIG):
        if any(os.path.isfile(path / name) for name in (SINGLE, INDEX)):
            raise UsageError(f"{path} holds weights, but no config.json; copy that of the head beside them")
        raise UsageError(
            f"{path} is neither a trace (a folder with trace.json) nor a draft head (a folder with config.json)"
        )
    if (target := target_architecture(path)) is not None:
        raise UsageError(
            f"{path} is a target model ({target}), and inspect takes a trace or a draft head; type replay "
            f"check --draft DIR --target {path} to hold a head against it"
        )
    architecture = _other_architecture(path)
    if architecture is None or architecture in ARCHITECTURES:
        return "draft"  # what it lacks is for a strict reading to say
    raise UsageError(
        f"{path} is no EAGLE-3 head (its architecture is {architecture}), and inspect takes a trace or a draft head; "
        "give another folder"
    )


def refuse_target(path: Path) -> None:
    """Raises UsageError where the folder that was typed as a draft head is a target's, a trace, or a run with heads.

    What only a pytorch_model.bin could tell is left to whoever reads it: heads look like targets from outside.
    """
    refuse_no_head(path)
    if os.path.isfile(path / BINARY):
        return
    if (architecture := target_architecture(path)) is not None:
        raise UsageError(
            f"{path} is a target model ({architecture}) and no draft head; give --draft the folder of an EAGLE-3 head"
        )


def target_architecture(path: Path) -> str | None:
    """The architecture of a target model in ``path``; None of a head, or of what cannot be read."""
    architecture = _other_architecture(path)
    return architecture if architecture is not None and _is_target(path, architecture) else None


def _other_architecture(path: Path) -> str | None:
    """The architecture of what is no EAGLE-3 head as far as can be seen; None of a head, or of what cannot be read.

    A head says Eagle in its architecture, states a field that only heads have, or has an ``fc``; some call themselves
    LlamaForCausalLM, as a target does. A pytorch_model.bin is not opened: that would take loading all of it.
    """
    try:
        document = read_config(path)
        names = document.get("architectures")
        if not isinstance(names, list) or not names or not is_word(names[0]) or "eagle" in names[0].lower():
            return None
        if document.keys() & _FIELDS_OF_HEADS or _has_fc(path):
            return None
    except CheckpointError:
        return None
    return str(names[0])


def _has_fc(path: Path) -> bool:
    """Whether safetensors hold an ``fc``. Raises CheckpointError."""
    from replay.checkpoint.headers import read_weights

    if not any(os.path.isfile(path / name) for name in (SINGLE, INDEX)):
        return False
    return bool(read_weights(path, whole=False, only=re.compile(r"(?:model\.)?fc\.weight")).tensors)


def _is_target(path: Path, architecture: str) -> bool:
    """Whether a config says so: a generating model with a target's sizes, and more layers than a lone head's one."""
    from replay.check.facts import read_target_config

    try:
        layers = read_target_config(path).stated.count("num_hidden_layers")
        return architecture.endswith(_GENERATES) and (layers or 1) > 1
    except CheckpointError:
        return False


def trace_facts(trace: "Trace") -> TraceFacts:
    """Count what ``trace`` holds, from its header and request table alone."""
    header, requests = trace.header, trace.requests
    return TraceFacts(
        path=str(trace.path),
        state=header.state,
        target=header.target.name,
        layers=header.target.layers,
        hidden_size=header.target.hidden_size,
        vocab_size=header.target.vocab_size,
        dtype=header.target.dtype,
        engine=f"{header.engine.name} {header.engine.version}",
        taps=tuple(trace.taps),
        tap_requests=trace.tap_requests,
        topk=header.topk,
        requests=len(requests),
        prompt_tokens=int(requests["prompt_tokens"].sum()),
        output_tokens=int(requests["output_tokens"].sum()),
        categories=dict(Counter(category or "none" for category in requests["category"])),
        finish_reasons=dict(Counter(requests["finish_reason"])),
        sources=dict(Counter(requests["source"])),
        temperature=header.capture.temperature,
        max_new_tokens=header.capture.max_new_tokens,
        observed_requests=int(requests["server_verify_rounds"].count()),
        fed_rows=trace.fed_rows,
        shared_rows=sum(record.shared for record in trace.records),
        missing=(*header.missing, *filter(None, [header.uncovered])),
        bytes=sum(size_of(trace.path / name) for name in os.listdir(trace.path) if os.path.isfile(trace.path / name)),
    )


def _attention_words(config: HeadConfig) -> str:
    latent = config.latent
    if latent is None:
        return f"{config.num_heads} heads, {config.num_kv_heads} key-value heads, {config.head_dim} features each"
    return f"{config.num_heads} heads on a latent of {latent.kv_rank} features and a rope key of {latent.rope}"


def _block_words(config: HeadConfig) -> str | None:
    """What a head drafts at once; None of one that drafts token by token."""
    if config.mask_token is not None:
        return f"all tokens of a round, from masks that are token {config.mask_token} beside mask_hidden"
    if config.block is None:
        return None
    causal = sum(config.block.causal)
    seen = "each row sees the whole block" if not causal else f"{causal} of {config.num_layers} layers are causal"
    windows = sorted({str(window) for window in config.block.windows if window is not None})
    cut = f", windows of {', '.join(windows)}" if windows else ""
    return f"{config.block.size} tokens, masks are token {config.block.mask_token}, {seen}{cut}"


def draft_facts(path: Path) -> DraftFacts:
    """Load a head strictly and count it. Raises CheckpointError."""
    from replay.checkpoint.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(path)
    config, tensors = checkpoint.config, checkpoint.tensors
    flags = (
        "norm_before_residual", "norm_before_fc", "fc_norm", "qk_norm", "norm_output", "fc_bias", "attention_bias",
        "mlp_bias",
    )  # fmt: skip
    rope = f"{config.rope.type}, theta {config.rope.theta:g}"
    if config.rope.type != "default":
        rope += f", factor {config.rope.factor:g}"
    return DraftFacts(
        path=str(path),
        family=FAMILY_NAMES[config.family],
        parameters=sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        hidden_size=config.hidden_size,
        target_hidden_size=config.target_hidden_size,
        taps=config.num_taps,
        layers=config.num_layers,
        attention=_attention_words(config),
        intermediate_size=config.intermediate_size,
        vocabulary=f"{config.draft_vocab_size} of {config.vocab_size} tokens",
        lm_head=config.lm_head,
        rope=f"{rope}, up to position {config.max_position_embeddings}",
        switches=tuple(flag for flag in flags if getattr(config, flag)),
        dtype=config.dtype,
        layer_ids=config.layer_ids,
        block=_block_words(config),
        notes=checkpoint.notes,
    )


def inspect(path: "Path | str | Trace") -> TraceFacts | DraftFacts:
    """What lies in a trace (also one being recorded) or in a draft head's folder, counted.

    Raises UsageError for a folder that is neither, and TraceError or CheckpointError where it cannot be read.

    >>> replay.inspect(TRACE).requests
    4
    """
    from replay.traces.reader import Trace

    if isinstance(path, Trace):
        return trace_facts(path)
    folder = as_source(path)
    return draft_facts(folder) if kind_of(folder) == "draft" else trace_facts(Trace.open(folder, allow_incomplete=True))
