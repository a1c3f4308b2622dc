"""Capture in process against a plain formulation: one request, no padding, Transformers' generate and hidden states."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_target import tiny
from torch import Tensor

from replay.capture.encode import EncodedRequest
from replay.capture.events import CaptureProgress, Event, Finished, Planned
from replay.capture.local import record
from replay.capture.local.record import capture_local, plan_batches
from replay.capture.local.sampling import Sampling, choose
from replay.capture.local.target import use_fast_products
from replay.capture.logits import summarise_logits
from replay.capture.options import CaptureOptions
from replay.errors import CaptureError, OutputError, PromptError, TraceError, UsageError
from replay.traces.reader import Trace
from replay.traces.taps import FINAL

TAPS = "embed,3,out:14,30"
NAMES = ("3", "15", "30", "final")
ROWS: list[dict[str, Any]] = [
    {"id": "capital", "prompt": "What is the capital of France?", "category": "fact"},
    {"id": "raw ids", "input_ids": [504, 2365, 281, 260]},
    {"id": "chat", "messages": [{"role": "user", "content": "Say only the word yes, and nothing else, please."}]},
    {"id": "forced", "prompt": "Count.", "response": "One, two, three."},
    {"id": "one token", "input_ids": [28, 1690], "output_ids": [253]},
]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def capture(options: CaptureOptions) -> tuple[Trace, list[Event]]:
    events: list[Event] = []
    capture_local(options, events.append)
    return Trace.open(options.out), events


def load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> tuple[CaptureOptions, Trace, list[Event]]:
    """One fp32 capture of ROWS, all generated ones in one padded batch."""
    folder = tmp_path_factory.mktemp("capture")
    options = CaptureOptions(
        model=str(target_dir),
        prompts=write(folder / "prompts.jsonl", ROWS),
        out=folder / "trace",
        taps=TAPS,
        max_new_tokens=10,
        dtype="float32",
        topk=4,
    )
    return options, *capture(options)


@pytest.fixture(scope="module")
def plain(target_dir: Path) -> Any:
    return load(target_dir, torch.float32)


def index_of(trace: Trace, request_id: str) -> int:
    return trace.requests["request_id"].to_list().index(request_id)


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference in any row, against that row's largest value."""
    return float(((a.float() - b.float()).abs().amax(-1) / b.float().abs().amax(-1)).max())


def test_tokens_are_those_of_generate(recorded: tuple[CaptureOptions, Trace, list[Event]], plain: Any) -> None:
    _, trace, _ = recorded
    for name in ("capital", "raw ids", "chat"):
        rows = trace.read(index_of(trace, name), ["final"])
        prompt, output = rows.tokens[: rows.prompt_tokens], rows.tokens[rows.prompt_tokens :]
        told = plain.generate(prompt[None], do_sample=False, max_new_tokens=10, pad_token_id=2)[0, len(prompt) :]
        assert output.tolist() == told.tolist()
        reason = trace.requests["finish_reason"][index_of(trace, name)]
        assert reason == ("stop" if output[-1] == 2 else "length")
        assert trace.requests["source"][index_of(trace, name)] == "generated"
    # The batch lost a row on the way, and the others went on rightly.
    assert set(trace.requests["finish_reason"].to_list()) == {"stop", "length", "forced"}


def test_rows_are_those_of_one_unpadded_pass(recorded: tuple[CaptureOptions, Trace, list[Event]], plain: Any) -> None:
    _, trace, _ = recorded
    for index, name in enumerate(trace.requests["request_id"]):
        rows = trace.read(index, NAMES)
        with torch.inference_mode():
            out = plain(input_ids=rows.tokens[None, :-1], output_hidden_states=True)
            stream = plain.model.layers[29](
                out.hidden_states[29], position_embeddings=rotary(plain, out), attention_mask=None
            )
        states = {"3": out.hidden_states[3], "15": out.hidden_states[15], "30": stream, "final": out.hidden_states[30]}
        assert rows.taps["final"].shape == (len(rows.tokens) - 1, 576)
        for tap, state in states.items():
            assert relative(rows.taps[tap], state[0]) < 1e-4, (name, tap)
        logprobs = out.logits[0, rows.prompt_tokens - 1 :].log_softmax(-1)
        ids, kept, logsumexp = trace.logits(index)
        assert ids.shape == kept.shape == (rows.output_tokens, 4)
        assert torch.allclose(kept, logprobs.gather(-1, ids.long()), atol=1e-3)
        assert torch.allclose(kept, logprobs.topk(4).values, atol=1e-3)
        assert torch.allclose(logsumexp, out.logits[0, rows.prompt_tokens - 1 :].logsumexp(-1), atol=1e-3)
        if rows.source == "generated":
            assert ids[:, 0].tolist() == rows.tokens[rows.prompt_tokens :].tolist()


