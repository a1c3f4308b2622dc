"""Values of each fault kind that are worth a replay, given a head and a trace. Every kind of the table has an entry."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from replay.diagnosis.case import Case
from replay.engines.behaviour import CROSSED, RECORDED
from replay.faults.table import TREE_FAULT
from replay.traces.fields import count_of
from replay.traces.reader import Trace

LikelyValues = Callable[[Case], Iterable[str]]


def always(*values: str) -> LikelyValues:
    """The same values for every head and trace."""
    return lambda case: values


CANNOT_BE_GUESSED = always()


def _layer_ids(case: Case) -> Iterator[str]:
    yield from ("1", "-1", "default")
    yield from (f"{slot}:{shift}" for slot in range(len(case.served.wiring.taps)) for shift in (1, -1))


def _missing_slots(case: Case) -> Iterator[str]:
    yield from (*map(str, range(len(case.served.wiring.taps))), "all")


def _offsets(case: Case) -> Iterator[str]:
    # Where the step is not added, SGLang's rows all stand where its first one does, vLLM's at the anchor row.
    yield from ("1", "-1", "2", "stuck:1", "stuck")
    feeding = case.judged_feeding
    if feeding is not None and feeding.offset and 2 * feeding.at_offset > feeding.rows:
        yield f"all:{feeding.offset}"  # RoPE hardly shows it, the feed does


def _norm_epsilons(case: Case) -> Iterator[str]:
    stated = case.checkpoint.config.rms_norm_eps
    yield from (text for text in ("1e-6", "1e-5", "1e-3", "0.1") if float(text) != stated)


def _score_scales(case: Case) -> Iterator[str]:
    """As factors on head_dim**-0.5: no scale at all; scaled twice, or by 1 / head_dim; with another width in place of
    head_dim, hidden_size / heads or hidden_size; and twice or half of it. YaRN's factor of a latent head missing or
    squared, and scores scaled by the width of what its draft KV holds, or without the rope key's."""
    config = case.checkpoint.config
    width = config.head_dim
    factors = [width**0.5, width**-0.5, (width * config.num_heads / config.hidden_size) ** 0.5]
    factors += [(width / config.hidden_size) ** 0.5, 2.0, 0.5]
    if config.latent is not None:
        stored = config.latent.kv_rank + config.latent.rope
        factors += [1 / config.rope.score_factor, config.rope.score_factor]
        factors += [(width / stored) ** 0.5, (width / config.latent.nope) ** 0.5]
    yield from dict.fromkeys(f"{factor:.9g}" for factor in factors if factor != 1)


def _dropped_blocks(case: Case) -> Iterator[str]:
    blocks, layers = ("attention", "mlp"), case.checkpoint.config.num_layers
    yield from blocks
    if layers > 1:
        yield from (f"{block}:{layer}" for layer in range(layers) for block in blocks)


def _rope_params(case: Case) -> Iterator[str]:
    rope = case.checkpoint.config.rope
    yield from (f"theta:{theta}" for theta in (10000, 500000, 1000000) if theta != rope.theta)
    if rope.type != "default":
        yield "scaling:none"


def _max_lengths(case: Case) -> Iterator[str]:
    """What the head states, and powers of two below the longest request."""
    stated = case.checkpoint.config.max_position_embeddings
    limits = sorted({limit for limit in (stated, *_powers_of_two(32)) if limit < _longest(case.trace)})
    yield from (f"{limit}{beyond}" for limit in limits for beyond in ("", ":dummy"))


def _windows(case: Case) -> Iterator[str]:
    """Those that the server's ``--speculative-draft-window-size`` gives, the own row included, then the usual ones."""
    stated = count_of(case.trace.header.engine.details.get("speculative_draft_window_size", ""))
    told = () if stated is None else (stated + 1,)
    yield from (str(window) for window in (*told, 4, 8, 16, 32, 64, 128, 512, 2048) if window < _longest(case.trace))


