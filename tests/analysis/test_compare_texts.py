"""replay compare of two recordings: texts that part, the anchors before they do, and what is refused."""

import json
import random
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch
from click.testing import CliRunner
from support.heads import INVENTED, write_head
from support.rounds_maker import make_rounds, make_variant
from support.trace_maker import changed, make_four, make_header, make_request, write_trace

from replay.analysis.compare.compare import Comparison, compare_variants
from replay.analysis.compare.pairing import pair_rounds
from replay.analysis.compare.texts import Text
from replay.cli.app import cli
from replay.errors import ReplayError, TraceError, UsageError
from replay.traces.captured import CapturedRequest
from replay.traces.header import TraceHeader
from replay.traces.rounds import Rounds, table_schema

Walk = list[tuple[int, list[int], int]]  # anchor, drafted, accepted
PROMPT = (7, 8, 9)


def text_of(*output: int) -> Text:
    return Text((*PROMPT, *output), len(PROMPT))


def recorded(name: str, target: str, texts: dict[str, Text], walks: dict[str, Walk], steps: int = 2) -> Rounds:
    """Rounds of one variant on a trace of these texts."""
    made = make_rounds({make_variant(name, steps=steps): [[0]] * len(texts)}, trace={"path": name, "target": target})
    rows = [
        (name, request, place, anchor, drafted, accepted, False)
        for request, walk in walks.items()
        for place, (anchor, drafted, accepted) in enumerate(walk)
    ]
    requests = tuple(
        replace(made.requests[0], request_id=request, prompt_tokens=3, output_tokens=len(text.tokens) - 3)
        for request, text in texts.items()
    )
    return replace(made, table=pl.DataFrame(rows, schema=table_schema(), orient="row"), requests=requests)


# Both texts of r1 begin with 1 2 3, those of r2 are one text and its beginning.
TEXTS_A = {"r1": text_of(1, 2, 3, 4, 5), "r2": text_of(1, 2, 3)}
TEXTS_B = {"r1": text_of(1, 2, 3, 9, 9, 9), "r2": text_of(1, 2, 3, 4)}
WALKS_A: dict[str, Walk] = {"r1": [(3, [2, 8], 1), (5, [4, 5], 2)], "r2": [(3, [2, 3], 2)]}
WALKS_B: dict[str, Walk] = {"r1": [(3, [2, 3], 2), (6, [9, 0], 1)], "r2": [(3, [0, 0], 0), (4, [3, 4], 2)]}
A, B = recorded("a", "bf16", TEXTS_A, WALKS_A), recorded("b", "int4", TEXTS_B, WALKS_B)


def compared(a: Rounds = A, b: Rounds = B, texts_a: dict[str, Text] = TEXTS_A) -> Comparison:
    return compare_variants(pair_rounds(a, b, texts=(texts_a, TEXTS_B)), resamples=50)


def test_numbers_made_on_paper() -> None:
    found = compared()
    assert found.texts is not None
    assert (found.texts.requests, found.texts.equal, found.texts.common_tokens) == (2, 1, 6)
    assert (found.texts.output_tokens_a, found.texts.output_tokens_b) == (8, 10)
    each = [(one.request_id, one.common_tokens, one.accept_length_a, one.accept_length_b) for one in found.texts.each]
    assert each == [("r1", 3, 5 / 2, 5 / 2), ("r2", 3, 3.0, 2.0)]
    (pair,) = found.pairs
    assert (pair.a.accept_length, pair.b.accept_length) == (8 / 3, 9 / 4)
    assert (pair.anchors.rounds, pair.anchors.accepted_a, pair.anchors.accepted_b) == (2, 3, 2)  # both from 3


@pytest.mark.parametrize("seed", range(5))
def test_only_anchors_after_the_same_tokens_are_common(seed: int) -> None:
    """Counted again by holding the texts themselves against each other."""
    rng = random.Random(seed)
    texts: list[dict[str, Text]] = [{}, {}]
    walks: list[dict[str, Walk]] = [{}, {}]
    for name in ("r1", "r2", "r3", "r4"):
        first = [rng.randrange(3) for _ in range(20)]
        place = rng.randrange(1, 20)
        second = [*first[:place], *(rng.randrange(3) for _ in range(20 - place))]
        for side, output in enumerate((first, second)):
            texts[side][name], walks[side][name] = text_of(*output), walk_over(rng, (*PROMPT, *output))
    a, b = (recorded(name, name, *given) for name, given in zip("ab", zip(texts, walks, strict=True), strict=True))
    (pair,) = compare_variants(pair_rounds(a, b, texts=(texts[0], texts[1])), resamples=20).pairs
    met = [
        (x, y)
        for name in texts[0]
        for x in walks[0][name]
        for y in walks[1][name]
        if x[0] == y[0] and texts[0][name].tokens[: x[0] + 1] == texts[1][name].tokens[: x[0] + 1]
    ]
    same_place = [(x, y) for name in texts[0] for x in walks[0][name] for y in walks[1][name] if x[0] == y[0]]
    assert 0 < pair.anchors.rounds == len(met) < len(same_place)
    assert pair.anchors.accepted_a == sum(x[2] for x, _ in met)
    assert pair.anchors.accepted_b == sum(y[2] for _, y in met)