def rotary(model: Any, out: Any) -> Any:
    state = out.hidden_states[0]
    return model.model.rotary_emb(state, position_ids=torch.arange(state.shape[1])[None])


def test_forced_rows_follow_what_is_written(
    recorded: tuple[CaptureOptions, Trace, list[Event]], target_dir: Path
) -> None:
    from transformers import AutoTokenizer

    _, trace, _ = recorded
    index = index_of(trace, "forced")
    rows = trace.read(index, [FINAL])
    assert AutoTokenizer.from_pretrained(target_dir).decode(rows.tokens[rows.prompt_tokens :]) == "One, two, three."
    assert rows.source == "forced"
    short = trace.read(index_of(trace, "one token"), [FINAL])
    assert short.tokens.tolist() == [28, 1690, 253]
    assert len(short.taps[FINAL]) == 2


def test_header_and_events_tell_what_was_done(
    recorded: tuple[CaptureOptions, Trace, list[Event]], target_dir: Path
) -> None:
    options, trace, events = recorded
    header = trace.header
    assert list(header.taps) == list(NAMES)  # embed is a lookup here, so it is not stored
    assert (header.embed, header.topk, header.engine.name) == ("lookup", 4, "transformers")
    target = header.target
    assert (target.layers, target.hidden_size, target.vocab_size, target.dtype) == (30, 576, 49152, "float32")
    assert (target.architecture, target.tie_word_embeddings) == ("LlamaForCausalLM", True)
    assert target.max_position_embeddings == 8192
    assert target.path == str(target_dir.resolve())
    assert torch.equal(trace.embed_weight(), load(target_dir, torch.float32).model.embed_tokens.weight)
    planned = next(event for event in events if isinstance(event, Planned))
    steps = [event for event in events if isinstance(event, CaptureProgress)]
    assert (planned.requests, planned.done) == (5, 0)
    assert [event.output_tokens for event in steps] == sorted(event.output_tokens for event in steps)
    assert steps[-1].requests_done == 5
    assert steps[-1].output_tokens_left == 0
    assert isinstance(events[-1], Finished)
    assert events[-1].result.output_tokens == steps[-1].output_tokens == trace.requests["output_tokens"].sum()
    assert events[-1].result.prompt_tokens == planned.prompt_tokens == trace.requests["prompt_tokens"].sum()
    assert trace.requests.filter(request_id="capital")["category"].item() == "fact"
    assert options.max_new_tokens == header.capture.max_new_tokens


def test_bfloat16_rows_are_the_targets_bits(tmp_path: Path, target_dir: Path) -> None:
    """The prompt's rows of a lone request are computed in one pass, as the plain pass computes them: bit for bit.

    Both take the same products on a CPU that has no kernels for bf16 (narrow_products.py).
    """
    options = CaptureOptions(
        model=str(target_dir),
        prompts=write(tmp_path / "prompts.jsonl", ROWS[:1]),
        out=tmp_path / "trace",
        taps="1,15",
        max_new_tokens=3,
    )
    trace, _ = capture(options)
    rows = trace.read(0, ["1", "15", "final"])
    model = load(target_dir, torch.bfloat16)
    use_fast_products(model)
    with torch.inference_mode():
        states = model(input_ids=rows.tokens[None, : rows.prompt_tokens], output_hidden_states=True).hidden_states
    for tap, state in (("1", states[1]), ("15", states[15]), ("final", states[30])):
        assert rows.taps[tap].dtype == torch.bfloat16
        assert torch.equal(rows.taps[tap][: rows.prompt_tokens], state[0])
    ids, logprobs, logsumexp = trace.logits(0)
    assert ids[:, 0].tolist() == rows.tokens[rows.prompt_tokens :].tolist()
    logits = model.lm_head(rows.taps["final"][rows.prompt_tokens - 1 :]).float()
    top = logits.gather(-1, ids[:, :1].long()) - logsumexp[:, None]
    assert torch.allclose(top, logprobs[:, :1], atol=0.2)  # one bf16 step of a logit near 20 is 0.125


