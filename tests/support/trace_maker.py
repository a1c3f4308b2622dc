"""Small traces that are right by construction: an invented target of 64 tokens, 16 wide, its lm_head applied openly."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from replay.traces.header import CaptureSettings, EngineInfo, TapInfo, TargetInfo, TraceHeader
from replay.traces.writer import CapturedRequest, TraceWriter

V, H, K, LAYERS = 64, 16, 4, 4


def make_header(dtype: str = "bfloat16", *, tied: bool = True, target_path: str = "/nowhere/target") -> TraceHeader:
    target = TargetInfo(
        name="invented",
        path=target_path,
        architecture="LlamaForCausalLM",
        model_type="llama",
        layers=LAYERS,
        hidden_size=H,
        vocab_size=V,
        dtype=dtype,
        tie_word_embeddings=tied,
        max_position_embeddings=None,
        fingerprint="f" * 64,
    )
    return TraceHeader(
        created="2026-01-02T03:04:05+00:00",
        replay_version="0.1.0",
        target=target,
        engine=EngineInfo("transformers", "5.0.0", {"device": "cpu"}),
        taps={"2": TapInfo(dtype, H), "final": TapInfo(dtype, H)},
        topk=K,
        capture=CaptureSettings(8, 0.0, 1.0, -1, 0, False, "0" * 64),
        missing=("prefill logits",),
    )


def make_weights(dtype: str = "bfloat16", seed: int = 0) -> torch.Tensor:
    """[V, H]"""
    return torch.randn(V, H, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def make_request(
    name: str,
    seed: int,
    *,
    prompt: int = 3,
    output: int = 4,
    dtype: str = "bfloat16",
    lm_head: torch.Tensor | None = None,
) -> CapturedRequest:
    """A greedy request whose tokens, logits summary and final rows agree as a target in ``dtype`` makes them."""
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    lm_head = make_weights(dtype) if lm_head is None else lm_head
    rows = prompt + output - 1
    taps = {tap: torch.randn(rows, H, generator=generator).to(kind) for tap in ("2", "final")}
    logits = (taps["final"][prompt - 1 :] @ lm_head.T).float()
    logsumexp = logits.logsumexp(1)
    top = logits.topk(K, dim=1)
    return CapturedRequest(
        request_id=name,
        category="invented",
        prompt_ids=torch.randint(0, V, (prompt,), generator=generator).tolist(),
        output_ids=top.indices[:, 0].tolist(),
        finish_reason="length",
        source="generated",
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        taps=taps,
        topk_ids=top.indices.to(torch.int32),
        topk_logprobs=top.values - logsumexp[:, None],
        logsumexp=logsumexp,
    )


def make_requests(count: int, dtype: str = "bfloat16") -> list[CapturedRequest]:
    return [
        make_request(f"r{seed}", seed, prompt=2 + seed % 3, output=1 + seed % 4, dtype=dtype) for seed in range(count)
    ]


def beginning(request: CapturedRequest, like: CapturedRequest, rows: int) -> CapturedRequest:
    """``request`` with the first ``rows`` tokens and rows of ``like``; both have longer prompts."""
    taps = {tap: torch.cat([like.taps[tap][:rows], own[rows:]]) for tap, own in request.taps.items()}
    return changed(request, prompt_ids=[*like.prompt_ids[:rows], *request.prompt_ids[rows:]], taps=taps)


def make_alike(count: int) -> list[CapturedRequest]:
    """Requests of which the third and all later ones begin with 70 rows of the first, so that these are stored once."""
    made = [make_request(f"r{seed}", seed, prompt=72 + seed % 3, output=1 + seed % 4) for seed in range(count)]
    return [*made[:2], *(beginning(one, made[0], 70) for one in made[2:])]


def make_four(dtype: str = "bfloat16") -> list[CapturedRequest]:
    """Requests of 2 to 5 prompt and 12 to 9 output tokens."""
    return [make_request(f"r{seed}", seed, prompt=2 + seed, output=12 - seed, dtype=dtype) for seed in range(4)]


def write_trace(
    folder: Path,
    batches: Sequence[Sequence[CapturedRequest]],
    *,
    header: TraceHeader | None = None,
    weights: bool = True,
    finish: bool = True,
) -> Path:
    header = make_header() if header is None else header
    with TraceWriter.create(folder, header) as writer:
        if weights:
            lm_head = make_weights(header.taps["final"].dtype)
            writer.write_target_weights(lm_head, None if header.target.tie_word_embeddings else lm_head)
        for batch in batches:
            writer.add(batch)
        if finish:
            writer.finish()
    return folder


def changed(request: CapturedRequest, **changes: object) -> CapturedRequest:
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]
