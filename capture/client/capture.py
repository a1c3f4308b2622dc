"""``replay capture --server``: drive a recording server with a prompt file, and make a trace of what it recorded.

Each request gets an id of this client's own and a cache salt of its own, so that no cached prefix takes the place of
rows; with ``--server-cache shared`` all have one, and rows of a cached prefix are those of an earlier request
(cached_prefixes.py). Its answer comes over HTTP, its rows through the spool; both are joined, and finished requests
go into the trace. A server without the plugin gives answers only: see without_plugin.py.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import replay
from replay.capture.client.api import ServerApi, open_api
from replay.capture.client.facts import ServerFacts, ask_facts, check_same_server
from replay.capture.client.join import JoinedRequest
from replay.capture.client.requests import PROBE_TOKENS, ServerClient
from replay.capture.client.spool_reader import SpoolReader
from replay.capture.client.without_plugin import RESPONSES
from replay.capture.encode import Encoded, EncodedRequest, TargetLimits, encode_prompts
from replay.capture.events import CaptureResult, Event, Loading, Noted, Sized
from replay.capture.kept import Kept, kept_of
from replay.capture.options import (
    ServerOptions,
    check_options,
    check_output_folder,
    check_resumed,
    settings_of,
    then_taps_of,
    without_embed,
)
from replay.capture.prompts import PromptFile, read_prompts
from replay.capture.size import ITEM_BYTES, Room, RowSize, expect
from replay.capture.spool import RID_PREFIX, SPOOL
from replay.errors import OutputError, PromptError, TraceError, UsageError
from replay.traces.files import HEADER
from replay.traces.header import TapInfo, TraceHeader
from replay.traces.place import check_equal
from replay.traces.taps import EMBED, FINAL, parse_taps, sort_taps

if TYPE_CHECKING:
    import torch


def capture_server(
    options: ServerOptions, on_event: Callable[[Event], None], api: ServerApi | None = None
) -> CaptureResult:
    """Capture every row of a prompt file from a server. Finished requests are safe; ``resume`` does what is missing.

    ``api``: how it is asked, where that is not by HTTP (engine.py).
    Raises UsageError, PromptError, CaptureError, OutputError and TraceError; what can be refused is refused before the
    first prompt is sent.
    """
    check_options(
        options,
        ("--timeout", options.timeout, options.timeout > 0, "above 0"),
        ("--retries", options.retries, options.retries >= 0, "0 or more"),
    )
    prompts = read_prompts(options.prompts)
    check_output_folder(options, beside=(SPOOL,), resumable=(RESPONSES,))
    check_resumed(options, prompts, "sglang")
    if api is None:
        api = open_api(options.server, options.api_key, timeout=options.timeout, retries=options.retries)
    facts = ask_facts(api, options.recording)
    if not facts.recording and (options.out / HEADER).exists():
        raise OutputError(
            f"{options.out} holds a trace, and {api.url} does not record: start it by replay serve, or type another -o"
        )
    encoded = encode(prompts, facts, options)
    requests = encoded.requests
    on_event(Loading(facts.model_path, len(requests)))
    for note in (*prompts.notes, *encoded.notes()):
        on_event(Noted(note))
    if not facts.recording:
        from replay.capture.client.without_plugin import capture_answers

        result = capture_answers(options, api, facts, requests, on_event)
    else:
        result = _capture_recorded(options, prompts, api, facts, requests, on_event)
    return replace(result, left_out=encoded.left_out)


def encode(prompts: PromptFile, facts: ServerFacts, options: ServerOptions) -> Encoded:
    """Token ids of every row, by the server's tokenizer. Raises PromptError, CaptureError."""
    forced = next((row for row in prompts.rows if row.response is not None or row.output_ids is not None), None)
    if forced is not None:
        raise PromptError(
            f"{prompts.where(forced)} gives the output, and a server only generates: take it out, or capture it with "
            "--model"
        )
    tokenizer, vocab_size = None, facts.vocab_size
    if any(row.input_ids is None for row in prompts.rows):
        from replay.capture.target_files import open_target

        files = open_target(facts.tokenizer_path)
        tokenizer, vocab_size = files.tokenizer, vocab_size or files.limits.vocab_size
    limits = TargetLimits(vocab_size or (1 << 31) - 1, facts.context)
    return encode_prompts(prompts, tokenizer, limits, raw=options.raw, max_new_tokens=options.max_new_tokens)


