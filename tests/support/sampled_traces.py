"""Texts that an independent sampler drew from the small real target, recorded as the traces they would have been."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from support import decoder, sampler
from transformers import AutoTokenizer, PreTrainedModel

import replay
from replay.capture.local.record import capture_local
from replay.capture.options import CaptureOptions
from replay.traces.sample_files import sample_head, sample_prompts
from replay.traces.taps import FINAL
from replay.traces.writer import CapturedRequest, TraceWriter


@dataclass
class Sampled:
    """A trace, and by request the sampler's own rounds, in the trace's order."""

    trace: replay.Trace
    rounds: dict[str, list[sampler.SampledRound]]


def sample_trace(
    target_dir: Path, folder: Path, *, rule: str, temperature: float, top_k: int = 0, top_p: float = 1.0, prompts: int,
    new_tokens: int, steps: int, seed: int = 0,
) -> Sampled:  # fmt: skip
    """Short prompts of the demo, sampled speculatively in fp32 under ``rule``, then recorded by following their text.

    Every text is ``new_tokens`` long, whatever ends sentences in it.
    """
    target = _target(target_dir)
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    head = decoder.PlainHead(sample_head(), target.get_input_embeddings().weight)
    warp = sampler.warper(temperature, top_k, top_p)
    texts = sorted((json.loads(row)["prompt"] for row in sample_prompts().read_text().splitlines()), key=len)[:prompts]
    rows, rounds = [], {}
    for number, text in enumerate(texts):
        prompt = tokenizer.encode(text)
        output, rounds[f"r{number}"] = sampler.sample(
            target, head, prompt, rule=rule, warp=warp, temperature=temperature, taps=(0, 3, 16), steps=steps,
            new_tokens=new_tokens, eos=-1, seed=seed + number,
        )  # fmt: skip
        rows.append({"id": f"r{number}", "input_ids": prompt, "output_ids": output})
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    followed = CaptureOptions(str(target_dir), folder / "texts.jsonl", folder / "followed", taps="embed,3,16,final",
                              dtype="float32")  # fmt: skip
    capture_local(followed, lambda _: None)
    followed_trace = replay.Trace.open(folder / "followed")
    trace = as_sampled(followed_trace, folder / "trace", temperature, top_k, top_p)
    return Sampled(trace, {record.request_id: rounds[record.request_id] for record in trace.records})


@cache
def _target(folder: Path) -> PreTrainedModel:
    return decoder.load_target(folder)


def as_sampled(trace: replay.Trace, path: Path, temperature: float, top_k: int, top_p: float) -> replay.Trace:
    """The same requests, said to be what they are: text that the target itself sampled."""
    capture = replace(trace.header.capture, temperature=temperature, top_p=top_p, top_k=top_k)
    with TraceWriter.create(path, replace(trace.header, capture=capture)) as writer:
        writer.write_target_weights(trace.embed_weight(), None)
        writer.add([_sampled(trace, i, temperature, top_k, top_p) for i in range(len(trace))])
        writer.finish()
    return replay.Trace.open(path)


def _sampled(trace: replay.Trace, index: int, temperature: float, top_k: int, top_p: float) -> CapturedRequest:
    rows = trace.read(index, ["3", "16", FINAL])
    ids, logprobs, logsumexp = trace.logits(index)
    tokens: Sequence[int] = rows.tokens.tolist()
    return CapturedRequest(
        rows.request_id, None, tokens[: rows.prompt_tokens], tokens[rows.prompt_tokens :], "length", "generated",
        temperature, top_p, top_k, rows.taps, ids.int(), logprobs, logsumexp,
    )  # fmt: skip
