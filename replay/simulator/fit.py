"""Refusals before anything runs: heads, wirings, rules and precisions that do not fit each other or the trace."""

from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.config import HeadConfig
from replay.checkpoint.tensor_table import LATENT_KV_B, expected_tensors, linear_names
from replay.engines.behaviour import Behaviour
from replay.engines.layer_names import fused_name
from replay.engines.precision import Format, Precision
from replay.engines.wiring import Wiring, check_wiring
from replay.errors import CheckpointError, UsageError
from replay.faults.change import Subject
from replay.traces.reader import Trace
from replay.traces.taps import EMBED
from replay.verify.rules import Rule


def check_fit(checkpoint: Checkpoint, wiring: Wiring, trace: Trace) -> None:
    """Refuse a head or wiring that does not fit the trace, from names and sizes alone.

    Raises WiringError, CheckpointError, or TraceError where the embedding cannot be looked up.
    """
    target = trace.header.target
    config = checkpoint.config
    if config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"draft head {checkpoint.name} reads features {config.target_hidden_size} wide, the trace's target "
            f"{target.name} is {target.hidden_size} wide; give a head that was made for this target"
        )
    if config.hidden_size != config.target_hidden_size and config.vocab_size < target.vocab_size:
        raise CheckpointError(
            f"draft head {checkpoint.name} embeds {config.vocab_size} tokens, the trace's target {target.name} has "
            f"{target.vocab_size}; give a head that was made for this target"
        )
    if EMBED in wiring.taps and EMBED not in trace.taps and trace.header.embed == "lookup":
        trace.embed_weight()  # raises what keeps it from being looked up
    check_wiring(wiring, available=trace.taps, hidden_size=target.hidden_size, fc_inputs=config.features_width)


class PromptRowsError(UsageError):
    """A head sees rows of prompts that the trace does not have."""


def check_prompt_rows(subject: Subject, trace: Trace) -> None:
    """Refuse a head that sees rows of prompts that the trace does not have. Raises PromptRowsError."""
    kept = trace.prompt_rows
    if kept is None:
        return
    seen = rows_seen(subject.config, subject.behaviour)
    if seen is None or seen > kept:
        sees = "all rows of a prompt" if seen is None else f"the last {seen} rows of a prompt"
        raise PromptRowsError(
            f"draft head {subject.checkpoint.name} sees {sees}, {trace.path} has the last {kept} of some; capture "
            f"again {'without --prompt-rows' if seen is None else f'with --prompt-rows last:{seen}'}"
        )


def rows_seen(config: HeadConfig, behaviour: Behaviour) -> int | None:
    """How many rows before an anchor decide what is drafted there, the anchor's own included; None: all of them.

    A row's draft KV is of its own features alone in the first layer, in each later one of what the layer before saw.
    """
    windows = [behaviour.window] * config.num_layers
    if config.block is not None:  # whose context rows see no others
        widest = None if None in config.block.windows else max(filter(None, config.block.windows), default=None)
        narrow = [one for one in (widest, behaviour.window) if one is not None]
        windows = [min(narrow)] if narrow else [None]
    known = [window for window in windows if window is not None]
    return sum(known) + (behaviour.pairing == "earlier-features") if len(known) == len(windows) else None


def check_topk(checkpoint: Checkpoint, topk: int) -> None:
    """Raises UsageError."""
    if topk > checkpoint.config.draft_vocab_size:
        raise UsageError(
            f"topk {topk} was asked for, draft head {checkpoint.name} has {checkpoint.config.draft_vocab_size} tokens "
            "to draft; type a smaller --topk"
        )


def check_rule(rule: Rule, trace: Trace) -> None:
    """Refuse a rule whose outcome the trace cannot tell. Raises UsageError."""
    total = len(trace.records)
    given = sum(record.source == "forced" for record in trace.records)
    cold = sum(record.temperature == 0 for record in trace.records)
    if rule.name == "greedy":
        return
    if given:
        raise UsageError(
            f"rule {rule} was asked for, {given} of {total} requests of {trace.path} follow text that was given, not "
            "sampled by the target; capture the prompts without their responses, or type --verify greedy"
        )
    if 0 < cold < total and (rule.name == "rejection" or not rule.lossless):
        raise UsageError(
            f"rule {rule} was asked for, {cold} of {total} requests of {trace.path} were recorded at temperature 0 and "
            "the others above; capture a trace of each, or type --verify target-only"
        )


def samples_drafts(rule: Rule, trace: Trace) -> bool:
    """Whether the head samples its drafts. At temperature 0 it drafts its argmax (sglang 0.5.23 spec_utils.py)."""
    return rule.name == "rejection" and any(record.temperature > 0 for record in trace.records)


def check_precision(precision: Precision, config: HeadConfig, head: str) -> None:
    """Refuse a precision that names no tensor of the head called ``head``, or tears a product's input apart.

    Raises UsageError.
    """
    linear = linear_names(config)
    norms = [name.removesuffix(".weight") for name, shape in expected_tensors(config).items() if len(shape) == 1]
    every = [*linear, "embed_tokens", *(name for name in norms if "norm" in name)]
    for rule in precision.rules:
        if rule.pattern and not any(rule.covers(name, ()) for name in every):
            raise UsageError(
                f"precision part {rule} matches no tensor of draft head {head}; it has {', '.join(linear)}, and norms "
                "and embed_tokens for who asks for them"
            )
    if config.latent is not None and precision.scheme(LATENT_KV_B, (LATENT_KV_B,)).input is not None:
        raise UsageError(
            f"precision {precision} quantises the input of kv_b_proj, and of a latent head that product is a part of "
            "the attention, whose input is the draft KV; type kv_b_proj.weight=..., or --kv-dtype for what it reads"
        )
    entering: dict[str, tuple[str, Format | None]] = {}
    for name in linear:
        product, form = fused_name(name), precision.scheme(name).input
        first, other = entering.setdefault(product, (name, form))
        if form != other:
            raise UsageError(
                f"precision {precision} quantises the inputs of {name} and of {first} differently, and they are one "
                f"input; type {product.rpartition('.')[2]}=..., or {name}.weight=... for the weight alone"
            )
