"""`replay import`: dumps become a trace that is whole, or none."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import replay
from replay.capture.dumps.border import Masks, Turn, read_masks, turns_of
from replay.capture.dumps.convert import header_taps, request_of
from replay.capture.dumps.find import FORMATS, open_dump
from replay.capture.dumps.sample import ROUNDED, Dump, Sample
from replay.capture.dumps.slots import Slots, beside_last, check_count, check_names, split
from replay.capture.dumps.stage import Stage, find_stage, stage_of
from replay.capture.dumps.target import DumpTarget, open_dump_target
from replay.capture.options import parse_distinct_taps
from replay.errors import CaptureError, UsageError
from replay.traces.captured import CapturedRequest
from replay.traces.check import ERROR, check_trace
from replay.traces.header import CaptureSettings, EngineInfo, TraceHeader
from replay.traces.reader import Trace
from replay.traces.taps import EMBED, sort_taps
from replay.traces.whole import check_output, whole_folder
from replay.traces.writer import TraceWriter

_BATCH_BYTES = 1 << 28  # of a shard's rows, about
_CHECKED = 2048  # output positions that go through lm_head in the self-check

_MISSING = (
    "what sampled the tokens: the texts are taken as given",
    "verify rounds of a server",
    "the target's choice after the last output token of each request",
)
_NO_MASK = "the border between prompt and output: the dump has no loss mask, so all but a text's first token is output"
_OWN_NORM = "the state after the final norm: made from the state before it and the target's norm"
_NO_STREAM = "the stream before the final norm: the dump holds the state after it"

OnText = Callable[[int, int], None]  # texts done, of how many


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What to import. ``taps`` names the slots beside the last state, in the dump's order; None where it says so."""

    dumps: Sequence[Path]
    out: Path
    target: Path
    form: str = "auto"
    taps: str | None = None
    loss_masks: Path | None = None
    limit: int | None = None
    topk: int = 32
    weights: bool = True
    force: bool = False


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What was written.

    ``agreed`` output tokens are the target's first choice after those before it; one costs ``nats`` on average, a blind
    guess ``blind``. ``skipped`` texts were trained on nowhere.
    """

    path: Path
    form: str
    last_state: Stage
    texts: int
    skipped: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    taps: tuple[str, ...]
    agreed: int
    nats: float
    blind: float
    missing: tuple[str, ...]


@dataclass(slots=True)
class _Counts:
    texts: int = 0
    skipped: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    agreed: int = 0
    nats: float = 0.0
    rounded: bool = False
    unmasked: bool = False
    waiting: list[CapturedRequest] = field(default_factory=list)
    bytes: int = 0


def import_dumps(options: ImportOptions, on_text: OnText = lambda done, total: None) -> ImportResult:
    """Write a trace of the texts in ``options.dumps``: all of them and checked, or nothing.

    Raises UsageError, CaptureError and TraceError for what was typed or read, OutputError where the disk refuses.
    """
    _check_options(options)
    target = open_dump_target(options.target)
    dump = open_dump(options.dumps, options.form)
    names = _slot_names(options, dump, target)
    masks = None if options.loss_masks is None else read_masks(options.loss_masks)
    total = dump.count if options.limit is None else min(options.limit, dump.count)
    with whole_folder(options.out, force=options.force) as folder:
        result = _Import(options, target, dump, names, masks).run(folder, on_text, total)
        _check(folder, options)
    return replace(result, path=options.out)


def _check_options(options: ImportOptions) -> None:
    if options.form not in FORMATS:
        raise UsageError(f"--format {options.form} is not one of {', '.join(FORMATS)}")
    for name, value in (("--limit", options.limit), ("--topk", options.topk)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value} cannot be: type a number that is 1 or more")
    check_output(options.out, force=options.force)


def _slot_names(options: ImportOptions, dump: Dump, target: DumpTarget) -> tuple[str, ...]:
    layers = target.info.layers
    if options.taps is None:
        if dump.taps is None:
            raise UsageError(
                f"a dump of {dump.form} does not say which taps it holds: type --taps with one name for each, in the "
                "dump's order, as in 2,16,29 (R indices) or out:1,out:15,out:28 (outputs of layers)"
            )
        typed = ",".join(dump.taps)
    else:
        typed = options.taps
    names = parse_distinct_taps(typed, layers=layers)
    check_names(names, layers)
    if dump.taps is not None and names != dump.taps:
        raise UsageError(f"--taps names {','.join(names)}, the dump says {','.join(dump.taps)}: leave --taps out")
    return names


def _check(folder: Path, options: ImportOptions) -> None:
    """The self-check of a trace; nothing is left where it fails. Raises CaptureError with its first finding."""
    for finding in check_trace(Trace.open(folder), rows=_CHECKED):
        if finding.severity == ERROR:
            text = "" if finding.request_id is None else f"{finding.request_id}: "
            raise CaptureError(f"the dump fails the self-check of traces ({text}{finding.what}): write it again")


class _Import:
    """One import, from the first text to the finished trace."""

    def __init__(
        self, options: ImportOptions, target: DumpTarget, dump: Dump, names: tuple[str, ...], masks: Masks | None
    ) -> None:
        self.options, self.target, self.dump, self.names, self.masks = options, target, dump, names, masks
        self.counts = _Counts()

    def run(self, folder: Path, on_text: OnText, total: int) -> ImportResult:
        samples = islice(self.dump.samples, self.options.limit)
        first = next(samples, None)
        if first is None:
            raise CaptureError(f"{self.options.dumps[0]} holds no text: name a dump's file or folder")
        typed, self.names = self.names, beside_last(first, self.names, self.target)
        self._check(first)
        self.target = self.target.multiplying(first.last_SH.dtype)
        slots = Slots(self.names, find_stage(first, self.target))
        if typed != self.names and slots.stage == "after":
            raise UsageError(
                f"--taps calls the last state {typed[-1]}, the stream before the final norm, and it has been through "
                f"that norm: type --taps {','.join(self.names)}"
            )
        header = self._header(first, slots)
        with TraceWriter.create(folder, header) as writer:
            if self.options.weights:
                writer.write_target_weights(self.target.embed_VH, self.target.lm_head_VH)
            for sample in (one for part in ([first], samples) for one in part):
                self._add(sample, slots, writer)
                on_text(self.counts.texts, total)
            self._flush(writer)
            self._refuse_nothing()
            writer.set_missing(self._missing(slots))
            writer.finish()
        return self._result(folder, header, slots)

    def _header(self, first: Sample, slots: Slots) -> TraceHeader:
        target, dtype = self.target.info, str(first.last_SH.dtype).removeprefix("torch.")
        return TraceHeader(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            replay_version=replay.__version__,
            target=replace(target, dtype=dtype),
            engine=EngineInfo(self.dump.form, "dump", {"last_state": f"{slots.stage} the final norm"}),
            taps=header_taps(first, slots, self.target),
            topk=min(self.options.topk, target.vocab_size),
            capture=CaptureSettings(0, 0.0, 1.0, 0, 0, True, _fingerprint(self.options.dumps)),
            embed="lookup",
        )

    def _add(self, sample: Sample, slots: Slots, writer: TraceWriter) -> None:
        sample = sample if self.masks is None else self.masks.apply(sample)
        self._check(sample)
        if stage_of(sample, self.target) != slots.stage:
            raise CaptureError(
                f"{sample.where} holds the last state of the other side of the final norm than the texts before it: "
                "import the two kinds by themselves"
            )
        counts, turns = self.counts, turns_of(sample)
        counts.texts, counts.skipped = counts.texts + 1, counts.skipped + (not turns)
        counts.rounded, counts.unmasked = counts.rounded | sample.rounded, counts.unmasked | (sample.mask_S is None)
        taps = split(sample, slots, self.target) if turns else {}
        for turn in turns:
            request, nats = request_of(sample, turn, taps, self.target, self.options.topk)
            self._count(request, turn, nats)
            if counts.bytes >= _BATCH_BYTES:
                self._flush(writer)

    def _check(self, sample: Sample) -> None:
        """Raises UsageError, CaptureError where ``sample`` is not of this target or not of these taps."""
        check_count(sample, self.names, self.target.info.hidden_size, typed=self.options.taps is not None)
        low, high, rows = int(sample.tokens_S.min()), int(sample.tokens_S.max()), self.target.info.vocab_size
        if low < 0 or high >= rows:
            raise CaptureError(f"{sample.where} holds token ids from {low} to {high}, the target's are 0 to {rows - 1}")

    def _count(self, request: CapturedRequest, turn: Turn, nats: float) -> None:
        counts = self.counts
        counts.waiting.append(request)
        counts.bytes += sum(tap.numel() * tap.element_size() for tap in request.taps.values())
        counts.requests += 1
        counts.prompt_tokens += turn.start
        counts.output_tokens += turn.end - turn.start
        counts.nats += nats
        counts.agreed += sum(
            int(best == said) for best, said in zip(request.topk_ids[:, 0], request.output_ids, strict=True)
        )

    def _flush(self, writer: TraceWriter) -> None:
        writer.add(self.counts.waiting)
        self.counts.waiting, self.counts.bytes = [], 0

    def _refuse_nothing(self) -> None:
        if not self.counts.requests:
            raise CaptureError(
                f"the loss masks of all {self.counts.texts} texts are empty: there is no output to replay, so import a "
                "dump with trained tokens"
            )

    def _missing(self, slots: Slots) -> tuple[str, ...]:
        counts = self.counts
        more = [_OWN_NORM if slots.stage == "before" else _NO_STREAM]
        more += [_NO_MASK] * counts.unmasked + [ROUNDED] * counts.rounded
        if counts.skipped:
            more.append(f"{counts.skipped} of {counts.texts} texts, which were trained on nowhere")
        return (*_MISSING, *more)

    def _result(self, folder: Path, header: TraceHeader, slots: Slots) -> ImportResult:
        counts = self.counts
        return ImportResult(
            folder, self.dump.form, slots.stage, counts.texts, counts.skipped, counts.requests, counts.prompt_tokens,
            counts.output_tokens, sort_taps([*header.taps, EMBED]), counts.agreed,
            counts.nats / counts.output_tokens, math.log(header.target.vocab_size), self._missing(slots),
        )  # fmt: skip


def _fingerprint(paths: Sequence[Path]) -> str:
    """SHA-256 over the names and sizes of what was imported."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
    return digest.hexdigest()