def walk_over(rng: random.Random, tokens: tuple[int, ...]) -> Walk:
    """Drafts of two tokens that are right now and then."""
    walk, anchor = [], len(PROMPT)
    while anchor < len(tokens) - 1:
        rest = tokens[anchor + 1 : anchor + 3]
        drafted = [token if rng.random() < 0.6 else 5 for token in (*rest, 5)[:2]]
        accepted = next((place for place in range(2) if place >= len(rest) or drafted[place] != rest[place]), 2)
        walk.append((anchor, drafted, accepted))
        anchor += accepted + 1
    return walk


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"texts_a": TEXTS_A | {"r1": Text((7, 8, 1, 1, 2, 3, 4, 5), 3)}}, UsageError, "one prompt in the first trace"),
        ({"texts_a": TEXTS_A | {"r1": text_of(1, 2, 3, 4)}}, TraceError, "another text of request 'r1'"),
        ({"texts_a": TEXTS_A | {"r1": text_of(1, 3, 3, 4, 5)}}, TraceError, "another text of request 'r1'"),
        ({"texts_a": {"r2": TEXTS_A["r2"]}}, TraceError, "another text of request 'r1'"),
        ({"b": replace(B, requests=tuple(replace(one, temperature=1.0) for one in B.requests))}, TraceError,
         "temperature of request 'r1'"),
    ],
)  # fmt: skip
def test_what_is_no_recording_of_the_same_prompts_is_refused(
    changes: dict[str, object], error: type[ReplayError], message: str
) -> None:
    with pytest.raises(error, match=message):
        compared(**changes)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="name the two by --trace-a and --trace-b"):
        pair_rounds(A, B)


def parting(request: CapturedRequest) -> CapturedRequest:
    """One of the same prompt and first output token, then another text."""
    prompt = len(request.prompt_ids)
    other = make_request(request.request_id, 50, prompt=prompt, output=len(request.output_ids))
    final = torch.cat([request.taps["final"][:prompt], other.taps["final"][prompt:]])
    parts = {
        name: torch.cat([getattr(request, name)[:1], getattr(other, name)[1:]])
        for name in ("topk_ids", "topk_logprobs", "logsumexp")
    }
    outputs = [*request.output_ids[:1], *other.output_ids[1:]]
    return changed(request, output_ids=outputs, taps=dict(request.taps) | {"final": final}, **parts)


def of_target(name: str) -> TraceHeader:
    header = make_header()
    return replace(header, target=replace(header.target, name=name))


def test_the_command_reads_the_texts_of_both_traces(tmp_path: Path) -> None:
    """Of two traces whose first text parts at its second output token."""
    four = make_four()
    other = [parting(four[0]), *four[1:]]
    draft, played = write_head(tmp_path / "draft", INVENTED), []
    for name, requests in (("one", four), ("two", other)):
        trace, rounds = write_trace(tmp_path / name, [requests], header=of_target(name)), tmp_path / f"{name}.parquet"
        done = CliRunner().invoke(cli, ["simulate", str(trace), "--draft", str(draft), "-o", str(rounds)])
        assert done.exit_code == 0
        played.append((str(rounds), str(trace)))
    (one, trace_one), (two, trace_two) = played
    told = CliRunner().invoke(cli, ["compare", one, two, "--trace-a", trace_one, "--trace-b", trace_two, "--json"])
    texts = json.loads(told.stdout)["texts"]
    assert texts["each"][0]["common_tokens"] == 1 and texts["equal"] == 3
    shown = CliRunner().invoke(cli, ["compare", one, two, "--trace-a", trace_one, "--trace-b", trace_two])
    assert "Text by text" in shown.stdout and "trace of B" in shown.stdout and shown.exit_code == 0
    for arguments in ([one, two, "--trace-a", trace_one], [one, "--trace-a", trace_one, "--trace-b", trace_two]):
        refused = CliRunner().invoke(cli, ["compare", *arguments])
        assert refused.exit_code == 1 and "type both" in refused.stderr
    swapped = CliRunner().invoke(cli, ["compare", one, two, "--trace-a", trace_two, "--trace-b", trace_one])
    assert swapped.exit_code == 1 and "is a trace of target 'two'" in swapped.stderr
