"""Traces of an imagined server: a small random head drafts for an invented target, healthy or under a fault.

What is recorded of the target never depends on the fault; the served rounds are those that the head's twin plays, of
chains or of trees.
"""

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import polars as pl
import torch
from support.batches_maker import served_together
from support.heads import tiny_checkpoint, tiny_config
from support.trace_maker import make_header, make_request, make_weights
from twins.rounds import draft_one_round, replay_request
from twins.trees import accept_in_tree, draft_one_tree

from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.rows import DraftInput
from replay.engines.wiring import Wiring
from replay.faults.table import parse_faults
from replay.head.model import Head
from replay.simulator.binding import bind, build_head, resolve
from replay.simulator.inputs import draft_input, sampled_after_chunks
from replay.simulator.variant import Variant
from replay.traces.captured import CapturedRequest
from replay.traces.feed import Feed
from replay.traces.header import TapInfo, TraceHeader
from replay.traces.reader import Trace
from replay.traces.records import Piece
from replay.traces.server_rounds import served_schema
from replay.traces.taps import FINAL
from replay.traces.writer import TraceWriter

LAYERS, WIDTH = 8, 16
WIRING = Wiring(("2", "4", "5"))
TAPS = ("1", "2", "3", "4", "5", "6", "final")
STEPS = 3
_SIZES = {"hidden_size": WIDTH, "vocab_size": 64, "draft_vocab_size": 48, "intermediate_size": 24, "head_dim": 8}
HEAD = tiny_config(**_SIZES, eagle_config={})  # that of ``make_checkpoint``


def make_checkpoint(seed: int = 0, **changes: object) -> Checkpoint:
    """A head of the invented target, one layer, own lm_head."""
    return tiny_checkpoint(seed, **{**_SIZES, "eagle_config": {}, **changes})


def make_served(
    folder: Path,
    checkpoint: Checkpoint,
    fault: str = "none",
    *,
    requests: int = 6,
    output: int = 16,
    fed: Sequence[str] = (),
    fed_offset: int = 0,
    pieces: Sequence[Sequence[Piece] | None] = (),
    topk: int = 1,
    nodes: int = 8,
    together: int = 0,
    **engine: str,
) -> Trace:
    """A trace whose server drafted under ``fault``; outputs follow the healthy head's drafts half of the time.

    ``fed``: the taps that its draft was seen to be fed with the prompts, slot by slot, whatever the fault says;
    ``zeros`` for none. Their rows stood ``fed_offset`` positions further on. ``pieces`` in which the first prompts, of
    6 to 9 tokens, were prefilled. With a ``topk`` above 1 the server drafts trees of so many ``nodes``. It verifies so
    many requests ``together`` and says so; with 0 it does not say it.
    """
    header = make_header("float32")
    header = dataclasses.replace(
        header,
        target=dataclasses.replace(header.target, layers=LAYERS, hidden_size=WIDTH),
        engine=dataclasses.replace(
            header.engine,
            name="sglang",
            details={
                "wiring": str(WIRING),
                "speculative_num_steps": str(STEPS),
                "speculative_eagle_topk": str(topk),
                **engine,
            },
        ),
        taps={tap: TapInfo("float32", WIDTH) for tap in TAPS},
    )
    made = [_request(f"r{seed}", seed, 6 + seed % 4, output) for seed in range(requests)]
    made = [dataclasses.replace(one, pieces=told) for one, told in zip_longest(made, pieces)]
    bare = Trace.open(_write(folder / "bare", header, made))
    variant = resolve(Variant("h", WIRING, STEPS), checkpoint, bare)
    healthy = build_head(checkpoint, variant, bare)
    followed = []
    for index, request in enumerate(made):
        item = draft_input(bare.read(index, WIRING.taps), WIRING)
        tokens_T = item.tokens_T.clone()
        anchor, turn = item.prompt_tokens, index
        while anchor < len(tokens_T) - 1:
            wanted = (1, STEPS, 0, 2)[turn % 4]
            with torch.inference_mode():
                drafted = draft_one_round(healthy, tokens_T, item.features_RKD, anchor, STEPS)
            room = min(wanted, len(tokens_T) - 1 - anchor)
            tokens_T[anchor + 1 : anchor + 1 + room] = torch.tensor(drafted[:room], dtype=torch.long)
            anchor, turn = anchor + wanted + 1, turn + 1
        followed.append(dataclasses.replace(request, output_ids=tokens_T[item.prompt_tokens :].tolist()))
    plain = Trace.open(_write(folder / "plain", header, followed))
    changed = dataclasses.replace(variant, faults=parse_faults(fault))
    # What crosses between requests does so in the batches below, and no trace has them yet.
    crosses = fault.startswith("state.crossed")
    alone = dataclasses.replace(changed, faults=()) if crosses else changed
    subject = bind(alone, checkpoint, plain)
    head = build_head(checkpoint, alone, plain, subject=subject)
    items = [draft_input(plain.read(index, subject.wiring.taps), subject.wiring) for index in range(len(followed))]
    if together:
        names = [request.request_id for request in followed]
        crossed = fault.partition("=")[2] if crosses else ""
        table = served_together(names, head, items, crossed, together, steps=STEPS, topk=topk, nodes=nodes)
        return Trace.open(_write(folder / "served", header, followed, table))
    rows = []
    for index, request in enumerate(followed):
        read = plain.read(index, (*subject.wiring.taps, FINAL))
        item, chunk = draft_input(read, subject.wiring), subject.behaviour.chunk
        if topk > 1:
            rows += _tree_rounds(request.request_id, head, item, topk, nodes)
            continue
        with torch.inference_mode():
            rounds = replay_request(
                head, item.tokens_T, item.features_RKD, item.prompt_tokens, STEPS,
                sampled_T=None if chunk is None else sampled_after_chunks(read, plain, chunk),
                piece_rows=[rows for rows, _ in read.pieces],
            )  # fmt: skip
        rows += [
            (request.request_id, number, one.anchor, list(one.drafted), one.accepted, None, None, None, None)
            for number, one in enumerate(rounds)
        ]
    table = pl.DataFrame(rows, schema=served_schema(), orient="row")
    if fed:
        followed = [dataclasses.replace(request, feed=_feed(request, fed, fed_offset)) for request in followed]
    return Trace.open(_write(folder / "served", header, followed, table))


