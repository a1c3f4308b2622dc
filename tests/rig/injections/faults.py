"""Every injection by its name: those of replay's table by KIND=VALUE, those outside it by ``x.`` and a word."""

from collections.abc import Callable, Mapping

from . import feed, head, kv, logits
from .live import Live


def _both(*changes: Callable[[Live], None]) -> Callable[[Live], None]:
    def together(live: Live) -> None:
        for change in changes:
            change(live)

    return together


HARMLESS: Mapping[str, Callable[[Live], None]] = {
    "ok.zero-bias": head.zero_bias,
    "ok.threads": head.one_thread,
}

OF_THE_TABLE: Mapping[str, Callable[[Live], None]] = {
    "wiring.aux-layer-id=default": feed.other_taps((2, 15, 27)),
    "wiring.aux-layer-id=1": feed.other_taps((1, 4, 17)),
    "wiring.aux-layer-id=2:-1": feed.other_taps((0, 3, 15)),
    "wiring.aux-missing=0": feed.zero_slots(0),
    "wiring.aux-missing=1": feed.zero_slots(1),
    "wiring.aux-missing=2": feed.zero_slots(2),
    "wiring.aux-missing=all": feed.zero_slots(),
    "wiring.aux-capture-stage=normed": feed.normed_taps,
    "wiring.concat-order=qkv": head.swapped_halves,
    "wiring.concat-order=fc": feed.reversed_taps,
    "wiring.norm=residual": head.normed_residual,
    "wiring.norm=skip:hidden_norm": head.skip_norm("hidden_norm"),
    "wiring.norm=skip:input_layernorm": head.skip_norm("input_layernorm"),
    "wiring.norm=skip:post_attention_layernorm": head.skip_norm("post_attention_layernorm"),
    "wiring.norm=skip:norm": head.skip_norm("norm"),
    "wiring.recycle-norm=post": head.recycle_normed,
    "shift.alignment=token": feed.own_token,
    "shift.alignment=features": feed.earlier_features,
    "position.offset=1": feed.drafted_offset(1),
    "position.offset=-1": feed.drafted_offset(-1),
    "position.offset=stuck": feed.stuck(),
    "position.rope-params=theta:500000": head.rope(base=500000),
    "position.rope-geometry=interleaved": head.rope(is_neox_style=False),
    "position.rope-geometry=partial:0.5": head.rope(rotary_dim=32),
    "position.max-len=48": feed.most_positions(48),
    "position.max-len=64:dummy": feed.dummy_from(64),
    "attn.window=8": kv.window(8),
    "attn.window=32": kv.window(32),
    "vocab.d2t=absolute": head.vocabulary(lambda true, draft: true - draft),
    "vocab.d2t=identity": head.vocabulary(lambda true, draft: draft),
    "vocab.d2t=offset:1": head.vocabulary(lambda true, draft: true + 1),
    "weights.overwritten=lm_head": head.target_lm_head,
    "weights.missing=norm": head.missing("norm", "ones"),
    "weights.missing=layers.0.hidden_norm": head.missing("layers.0.hidden_norm", "ones"),
    "weights.missing=layers.0.self_attn.o_proj": head.missing("layers.0.self_attn.o_proj", "zeros"),
    "weights.missing=fc": head.missing("fc", "noise"),
    "weights.layout=qkv-interleaved": head.interleaved_qkv,
    "kv.rollback=stale": kv.stale,
    "kv.rollback=accumulate": kv.accumulate,
    "kv.rollback=hole": kv.hole(lambda live, accepted: True),
    "kv.rollback=full-hole": kv.hole(lambda live, accepted: accepted == live.steps),
    "kv.prefix-reuse=16": kv.no_prefix(16),
    "kv.prefix-reuse=16:masked": kv.no_prefix(16, masked=True),
    "kv.slot-write=overwrite": kv.drafted_rows(itself=True),
    "kv.slot-write=unseen": kv.drafted_rows(itself=False),
    "kv.chunk-boundary=8": feed.chunk_tails(8),
    "kv.skip-draft=4:24": kv.no_span(4, 24),
    "kv.skip-draft=4:24:masked": kv.no_span(4, 24, masked=True),
    "kv.handoff=hidden": feed.blind_start,
    "kv.handoff=kv": kv.no_prefix(1 << 30),
    "kv.handoff=empty": _both(feed.blind_start, kv.no_prefix(1 << 30)),
    "kv.none=alone": kv.alone,
    "state.hidden-row=first": kv.next_row("first"),
    "state.hidden-row=previous": kv.next_row("previous"),
    "state.hidden-row=hidden-only": kv.next_row("hidden-only"),
    "state.crossed=previous": feed.crossed_states(lambda row, batch: (row - 1) % batch),
    "state.crossed=reversed": feed.crossed_states(lambda row, batch: batch - 1 - row),
    "state.crossed=next:once": feed.crossed_states(lambda row, batch: (row + 1) % batch, once=True),
    "precision.draft-weights=fp8": head.quantised(head.fp8),
    "precision.draft-weights=int8": head.quantised(head.int8),
    "precision.draft-weights=int4:g64": head.quantised(head.int4),
    "precision.draft-kv=fp8_e4m3": kv.stored_as(kv.as_fp8),
    "precision.draft-kv=int4": kv.stored_as(kv.as_int4),
    "precision.dtype-cast=fp16": head.in_fp16,
}

OUTSIDE: Mapping[str, Callable[[Live], None]] = {
    "x.features-noise-small": feed.noise(0.05),
    "x.features-noise-large": feed.noise(0.4),
    "x.recycled-noise": feed.noise(0.3, recycled=True),
    "x.mlp-lost": head.no_mlp,
    "x.attention-lost": head.no_attention,
    "x.second-best-first": logits.second_best,
    "x.norm-epsilon": head.epsilon(0.1),
    "x.embedding-shifted": feed.next_embedding,
    "x.features-scaled": feed.scaled_features(1.5),
    "x.attention-scaled": kv.scaled_attention(2.0),
    "x.features-crossed": feed.crossed_features,
    "x.channels-dead": feed.dead_channels(10),
    "x.repetition-penalty": logits.repetition_penalty(1.5),
    "x.fuse-negated": head.negated_fuse(10),
    "x.features-stale": feed.stale_rows(4),
    "x.features-coarse": feed.coarse_features(2),
    "x.positions-doubled": feed.doubled_positions,
    "x.rope-off": head.no_rope,
    "x.mlp-gelu": head.gelu,
    "x.query-heads-rolled": head.rolled_heads,
    "x.weights-pruned": head.pruned_weights(0.5),
    "x.vocabulary-lost": logits.lost_vocabulary(20),
    "x.drafted-token-stuck": feed.same_drafted_token,
    "x.every-other-row": kv.every_other_row,
    "x.values-displaced": kv.neighbours_values,
    "x.prefix-foreign": kv.foreign_prefix(16),
}


def install(live: Live, name: str) -> None:
    """Put an injection into a server. Raises KeyError for a name that is none; names joined by ``+`` go together."""
    for one in name.split("+"):
        {**HARMLESS, **OF_THE_TABLE, **OUTSIDE}[one](live)