# ------------------------------------------------------------------ small random targets: forms, faults, resuming


def tiny_options(folder: Path, rows: Sequence[dict[str, Any]] | None = None, **changes: Any) -> CaptureOptions:
    model = folder / "target"
    if not model.exists():
        tiny(model)
    if rows is None:
        rows = [{"id": f"r{i}", "input_ids": [(7 * i + j) % 50 for j in range(1 + 3 * i)]} for i in range(6)]
    prompts = write(folder / "prompts.jsonl", rows)
    options = CaptureOptions(model=str(model), prompts=prompts, out=folder / "trace", max_new_tokens=6, topk=4)
    return replace(options, **changes)


def outputs(trace: Trace) -> dict[str, list[int]]:
    result = {}
    for index, name in enumerate(trace.requests["request_id"]):
        rows = trace.read(index, [FINAL])
        result[name] = rows.tokens[rows.prompt_tokens :].tolist()
    return result


@pytest.mark.parametrize(("kind", "temperature"), [("llama", 0.0), ("llama", 1.0), ("gpt2", 0.0)])
def test_a_request_does_not_depend_on_its_batch(tmp_path: Path, kind: str, temperature: float) -> None:
    """GPT-2 adds learned positions, so a position shifted by the padding shows, which rotary attention would hide."""
    tiny(tmp_path / "target", kind)
    together, _ = capture(tiny_options(tmp_path, temperature=temperature))
    alone, _ = capture(tiny_options(tmp_path, temperature=temperature, concurrency=1, out=tmp_path / "alone"))
    assert len(outputs(together)) == 6
    assert outputs(together) == outputs(alone)
    for index, name in enumerate(together.requests["request_id"]):
        one = together.read(index, ["1", "2", "final"])
        other = alone.read(index_of(alone, name), ["1", "2", "final"])
        assert all(relative(one.taps[tap], other.taps[tap]) < 1e-5 for tap in one.taps)
    if temperature:
        again, _ = capture(tiny_options(tmp_path, temperature=temperature, out=tmp_path / "again"))
        other_seed, _ = capture(tiny_options(tmp_path, temperature=temperature, seed=1, out=tmp_path / "seed"))
        greedy, _ = capture(tiny_options(tmp_path, out=tmp_path / "greedy"))
        assert outputs(again) == outputs(together)
        assert outputs(other_seed) != outputs(together)
        assert outputs(greedy) != outputs(together)


def test_every_end_of_sequence_id_ends_a_request(tmp_path: Path) -> None:
    free = outputs(capture(tiny_options(tmp_path))[0])
    ends = {free["r0"][2], free["r3"][0]}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}))
    trace, _ = capture(tiny_options(tmp_path, out=tmp_path / "ended"))
    for name, tokens in outputs(trace).items():
        place = next((i for i, token in enumerate(free[name]) if token in ends), None)
        assert tokens == (free[name] if place is None else free[name][: place + 1])
        reason = trace.requests["finish_reason"][index_of(trace, name)]
        assert reason == ("length" if place is None else "stop")


def test_generation_ends_with_the_context(tmp_path: Path) -> None:
    rows = [{"input_ids": [3] * 38}, {"input_ids": [3] * 2}]
    events: list[Event] = []
    capture_local(tiny_options(tmp_path, rows), events.append)
    trace = Trace.open(tmp_path / "trace")
    assert {len(tokens) for tokens in outputs(trace).values()} == {2, 6}
    assert any("1 of 2 requests reach the end of the target's context" in str(event) for event in events)


def test_scaled_embeddings_are_stored(tmp_path: Path) -> None:
    """Gemma multiplies its embeddings by the root of the hidden size, so R[0] is no lookup."""
    tiny(tmp_path / "target", "gemma")
    trace, _ = capture(tiny_options(tmp_path, taps="2"))
    assert trace.header.embed == "stored"
    rows = trace.read(0, ["embed"])
    expected = trace.embed_weight()[rows.tokens[:-1]] * 4.0
    assert torch.allclose(rows.taps["embed"], expected, rtol=1e-5)


def test_an_untied_lm_head_goes_into_the_sidecar(tmp_path: Path) -> None:
    tiny(tmp_path / "target", tie_word_embeddings=False)
    trace, _ = capture(tiny_options(tmp_path))
    model = load(tmp_path / "target", torch.float32)
    assert not trace.header.target.tie_word_embeddings
    assert torch.equal(trace.lm_head_weight(), model.lm_head.weight)
    assert torch.equal(trace.embed_weight(), model.model.embed_tokens.weight)


