"""The CPU rig serves: a real SGLang server on the CPU, alone and drafting, held against Transformers.

Two engines in bf16 round differently, so their greedy texts part at near ties and stay apart. Compared is therefore
what each server chose at every position, given its own tokens before it, with what Transformers would choose there.
What rounding may do is measured: how far the lead of one likely token over another moves between Transformers in fp32
and in bf16. The server's choice may lie below the best of fp32 by twice the largest such change.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rig.server import Generated, ServerError, start_server
from support.this_cpu import prompts_for
from torch import Tensor

from replay.capture.client.rounds_timed import LEAST_ROUNDS
from replay.capture.client.timed_prompts import TimingOptions
from replay.capture.client.timing import time_server
from replay.traces.timings import Measured

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences how rain forms.",
    "Count from one to twenty.",
    "Write a Python function that reverses a string.",
    "Name three animals that live in Africa.",
)[: prompts_for(6, 3)]
NEW_TOKENS = 24
LIKELY = 4  # tokens of a position whose leads over each other are measured
# topk, steps, verified rows
DRAFTING = {"tree": (4, 3, 8)}  # chains: test_predict_server.py, test_sglang_plugin.py


TIMED = TimingOptions("", batches=(2,), contexts=(40,), tokens=40, repeats=1)


@dataclass(frozen=True, slots=True)
class Served:
    """Answers of one server to the prompts, the processes that it had, and how long its rounds took."""

    answers: list[Generated]
    processes: list[psutil.Process]
    timing: Measured


@pytest.fixture(scope="module")
def prompts(target_dir: Path) -> list[list[int]]:
    """Token ids of the questions in the target's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) for chat in chats]


@pytest.fixture(scope="module")
def draft_dir() -> Path:
    """The head that the project ships for the target."""
    return Path(__file__).parents[2] / "traces" / "samples" / "smollm2-eagle3"


