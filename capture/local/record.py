"""Record a prompt file with a target in this process: prompts to batches, each batch to the trace as it ends."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import replay
from replay.capture.encode import EncodedRequest, encode_prompts
from replay.capture.events import CaptureProgress, CaptureResult, Event, Finished, Loading, Noted, Planned, Sized
from replay.capture.kept import Kept, kept_of
from replay.capture.local.prefixes import Prefixes
from replay.capture.local.sampling import Sampling
from replay.capture.options import (
    CaptureOptions,
    check_options,
    check_output_folder,
    check_resumed,
    settings_of,
    then_taps_of,
)
from replay.capture.prompts import PromptFile, read_prompts
from replay.capture.size import ITEM_BYTES, Room, RowSize, expect
from replay.capture.target_files import fingerprint_target, stated_layers
from replay.errors import CaptureError
from replay.printable import counted
from replay.traces.given import check_callable, check_given
from replay.traces.header import EngineInfo, TargetInfo, TraceHeader
from replay.traces.place import check_equal
from replay.traces.taps import default_taps, parse_taps

if TYPE_CHECKING:
    from replay.capture.local.target import LocalTarget
    from replay.capture.target_files import TargetFiles
    from replay.traces.writer import TraceWriter

_BATCH_TOKENS = 32_768  # of a batch at most, padding and outputs included; one request alone may have more
_BATCH_BYTES = 1 << 30  # of a batch's recorded rows at most, likewise
_CHECK_TOKENS = 128  # of the first prompt, on which the hooks are held against the target's own hidden states


def capture_local(options: CaptureOptions, on_event: Callable[[Event], None]) -> CaptureResult:
    """Record every row of a prompt file with a Transformers target in this process.

    Each finished batch is safe on disk; after an interruption the same call with ``resume`` does only what is missing.
    Raises UsageError, PromptError, CaptureError, OutputError and TraceError, the first two before weights are read.
    """
    check_given("options", options, CaptureOptions, "options were expected; make them by replay.CaptureOptions(...)")
    check_callable("on_event", on_event, "a function that takes an event was expected; pass lambda event: None")
    check_options(options, ("--topk", options.topk, type(options.topk) is int and options.topk >= 1, "1 or more"))
    prompts = read_prompts(options.prompts)
    check_output_folder(options)
    begun = check_resumed(options, prompts, "transformers")
    _check_taps(options)
    from replay.capture.local.target import check_target, load_target
    from replay.capture.target_check import TransformersCalls
    from replay.capture.target_files import open_target
    from replay.traces.writer import TraceWriter

    files = open_target(options.model)
    if begun is not None:
        check_equal("target.fingerprint", begun.target.fingerprint, fingerprint_target(files.folder), options.out)
    taps = default_taps(files.layers) if options.taps is None else parse_taps(options.taps, layers=files.layers)
    encoded = encode_prompts(
        prompts, files.tokenizer, files.limits, raw=options.raw, max_new_tokens=options.max_new_tokens
    )
    requests = encoded.requests
    then = then_taps_of(options, layers=files.layers)
    on_event(Sized(_room(options, files, kept_of(options, requests, taps, then, lookup=True), requests)))
    on_event(Loading(files.name, len(requests)))
    for note in (*prompts.notes, *encoded.notes(), *_notes(requests, options)):
        on_event(Noted(note))
    try:
        with TransformersCalls(files.folder):
            target = load_target(files, dtype=options.dtype, device=options.device)
            lookup = check_target(target, requests[0].prompt_ids[:_CHECK_TOKENS])
        kept = kept_of(options, requests, taps, then, lookup=lookup)
        header = _header(options, prompts, files, target, kept, lookup)
    except KeyboardInterrupt:
        raise CaptureError(f"interrupted while the target was loaded: {options.go_on}") from None
    if options.resume:
        begin = partial(TraceWriter.resume, go_on=options.go_on)
    else:
        begin = partial(TraceWriter.create, force=options.force, go_on=options.go_on)
    with begin(options.out, header) as writer:
        result = _Recorder(options, target, writer, kept, on_event).run(requests, header.embed)
        return replace(result, left_out=encoded.left_out)


def _check_taps(options: CaptureOptions) -> None:
    """Taps beyond the target, before it is opened or fetched. Raises UsageError."""
    if (layers := stated_layers(options.model)) is None:
        return
    if options.taps is not None:
        parse_taps(options.taps, layers=layers)
    then_taps_of(options, layers=layers)


def _room(options: CaptureOptions, files: "TargetFiles", kept: Kept, requests: Sequence[EncodedRequest]) -> Room:
    """What will be written at most. The embedding is taken for a lookup, which it mostly is, and not counted."""
    config = files.config
    dtype = options.dtype if options.dtype != "auto" else str(getattr(config, "dtype", None) or "float32")
    item_bytes = ITEM_BYTES.get(dtype.removeprefix("torch."), 4)
    size = RowSize(
        kept.taps, int(config.hidden_size), item_bytes, min(options.topk, files.limits.vocab_size), options.rows
    )
    tables = 1 if getattr(config, "tie_word_embeddings", False) else 2
    weights = tables * files.limits.vocab_size * int(config.hidden_size) * item_bytes
    return expect(
        options.out, size, requests, layers=files.layers, beside=weights if options.weights else 0,
        kept=kept, replaces=options.force,
    )  # fmt: skip


def _notes(requests: Sequence[EncodedRequest], options: CaptureOptions) -> Iterator[str]:
    short = [one for one in requests if one.forced_ids is None and one.max_new_tokens < options.max_new_tokens]
    if short:
        yield (
            f"{len(short)} of {counted(len(requests), 'request')} reach the end of the target's context before "
            f"{options.max_new_tokens} new tokens ({short[0].request_id!r} after {short[0].max_new_tokens})"
        )


def _header(
    options: CaptureOptions,
    prompts: PromptFile,
    files: "TargetFiles",
    target: "LocalTarget",
    kept: Kept,
    lookup: bool,
) -> TraceHeader:
    import torch
    import transformers

    config, dtype = files.config, str(target.embed_weight.dtype).removeprefix("torch.")
    vocab_size, hidden_size = target.embed_weight.shape
    header = TraceHeader(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        replay_version=replay.__version__,
        target=TargetInfo(
            name=files.name,
            path=options.model if files.name == options.model else str(files.folder.resolve()),
            architecture=type(target.model).__name__,
            model_type=config.model_type,
            layers=files.layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            dtype=dtype,
            tie_word_embeddings=target.lm_head_weight is None,
            max_position_embeddings=files.limits.context,
            fingerprint=fingerprint_target(files.folder),
        ),
        engine=EngineInfo(
            name="transformers",
            version=transformers.__version__,
            details={
                "torch": torch.__version__,
                "device": str(target.device),
                "attention": str(target.model.config._attn_implementation),
                "concurrency": str(options.concurrency),
            },
        ),
        taps=kept.tap_infos(dtype, hidden_size),
        topk=min(options.topk, vocab_size),
        capture=settings_of(options, prompts),
        embed="lookup" if lookup else "stored",
        missing=("the target's choice after the last output token of each request", "verify rounds of a server"),
    )
    return kept.announce(header)


def plan_batches(
    requests: Sequence[EncodedRequest], *, most_requests: int, most_tokens: int
) -> list[list[EncodedRequest]]:
    """Batches of like length, forced and generated ones apart, longest first (so too little memory shows at once).

    A batch has at most ``most_requests`` requests and, unless it is a single one, at most ``most_tokens`` tokens when
    all of them are as long as its longest prompt and its longest output.
    """
    batches: list[list[EncodedRequest]] = []
    for forced in (False, True):
        batch: list[EncodedRequest] = []
        same = [one for one in requests if (one.forced_ids is not None) is forced]
        for one in sorted(same, key=lambda one: (-len(one.prompt_ids), one.max_new_tokens)):
            width = max(len(other.prompt_ids) for other in [*batch, one])
            width += max(other.max_new_tokens for other in [*batch, one])
            if batch and (len(batch) == most_requests or (len(batch) + 1) * width > most_tokens):
                batches.append(batch)
                batch = []
            batch.append(one)
        if batch:
            batches.append(batch)
    return batches


class _Recorder:
    """Runs the batches of one capture and tells how far it is."""

    def __init__(
        self,
        options: CaptureOptions,
        target: "LocalTarget",
        writer: "TraceWriter",
        kept: Kept,
        on_event: Callable[[Event], None],
    ) -> None:
        self.options, self.target, self.writer, self.kept, self.on_event = options, target, writer, kept, on_event
        self.sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
        self.started = time.monotonic()
        self.requests = self.requests_done = 0
        self.output_tokens = self.most_output_tokens = 0

    def run(self, requests: Sequence[EncodedRequest], embed: str) -> CaptureResult:
        done = set(self.writer.done_ids)
        todo = [one for one in requests if one.request_id not in done]
        self.requests, self.requests_done = len(requests), len(requests) - len(todo)
        self.most_output_tokens = sum(one.max_new_tokens for one in todo)
        prompt_tokens = sum(len(one.prompt_ids) for one in todo)
        # Of all requests, as are the batches below, so that a resumed capture computes what it would have computed.
        prefixes = Prefixes(self.target, {one.request_id: one.prompt_ids for one in requests})
        self.on_event(Planned(self.requests, self.requests_done, prompt_tokens, self.most_output_tokens))
        try:
            if self.options.weights:
                self.writer.write_target_weights(self.target.embed_weight, self.target.lm_head_weight)
            # Planned over all requests, so that a resumed capture has the batches it would have had.
            # The first requests have all taps of the others, so prefixes that they computed serve these too.
            for taps, alike in self.kept.tiers(requests):
                for batch in self._batches(taps, alike):
                    missing = [one for one in batch if one.request_id not in done]
                    if missing:
                        self._record(missing, taps, prefixes)
            self.writer.finish()
        except KeyboardInterrupt:
            raise CaptureError(
                f"interrupted: {self.requests_done} of {counted(self.requests, 'request')} are safe in "
                f"{self.options.out}; {self.options.go_on} to go on"
            ) from None
        seconds = time.monotonic() - self.started
        result = CaptureResult(
            self.options.out,
            self.requests,
            len(todo),
            prompt_tokens,
            self.output_tokens,
            seconds,
            self.kept.taps,
            embed,
        )
        self.on_event(Finished(result))
        return result

    def _batches(self, taps: Sequence[str], requests: Sequence[EncodedRequest]) -> list[list[EncodedRequest]]:
        weight = self.target.embed_weight
        row_bytes = len(taps) * weight.shape[1] * weight.element_size()
        most_tokens = min(_BATCH_TOKENS, _BATCH_BYTES // row_bytes)
        return plan_batches(requests, most_requests=self.options.concurrency, most_tokens=most_tokens)

    def _record(self, batch: Sequence[EncodedRequest], taps: Sequence[str], prefixes: Prefixes) -> None:
        import torch

        from replay.capture.local.generate import run_batch

        before = self.output_tokens
        most_later = self.most_output_tokens - sum(one.max_new_tokens for one in batch)

        def on_step(tokens: int, left: int) -> None:
            self.output_tokens = before + tokens
            self._tell(most_later + left)

        try:
            rows = run_batch(
                self.target, batch, taps, sampling=self.sampling, topk=self.options.topk, on_step=on_step,
                prefixes=prefixes,
            )  # fmt: skip
        except torch.cuda.OutOfMemoryError as error:
            raise CaptureError(
                f"the device has no memory for a batch of {counted(len(batch), 'request')}, {self.requests_done} of "
                f"{self.requests} are safe: {self.options.go_on} and a smaller --concurrency"
            ) from error
        self.writer.add([self.kept.cut(one) for one in rows])
        self.requests_done += len(batch)
        self.most_output_tokens = most_later
        self._tell(most_later)

    def _tell(self, tokens_left: int) -> None:
        seconds = time.monotonic() - self.started
        rate = self.output_tokens / seconds if seconds > 0 else 0.0
        self.on_event(
            CaptureProgress(self.requests_done, self.requests, self.output_tokens, tokens_left, seconds, rate)
        )
