"""The promise in fp32: the rounds that replay predicts are those that an independent speculative decoder runs."""

from pathlib import Path

import pytest
import torch
from support import decoder
from transformers import AutoTokenizer

import replay
from replay.capture.local.record import capture_local
from replay.capture.options import CaptureOptions
from replay.traces.sample_files import sample_head, sample_prompts

PROMPTS = 24
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def trace(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> replay.Trace:
    """Short prompts of the demo, of many kinds, captured in fp32: the decoder takes each token by itself."""
    folder = tmp_path_factory.mktemp("decoder")
    rows = [row for row in sample_prompts().read_text().splitlines() if len(row) < 230][::2][:PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    options = CaptureOptions(
        str(target_dir), folder / "prompts.jsonl", folder / "trace", taps="embed,3,16", dtype="float32",
        max_new_tokens=NEW_TOKENS,
    )  # fmt: skip
    capture_local(options, lambda _: None)
    return replay.Trace.open(folder / "trace")


def test_every_round_is_that_of_an_independent_decoder(trace: replay.Trace, target_dir: Path) -> None:
    head = replay.load_head(sample_head())
    steps = (1, 3, 5)
    rounds = replay.simulate(trace, {"demo": head}, replay.sweep(draft=["demo"], steps=list(steps))).table
    target = decoder.load_target(target_dir)
    plain_head = decoder.PlainHead(sample_head(), target.get_input_embeddings().weight)
    eos = AutoTokenizer.from_pretrained(target_dir).eos_token_id
    assert len(trace.requests) == PROMPTS
    total = 0
    for index, request in enumerate(trace.requests.iter_rows(named=True)):
        recorded = trace.read(index, ["embed"])
        prompt = recorded.tokens[: recorded.prompt_tokens].tolist()
        for count in steps:
            text, expected = decoder.decode(
                target, plain_head, prompt, taps=(0, 3, 16), steps=count, new_tokens=NEW_TOKENS, eos=eos
            )
            assert text == recorded.tokens[recorded.prompt_tokens :].tolist()
            mine = rounds.filter(variant=f"steps={count}", request_id=request["request_id"])
            assert mine["anchor"].to_list() == [played.anchor for played in expected]
            assert mine["drafted"].to_list() == [played.drafted for played in expected]
            assert mine["accepted"].to_list() == [played.accepted for played in expected]
            total += sum(played.accepted for played in expected)
    assert total > PROMPTS * NEW_TOKENS / 2  # the head is one whose drafts are taken, so that agreement means something


def test_wrong_wiring_is_told_apart(trace: replay.Trace) -> None:
    """Taps in another order: the same trace, a head that no longer understands them."""
    head = replay.load_head(sample_head())
    wirings = [replay.parse_wiring(text) for text in ("embed,3,16", "16,embed,3")]
    summaries = replay.summarise(
        replay.simulate(trace, {"demo": head}, replay.sweep(draft=["demo"], wiring=list(wirings), steps=[5]))
    )
    right, wrong = (summary.accept_length for summary in summaries)
    assert right > 1.5 * wrong
    assert torch.is_inference_mode_enabled() is False