@pytest.fixture(scope="module")
def served(
    target_dir: Path, draft_dir: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What a server answered: without a draft ("alone") or with one ("tree"); each runs once, by itself."""
    cache: dict[str, Served] = {}

    def of(kind: str) -> Served:
        if kind not in cache:
            topk, steps, rows = DRAFTING.get(kind, (1, 1, 2))
            log = tmp_path_factory.mktemp(kind) / "server.log"
            draft = draft_dir if kind in DRAFTING else None
            with start_server(target_dir, draft, log=log, steps=steps, topk=topk, num_draft_tokens=rows) as server:
                main = psutil.Process(server.process.pid)
                processes = [main, *main.children(recursive=True)]
                rids = [f"{kind}-{row}" for row in range(len(prompts))]
                answers = server.generate(prompts, rids=rids, max_new_tokens=NEW_TOKENS, concurrency=3)
                (timing,) = time_server(replace(TIMED, server=server.url))
            cache[kind] = Served(answers, processes, timing)
        return cache[kind]

    return of


@dataclass(frozen=True, slots=True)
class Leads:
    """By request, at each position of an output: how far below the best of fp32 each token lies [n, V], and the most
    that rounding explains."""

    below: list[Tensor]
    most: float


@pytest.fixture(scope="module")
def leads(served: Any, prompts: list[list[int]], target_dir: Path) -> Any:
    """Transformers' view of a server's answers, in fp32, with the largest change that bf16 makes."""
    from transformers import AutoModelForCausalLM

    models = [
        AutoModelForCausalLM.from_pretrained(target_dir, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    ]
    cache: dict[str, Leads] = {}

    def of(kind: str) -> Leads:
        if kind not in cache:
            below, changes = [], []
            for prompt, answer in zip(prompts, served(kind).answers, strict=True):
                ids = torch.tensor([prompt + answer.output_ids])
                with torch.inference_mode():
                    exact_NV, rounded_NV = (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in models)
                likely_NL = exact_NV.topk(LIKELY).indices
                lead_NL, rounded_NL = (
                    logits_NV.gather(1, likely_NL[:, :1]) - logits_NV.gather(1, likely_NL)
                    for logits_NV in (exact_NV, rounded_NV)
                )
                changes.append((lead_NL - rounded_NL).abs().max())
                below.append(exact_NV.amax(1, keepdim=True) - exact_NV)
            cache[kind] = Leads(below, 2 * float(max(changes)))
        return cache[kind]

    return of


@pytest.mark.parametrize("kind", ["alone", *DRAFTING])
def test_the_server_chooses_what_transformers_would(served: Any, leads: Any, kind: str, record_property: Any) -> None:
    """Every token is the best of fp32 or as near to it as rounding explains."""
    given = leads(kind)
    chosen = [
        below_NV.gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
        for below_NV, answer in zip(given.below, served(kind).answers, strict=True)
    ]
    below_N = torch.cat(chosen)
    best = int((below_N == 0).sum())
    said = f"target tokens ({kind}): {best} of {len(below_N)} are the best of fp32, the others lie up to "
    record_property("judged", said + f"{float(below_N.max()):.3f} below it (near up to {given.most:.3f})")
    assert len(below_N) > len(QUESTIONS) * NEW_TOKENS / 2
    assert below_N.max() <= given.most


@pytest.mark.parametrize("kind", list(DRAFTING))
def test_drafting_changes_no_answer_but_at_near_ties(served: Any, leads: Any, kind: str) -> None:
    given = leads("alone")
    for below_NV, alone, drafted in zip(given.below, served("alone").answers, served(kind).answers, strict=True):
        pairs = enumerate(zip(alone.output_ids, drafted.output_ids, strict=False))
        parted = next((position for position, (one, other) in pairs if one != other), None)
        if parted is None:
            assert alone.output_ids == drafted.output_ids
        else:
            assert below_NV[parted, drafted.output_ids[parted]] <= given.most, (alone.text, drafted.text)


@pytest.mark.parametrize("kind", ["alone", *DRAFTING])
def test_its_rounds_are_timed(served: Any, kind: str) -> None:
    """Those that share nothing with a prefill or an end; each brings a token at least."""
    timing, (topk, steps, rows) = served(kind).timing, DRAFTING.get(kind, (1, 0, 1))
    assert (timing.steps, timing.topk, timing.num_draft_tokens) == (steps, topk, rows)
    assert 2 * LEAST_ROUNDS <= timing.rounds < 2 * 40 and timing.round_ms[0] > 0
    assert (timing.batch, timing.context) == (2, 40) and timing.engine.startswith("sglang ")


@pytest.mark.parametrize("kind", list(DRAFTING))
def test_the_server_counts_its_rounds(served: Any, kind: str) -> None:
    _, steps, rows = DRAFTING[kind]
    total = 0
    for number, answer in enumerate(served(kind).answers):
        info = answer.meta_info
        rounds, histogram = info["spec_verify_ct"], info["spec_correct_drafts_histogram"]
        accepted = sum(drafts * times for drafts, times in enumerate(histogram))
        assert info["id"] == f"{kind}-{number}"
        assert sum(histogram) == rounds > 0
        assert len(histogram) <= steps + 1
        assert info["spec_num_correct_drafts"] == accepted
        assert info["spec_num_proposed_drafts"] == rounds * (rows - 1)
        assert info["spec_accept_length"] == pytest.approx(info["completion_tokens"] / rounds)
        # The first token comes from the prompt; the last round may reach beyond the end.
        assert info["completion_tokens"] == len(answer.output_ids)
        assert 1 + rounds + accepted - steps <= info["completion_tokens"] <= 1 + rounds + accepted
        total += accepted
    assert total > 0


def test_a_server_without_a_draft_counts_none(served: Any) -> None:
    assert not any(key.startswith("spec_") for answer in served("alone").answers for key in answer.meta_info)


def test_no_process_outlives_the_server(served: Any) -> None:
    processes = served("alone").processes
    assert len(processes) >= 3  # HTTP and tokenizer, scheduler, detokenizer
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_server_that_dies_says_why(target_dir: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"(?s)exit code 2.*unrecognized arguments: --no-such-option"),
        start_server(target_dir, log=tmp_path / "server.log", extra_args=["--no-such-option"]),
    ):
        raise AssertionError("the server started")


def test_a_server_that_is_late_is_given_up(target_dir: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"not ready after 0 s; .*server\.log ends:"),
        start_server(target_dir, log=tmp_path / "server.log", ready_timeout=0),
    ):
        raise AssertionError("the server was ready at once")