def _capture_recorded(
    options: ServerOptions,
    prompts: PromptFile,
    api: ServerApi,
    facts: ServerFacts,
    requests: Sequence[EncodedRequest],
    on_event: Callable[[Event], None],
) -> CaptureResult:
    from replay.traces.header import read_header
    from replay.traces.writer import TraceWriter

    target = facts.target()
    taps, then = _wanted_taps(options, facts, target.layers), _then_taps(options, facts, target.layers)
    assert facts.spool is not None
    every = [*taps, *then]
    header = _header(options, prompts, facts, every, then)
    if options.resume and (options.out / HEADER).exists():
        begun = read_header(options.out)
        check_same_server(begun.engine, header.engine, options.out)
        check_equal("target.fingerprint", begun.target.fingerprint, target.fingerprint, options.out)
        check_equal("taps", without_embed(begun.taps), without_embed([FINAL, *every]), options.out)
    kept = kept_of(options, requests, taps, then, lookup=True)
    on_event(Sized(_room(options, header, kept, requests, facts.manifests[0].wiring)))
    name = f"{RID_PREFIX}{secrets.token_hex(8)}"
    with SpoolReader(facts.spool, facts.taps, target.hidden_size, name) as spool:
        client = ServerClient(options, api, facts, spool, on_event)
        probe = client.probe(requests[0])
        weights, lookup, lacking = _weights_and_lookup(options, header, probe, requests[0])
        if lacking:
            on_event(Noted(f"the trace will lack {lacking}"))
            header = replace(header, missing=(*header.missing, lacking))
        kept = kept_of(options, requests, taps, then, lookup=lookup)
        infos = kept.tap_infos(target.dtype, target.hidden_size)
        header = kept.announce(replace(header, taps=infos, embed="lookup" if lookup else "stored"))
        begin = TraceWriter.resume if options.resume else partial(TraceWriter.create, force=options.force)
        with begin(options.out, header) as writer:
            if weights is not None and options.weights:
                writer.write_target_weights(*weights)
            return client.run(requests, writer, kept)


def _room(
    options: ServerOptions,
    header: TraceHeader,
    kept: Kept,
    requests: Sequence[EncodedRequest],
    fed: Sequence[str],
) -> Room:
    """What will be written at most, the server's own rows aside, which go as they are joined."""
    target = header.target
    item_bytes = ITEM_BYTES.get(target.dtype, 4)
    size = RowSize(kept.taps, target.hidden_size, item_bytes, header.topk, options.rows)
    tables = 1 if target.tie_word_embeddings else 2
    weights = tables * target.vocab_size * target.hidden_size * item_bytes if options.weights else 0
    return expect(
        options.out, size, requests, kept=kept, layers=target.layers, beside=weights, needed_taps=fed,
        replaces=options.force,
    )  # fmt: skip


def _wanted_taps(options: ServerOptions, facts: ServerFacts, layers: int) -> tuple[str, ...]:
    """What goes into the trace: what was asked for, and always what the draft is fed. Raises UsageError."""
    if options.taps is None:
        return facts.taps
    wanted = parse_taps(options.taps, layers=layers)
    _check_recorded("--taps", wanted, facts)
    return sort_taps([FINAL, *wanted, *facts.manifests[0].wiring])


def _then_taps(options: ServerOptions, facts: ServerFacts, layers: int) -> tuple[str, ...]:
    """What goes into the trace of the requests after the first ones: where nobody says, what the draft is fed.

    Raises UsageError.
    """
    fed = facts.manifests[0].wiring
    if options.taps_for is not None and options.then_taps is None and not fed:
        raise UsageError(
            f"--taps-for {options.taps_for} leaves the other requests what the server's draft is fed, and it has none: "
            "type --then-taps T"
        )
    wanted = then_taps_of(options, fed, layers=layers)
    _check_recorded("--then-taps", wanted, facts)
    return wanted


def _check_recorded(option: str, wanted: Sequence[str], facts: ServerFacts) -> None:
    lacking = [tap for tap in wanted if tap not in facts.taps]
    if lacking:
        raise UsageError(
            f"{option} {','.join(lacking)} are not recorded by the server (it records {','.join(facts.taps)}): start "
            "it by replay serve with these taps"
        )


def _header(
    options: ServerOptions, prompts: PromptFile, facts: ServerFacts, taps: Sequence[str], then: Sequence[str]
) -> TraceHeader:
    target = facts.target()
    missing = [
        "for each request, the target's choices beyond its last verify (those within it are its tail_ids)",
        *(["verify rounds of a server: it drafts nothing"] if not facts.manifests[0].wiring else []),
        *(["the server's random numbers: it draws its own, --seed has no effect"] if options.temperature > 0 else []),
    ]
    return TraceHeader(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        replay_version=replay.__version__,
        target=target,
        engine=facts.engine(),
        taps={tap: TapInfo(target.dtype, target.hidden_size) for tap in taps},
        topk=min(facts.manifests[0].topk, target.vocab_size),
        capture=settings_of(options, prompts, then),
        missing=tuple(missing),
    )


def _weights_and_lookup(
    options: ServerOptions, header: TraceHeader, probe: JoinedRequest, request: EncodedRequest
) -> "tuple[tuple[torch.Tensor, torch.Tensor | None] | None, bool, str]":
    """The target's weights, whether R[0] is a lookup in its embedding, and what is missing of them, in words."""
    import torch

    from replay.traces.weights import load_weight

    try:
        embed = load_weight(options.out, header, EMBED)
        lm_head = None if header.target.tie_word_embeddings else load_weight(options.out, header, "lm_head")
    except TraceError as error:
        return None, False, f"the target's embedding and output rows ({error})"
    ids = torch.tensor(request.prompt_ids[:PROBE_TOKENS])
    lookup = torch.equal(embed[ids].to(probe.taps[EMBED].dtype), probe.taps[EMBED][: len(ids)])
    return (embed, lm_head), lookup, ""