def test_sliding_windows_and_other_norm_places_are_recorded_rightly(tmp_path: Path) -> None:
    """Gemma 2 without its soft cap: local layers with a window shorter than the prompts, four norms a layer."""
    tiny(tmp_path / "target", "gemma2", final_logit_softcapping=None, sliding_window=5)
    trace, _ = capture(tiny_options(tmp_path, taps="1,2"))
    model = load(tmp_path / "target", torch.float32)
    for index in range(len(trace.requests)):
        rows = trace.read(index, ["embed", "1", "final"])
        with torch.inference_mode():
            states = model(input_ids=rows.tokens[None, :-1], output_hidden_states=True).hidden_states
        for tap, state in (("embed", states[0]), ("1", states[1]), ("final", states[2])):
            assert relative(rows.taps[tap], state[0]) < 1e-4


@pytest.mark.parametrize(
    ("kind", "changes"), [("gemma2", {"final_logit_softcapping": 0.5}), ("granite", {"logits_scaling": 8.0})]
)
def test_scaled_or_capped_logits_are_refused(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    tiny(tmp_path / "target", kind, **changes)
    with pytest.raises(CaptureError, match="scales or caps its logits"):
        capture(tiny_options(tmp_path))
    assert not (tmp_path / "trace").exists()


def interrupt_after(batches: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    from replay.capture.local import generate

    real, calls = generate.run_batch, []

    def run_batch(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > batches:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(generate, "run_batch", run_batch)


def test_an_interrupted_capture_keeps_what_is_finished_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = capture(tiny_options(tmp_path, concurrency=2, temperature=0.8, out=tmp_path / "whole"))
    options = tiny_options(tmp_path, concurrency=2, temperature=0.8)
    with monkeypatch.context() as patch:
        interrupt_after(2, KeyboardInterrupt(), patch)
        with pytest.raises(CaptureError, match=r"4 of 6 requests are safe .* with --resume"):
            capture(options)
    with pytest.raises(OutputError, match="--resume"):
        capture(options)
    trace, events = capture(replace(options, resume=True))
    planned = next(event for event in events if isinstance(event, Planned))
    assert (planned.requests, planned.done) == (6, 4)
    assert outputs(trace) == outputs(whole)
    for index in range(6):
        one, other = trace.read(index, ["1", "final"]), whole.read(index, ["1", "final"])
        assert all(torch.equal(one.taps[tap], other.taps[tap]) for tap in one.taps)
    again, events = capture(replace(options, resume=True))
    assert next(event for event in events if isinstance(event, Planned)).done == 6
    assert outputs(again) == outputs(whole)


def test_resume_begins_where_nothing_was_begun(tmp_path: Path) -> None:
    trace, _ = capture(tiny_options(tmp_path, resume=True))
    assert len(trace.requests) == 6


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"max_new_tokens": 5}, "max_new_tokens"), ({"seed": 3}, "seed"), ({"taps": "1"}, "taps"), ({"topk": 3}, "topk")],
)
def test_resume_refuses_other_settings(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    capture(tiny_options(tmp_path))
    with pytest.raises(TraceError, match=says):
        capture(tiny_options(tmp_path, resume=True, **changes))


def test_a_full_disk_is_told_and_finished_requests_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from replay.traces import files

    real: Callable[..., None] = files.write_whole

    def write_whole(path: Path, blocks: Any) -> None:
        if path.name == "shard-00001.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, blocks)

    options = tiny_options(tmp_path, concurrency=2)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_whole", write_whole)
        with pytest.raises(OutputError, match="--resume"):
            capture(options)
    trace, events = capture(replace(options, resume=True))
    assert next(event for event in events if isinstance(event, Planned)).done == 2
    assert len(trace.requests) == 6


def test_force_replaces_a_trace(tmp_path: Path) -> None:
    capture(tiny_options(tmp_path))
    trace, _ = capture(tiny_options(tmp_path, [{"input_ids": [1]}], force=True))
    assert trace.requests["request_id"].to_list() == ["0"]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"max_new_tokens": 0}, UsageError, "--max-new-tokens 0"),
        ({"temperature": -1.0}, UsageError, "--temperature"),
        ({"temperature": float("nan")}, UsageError, "--temperature"),
        ({"top_p": 0.0}, UsageError, "--top-p"),
        ({"concurrency": 0}, UsageError, "--concurrency"),
        ({"topk": 0}, UsageError, "--topk"),
        ({"resume": True, "force": True}, UsageError, "--resume goes on"),
        ({"taps": "3"}, UsageError, "the target has 2 layers"),
        ({"taps": "1,embed,out:0"}, UsageError, "names 1 twice: name each tap once"),
        ({"dtype": "int4"}, UsageError, "--dtype int4 is not one of auto"),
        ({"device": "tpu9"}, UsageError, "--device tpu9"),
        ({"model": "no/such-target"}, CaptureError, "neither a folder nor a hub id"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        capture(tiny_options(tmp_path, **changes))
    assert not (tmp_path / "trace").exists()


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    options = tiny_options(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CaptureError, match=r"holds no config\.json"):
        capture(replace(options, model=str(tmp_path / "empty")))
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "no such kind"}')
    with pytest.raises(CaptureError, match="Transformers cannot load the target"):
        capture(replace(options, model=str(tmp_path / "empty")))


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    options = tiny_options(tmp_path)
    model = load(tmp_path / "target", torch.float32)
    (tmp_path / "target" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "target" / "pytorch_model.bin")
    with pytest.raises(CaptureError, match="Transformers cannot load the target"):
        capture(options)