def _prefixes(case: Case) -> Iterator[str]:
    prompts = sorted(record.prompt_tokens for record in case.trace.records) or [0]
    sizes = [size for size in (4, 16, 64, 256, prompts[len(prompts) // 2] // 2) if 0 < size < prompts[-1]]
    yield from (f"{size}{fill}" for size in sizes for fill in ("", ":masked"))


def _spans(case: Case) -> Iterator[str]:
    """Spans of the output, each as long as all before it: one of them overlaps with whatever was left out."""
    longest = max((record.tokens - record.prompt_tokens for record in case.trace.records), default=0)
    start, stop = 0, 8
    while start < longest:
        yield from (f"{start}:{stop}", f"{start}:{stop}:masked")
        start, stop = stop, 2 * stop


def _chunks(case: Case) -> Iterator[str]:
    """Where the trace records where prompts were cut, there; then the server's own ``--chunked-prefill-size`` where the
    trace has it, and powers of two.

    Prompts that share a prefill share its chunk, so that under load a prompt's own chunks end elsewhere.
    """
    records = case.trace.records
    if all(record.pieces for record in records) and any(len(record.pieces) > 1 for record in records):
        yield RECORDED
    stated = case.trace.header.engine.details.get("chunked_prefill_size", "")
    longest = max((record.prompt_tokens for record in records), default=0)
    told = 0 if stated.startswith("-") else count_of(stated) or 0  # -1: prompts are whole
    yield from (str(size) for size in (told, *_powers_of_two(8)) if 0 < size < longest)


def _crossed_rows(case: Case) -> Iterator[str]:
    """Where the server verified several requests together: rows that differ in its batches. A batch of two has one
    other row, and one step or two hand over a state at most once."""
    largest, steps = case.trace.largest_batch, case.served.steps
    if largest < 2 or steps < 2:
        return
    for row in CROSSED[1:] if largest > 2 else ("previous", "first"):
        yield row
        if steps > 2:
            yield f"{row}:once"


def _mask_tokens(case: Case) -> Iterator[str]:
    """The token that padding has in many vocabularies, and the neighbours of the mask token."""
    block = case.checkpoint.config.block
    near = () if block is None else (block.mask_token - 1, block.mask_token + 1)
    tokens = [token for token in dict.fromkeys((0, *near)) if block is None or token != block.mask_token]
    yield from (str(token) for token in tokens if 0 <= token < case.checkpoint.config.vocab_size)


def _block_sizes(case: Case) -> Iterator[str]:
    """That of training, then the usual ones; a block of one more than are drafted is the healthy server's."""
    block = case.checkpoint.config.block
    sizes = dict.fromkeys((*(() if block is None else (block.size,)), 8, 16, 32))
    yield from (str(size) for size in sizes if size > case.served.steps + 1)


def _tree_layouts(case: Case) -> Iterator[str]:
    yield from (layout for layout in ("slot", "path") if case.served.topk > 1 and layout != case.served.kv)


def _powers_of_two(first: int) -> Iterator[int]:
    """From ``first``, a power of two, to 8192, the largest chunk that engines cut by default."""
    while first <= 8192:
        yield first
        first *= 2


def _longest(trace: Trace) -> int:
    """Tokens of the longest request."""
    return max((record.tokens for record in trace.records), default=0)


LIKELY_VALUES: Mapping[str, LikelyValues] = {
    "wiring.aux-layer-id": _layer_ids,
    "wiring.aux-missing": _missing_slots,
    "wiring.aux-capture-stage": always("normed"),
    "wiring.concat-order": always("qkv", "fc"),
    "wiring.norm": always(
        "residual", "skip:input_norm", "skip:fc_norm", "skip:hidden_norm", "skip:input_layernorm",
        "skip:post_attention_layernorm", "skip:norm", "skip:kv_a_layernorm", "skip:q_a_layernorm",
        "skip:q_norm", "skip:k_norm", "skip:enorm", "skip:hnorm",
    ),
    "wiring.norm-eps": _norm_epsilons,
    "wiring.recycle-norm": always("other"),
    "wiring.multi-layer": always("input_layernorm", "no-residual"),
    "shift.alignment": always("token", "features"),
    "shift.stale-row": always("anchor", "previous", "first", "last"),
    "position.offset": _offsets,
    "position.rope-params": _rope_params,
    "position.rope-geometry": always("interleaved", "halves", "partial:0.75", "partial:0.5", "partial:0.25"),
    "position.max-len": _max_lengths,
    "attn.window": _windows,
    "attn.scale": _score_scales,
    "vocab.d2t": always("absolute", "identity", "offset:1", "offset:-1"),
    "weights.overwritten": always("lm_head", "embed:own", "embed:target"),
    "weights.missing": always(
        "lm_head", "fc", "norm", "layers.0.hidden_norm", "layers.0.input_layernorm",
        "layers.0.post_attention_layernorm", "layers.0.self_attn.o_proj",
        "lm_head:zero", "fc:zero",  # o_proj of zeros is state.dropped=attention
    ),
    "weights.layout": always("qkv-interleaved"),
    "kv.rollback": always("stale", "accumulate", "hole", "full-hole"),
    "kv.prefix-reuse": _prefixes,
    "kv.slot-write": always("overwrite", "unseen"),
    "kv.chunk-boundary": _chunks,
    "kv.skip-draft": _spans,
    "kv.handoff": always("empty", "hidden", "kv"),
    "kv.none": always("alone"),
    "state.hidden-row": always("drafted", "first", "previous", "hidden-only"),
    "state.dropped": _dropped_blocks,
    "state.crossed": _crossed_rows,
    "state.noise": CANNOT_BE_GUESSED,  # its drafts are nobody's
    "precision.draft-weights": always(
        "fp8", "fp8:channel", "weights=fp8", "weights=fp8:channel", "int8", "w8a8", "w4a16:g128", "w4a16:g128:sym7",
        "w4a16:g128:asym", "w4a16:g64", "w4a16:g32", "w4a16:g32:asym", "nvfp4", "mxfp4",
    ),
    "precision.draft-kv": always("fp8_e4m3", "fp8_e5m2", "int8", "int4"),
    "precision.dtype-cast": always("fp16", "bf16"),
    "block.attention": always("causal", "bidirectional"),
    "block.mask-token": _mask_tokens,
    "block.size": _block_sizes,
    "block.late-context": always("1", "2", "4"),
    TREE_FAULT: _tree_layouts,
}  # fmt: skip