def _tree_rounds(name: str, head: Head, item: DraftInput, topk: int, nodes: int) -> list[tuple[object, ...]]:
    """Rows of the table of rounds: parents count from the known token (0), and -1 is one that was left out."""
    rows: list[tuple[object, ...]] = []
    anchor, tokens = item.prompt_tokens, item.tokens_T.tolist()
    while anchor < len(tokens) - 1:
        with torch.inference_mode():
            tree = draft_one_tree(
                head, item.tokens_T, item.features_RKD, anchor, topk=topk, steps=STEPS, num_draft_tokens=nodes + 1,
                kv="slot",
            )  # fmt: skip
        accepted = accept_in_tree(tree, tokens[anchor + 1 :])
        drafted, parents = [node.token for node in tree], [max(node.parent + 1, -1) for node in tree]
        rows.append((name, len(rows), anchor, drafted, accepted, parents, None, None, None))
        anchor += accepted + 1
    return rows


def _feed(request: CapturedRequest, fed: Sequence[str], offset: int) -> Feed:
    row_F = torch.tensor([1, 3, 5], dtype=torch.int32)
    token_F = torch.tensor([*request.prompt_ids, *request.output_ids], dtype=torch.int32)[row_F.long() + 1]
    slots = [request.taps[tap][row_F.long()] if tap != "zeros" else torch.zeros(3, WIDTH) for tap in fed]
    return Feed(row_F, token_F, row_F + offset, torch.cat(slots, dim=1))


def _request(name: str, seed: int, prompt: int, output: int) -> CapturedRequest:
    request = make_request(name, seed, prompt=prompt, output=output, dtype="float32")
    generator = torch.Generator().manual_seed(100 + seed)
    taps = {tap: torch.randn(prompt + output - 1, WIDTH, generator=generator) for tap in TAPS[:-1]}
    return dataclasses.replace(request, taps={**taps, "final": request.taps["final"]})


def _write(folder: Path, header: TraceHeader, made: list[CapturedRequest], rounds: pl.DataFrame | None = None) -> Path:
    with TraceWriter.create(folder, header) as writer:
        writer.write_target_weights(make_weights("float32"), None)
        if rounds is not None:
            writer.add_rounds(rounds)
        writer.add(made)
        writer.finish()
    return folder