def test_a_bad_row_is_refused_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from replay.capture.local import target

    def load_target(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(target, "load_target", load_target)
    with pytest.raises(PromptError, match="line 2: prompt token id 50 is outside"):
        capture(tiny_options(tmp_path, [{"input_ids": [1]}, {"input_ids": [50]}]))


# ------------------------------------------------------------------ batches and sampling


def encoded(name: str, prompt: int, new: int, forced: bool = False) -> EncodedRequest:
    return EncodedRequest(name, None, (1,) * prompt, (2,) * new if forced else None, new)


def test_batches_hold_like_lengths_within_limits() -> None:
    requests = [encoded(f"g{i}", 1 + i * i, 5) for i in range(9)] + [encoded(f"f{i}", 4, 1 + i, True) for i in range(5)]
    batches = plan_batches(requests, most_requests=3, most_tokens=100)
    assert sorted(one.request_id for batch in batches for one in batch) == sorted(one.request_id for one in requests)
    for batch in batches:
        assert len({one.forced_ids is None for one in batch}) == 1
        width = max(len(one.prompt_ids) for one in batch) + max(one.max_new_tokens for one in batch)
        assert len(batch) <= 3
        assert len(batch) == 1 or len(batch) * width <= 100
    assert len(plan_batches([encoded("long", 500, 5)], most_requests=3, most_tokens=100)) == 1
    assert record.plan_batches is plan_batches


def test_summary_against_sorting_by_hand() -> None:
    """Equal logits stand by rising id; the twin sorts Python numbers and sums in float64."""
    import math

    torch.manual_seed(0)
    logits = torch.randint(-3, 4, (20, 12)).to(torch.bfloat16)
    logits[0] = 1.0  # all equal
    summary = summarise_logits(logits, 3)
    for row, ids, logprobs, total in zip(
        logits.tolist(), summary.topk_ids.tolist(), summary.topk_logprobs, summary.logsumexp, strict=True
    ):
        assert ids[0] == min(range(12), key=lambda i: (-row[i], i))
        assert [row[i] for i in ids] == sorted(row, reverse=True)[:3]
        assert len(set(ids)) == 3
        log_sum = math.log(math.fsum(math.exp(value) for value in row))
        assert float(total) == pytest.approx(log_sum, abs=1e-5)
        assert logprobs.tolist() == pytest.approx([row[i] - log_sum for i in ids], abs=1e-5)
    assert summarise_logits(logits, 99).topk_ids.shape == (20, 12)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.8), (1, 1.0)])
def test_draws_follow_the_distribution_that_transformers_keeps(top_k: int, top_p: float) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.tensor([0.3, 2.0, -1.0, 1.5, 1.0, 0.1])
    scores = TemperatureLogitsWarper(0.8)(None, logits[None])
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    expected = TopPLogitsWarper(top_p)(None, scores).softmax(-1)[0]
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=0.8, top_p=top_p, top_k=top_k)
    draws = torch.tensor([choose(logits, sampling, generator) for _ in range(4000)]).bincount(minlength=6) / 4000
    assert torch.equal(draws > 0, expected > 0)
    assert (draws - expected).abs().max() < 0.03  # four standard deviations of a share of 4000 draws
