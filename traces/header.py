"""The header of a trace (``trace.json``): what was recorded, of which target, by which engine. See SPEC.md, section 3.

Reading is strict: every field is checked for type and size before anything else trusts it, and the message of the
TraceCorruptError names the field, what it held and what was possible.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from replay.errors import TraceCorruptError, TraceVersionError, UsageError
from replay.traces import files
from replay.traces.damage import ReadingTrace
from replay.traces.fields import Fields, parse_json, show
from replay.traces.header_sum import NO_SUM, check_own_sum, with_own_sum
from replay.traces.taps import EMBED, FINAL, canonical_taps, parse_tap, sort_taps

FORMAT = "replay-trace"
MAX_HEADER_FILE = 1 << 24
VERSION, OLDEST = 2, 1  # the versions that are read; the oldest one is written wherever it can say all

TAP_DTYPES = ("bfloat16", "float16", "float32")
FP8 = "float8_e4m3fn"  # of rows that are stored with a scale each; they are read in the target's dtype
ROWS = ("exact", "fp8")  # how rows are stored
STATES = ("recording", "complete")
EMBED_WAYS = ("lookup", "stored")

MAX_LAYERS = 9_999  # tap names have at most four digits
MAX_WIDTH = 1 << 20
MAX_VOCAB = (1 << 31) - 1  # token ids are int32
MAX_TOPK = 4_096
MAX_COUNT = 1 << 40

_CHOICES = ("taps_for", "then_taps", "rows", "prompt_rows")  # of the capture, which version 1 lacks


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """The model whose states were recorded; ``path`` is where its checkpoint lay (a folder or a hub id)."""

    name: str
    path: str
    architecture: str
    model_type: str
    layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    tie_word_embeddings: bool
    max_position_embeddings: int | None
    fingerprint: str


# What makes two traces those of one target, whose requests can be counted together; its checkpoint may have moved.
ONE_TARGET = ("fingerprint", "architecture", "layers", "hidden_size", "vocab_size", "dtype", "tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The program that ran the target; ``details`` holds whatever else decides its numbers (device, attention, ...)."""

    name: str
    version: str
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TapInfo:
    """One stored tap: ``dtype`` is one of TAP_DTYPES or FP8, ``width`` the number of values in a row."""

    dtype: str
    width: int


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """What the capture was asked for; a resumed capture must ask for the same. ``top_k`` < 1 means no limit.

    ``taps_for``: of so many requests, the first of the prompt file, all taps were asked for, of the others
    ``then_taps`` and ``final``. ``rows``: one of ROWS. ``prompt_rows``: so many rows at the end of each prompt.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    raw: bool
    prompts_sha256: str
    taps_for: int | None = None
    then_taps: tuple[str, ...] = ()
    rows: str = "exact"
    prompt_rows: int | None = None

    @property
    def choices(self) -> dict[str, object]:
        """Those of the fields that version 1 lacks which ask for less than all rows of all taps as computed."""
        nothing = {"taps_for": None, "then_taps": (), "rows": "exact", "prompt_rows": None}
        return {name: value for name, usual in nothing.items() if (value := getattr(self, name)) != usual}


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """The sidecar with the target's embedding and output rows; its size in bytes and SHA-256."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Everything a reader must know before it opens a shard.

    ``taps`` are the stored ones (``final`` always; ``embed`` only where it is no plain lookup). ``requests``,
    ``requests_sha256``, ``rounds`` and ``rounds_sha256`` are set by ``TraceWriter.finish``, ``weights`` by
    ``TraceWriter.write_target_weights``; who captures leaves them at their defaults.
    """

    created: str
    replay_version: str
    target: TargetInfo
    engine: EngineInfo
    taps: Mapping[str, TapInfo]
    topk: int
    capture: CaptureSettings
    embed: str = "lookup"
    missing: tuple[str, ...] = ()
    weights: WeightsInfo | None = None
    requests: int | None = None
    requests_sha256: str | None = None
    rounds: bool = False
    rounds_sha256: str | None = None
    shard_headers_sha256: str | None = None
    state: str = "recording"
    version: int = OLDEST
    header_sha256: str | None = field(default=None, compare=False)  # as it was read; None where a file has none

    @property
    def uncovered(self) -> str:
        """Which checksum the trace lacks, in a sentence; empty where it lacks none."""
        if self.header_sha256 is not None:
            return ""
        return "a checksum of trace.json: an earlier replay wrote it, and an edit of it is not noticed"

    def to_json(self) -> str:
        """The text of ``trace.json``. Reading it back gives an equal header."""
        body = asdict(self) | {"header_sha256": NO_SUM}
        order = ("version", "state", "header_sha256")
        first = {"format": FORMAT, **{name: body.pop(name) for name in order}}
        body["missing"] = list(self.missing)
        body["capture"] = {name: value for name, value in body["capture"].items() if self._is_said(name)}
        text = json.dumps({**first, **body}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        return with_own_sum(text)

    def _is_said(self, name: str) -> bool:
        return name not in _CHOICES or name in self.capture.choices

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "trace.json", *, verify: bool = True) -> "TraceHeader":
        """Parse and check ``text``; ``source`` names it in messages. Without ``verify`` its own checksum may differ.

        Raises TraceVersionError for another format or version, TraceCorruptError for anything else that is wrong.
        """
        root = Fields(source, parse_json(text, source))
        _check_version(root, source)
        version = root.integer("version", OLDEST, VERSION)
        target = _target(root.object("target"))
        header = cls(
            created=root.text("created"),
            replay_version=root.text("replay_version"),
            target=target,
            engine=_engine(root.object("engine")),
            taps=_taps(root, target, version),
            topk=root.integer("topk", 1, min(MAX_TOPK, target.vocab_size)),
            capture=_capture(root.object("capture"), version, target),
            embed=root.choice("embed", EMBED_WAYS),
            missing=root.texts("missing"),
            weights=_weights(root),
            requests=root.optional_integer("requests", 0, MAX_COUNT),
            requests_sha256=root.optional_sha256("requests_sha256"),
            rounds=root.flag("rounds"),
            rounds_sha256=root.optional_sha256("rounds_sha256"),
            shard_headers_sha256=_later_sum(root, "shard_headers_sha256"),
            state=root.choice("state", STATES),
            version=version,
            header_sha256=_later_sum(root, "header_sha256"),
        )
        _check_agreement(header, source)
        if verify and header.header_sha256 is not None:
            check_own_sum(text if isinstance(text, bytes) else text.encode(), header.header_sha256, source)
        return header


def _later_sum(root: Fields, name: str) -> str | None:
    """A checksum that version 1 did not have at first."""
    return root.optional_sha256(name) if name in root.values else None


def _check_version(root: Fields, source: str) -> None:
    kind = root.values.get("format")
    if kind != FORMAT:
        raise TraceVersionError(
            f"{source} is not the header of a replay trace: its format is {show(kind)}, not {FORMAT}"
        )
    version = root.integer("version", 0, MAX_COUNT)
    if not OLDEST <= version <= VERSION:
        mend = "update replay" if version > VERSION else "capture it again"
        raise TraceVersionError(
            f"{source} is of trace format version {version}, this replay reads versions {OLDEST} to {VERSION}: {mend}"
        )


def _target(fields: Fields) -> TargetInfo:
    return TargetInfo(
        name=fields.text("name"),
        path=fields.text("path"),
        architecture=fields.text("architecture"),
        model_type=fields.text("model_type"),
        layers=fields.integer("layers", 1, MAX_LAYERS),
        hidden_size=fields.integer("hidden_size", 1, MAX_WIDTH),
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        dtype=fields.text("dtype"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        max_position_embeddings=fields.optional_integer("max_position_embeddings", 1, MAX_COUNT),
        fingerprint=fields.text("fingerprint"),
    )


def _engine(fields: Fields) -> EngineInfo:
    details = fields.object("details")
    return EngineInfo(
        name=fields.text("name"),
        version=fields.text("version"),
        details={name: details.text(name) for name in details.values},
    )


def _taps(root: Fields, target: TargetInfo, version: int) -> dict[str, TapInfo]:
    fields = root.object("taps")
    for name in fields.values:
        try:
            canonical = parse_tap(name, layers=target.layers)
        except UsageError as error:
            raise TraceCorruptError(f"{fields.where}: {error}") from error
        if canonical != name:
            raise TraceCorruptError(f"{fields.where}: the tap {canonical} is written {name!r}")
    return {name: _tap(fields.object(name), version) for name in sort_taps(list(fields.values))}


def _tap(fields: Fields, version: int) -> TapInfo:
    dtypes = TAP_DTYPES if version == OLDEST else (*TAP_DTYPES, FP8)
    return TapInfo(dtype=fields.choice("dtype", dtypes), width=fields.integer("width", 1, MAX_WIDTH))


def _capture(fields: Fields, version: int, target: TargetInfo) -> CaptureSettings:
    plain = CaptureSettings(
        max_new_tokens=fields.integer("max_new_tokens", 0, MAX_COUNT),
        temperature=fields.number("temperature", 0.0, 1e6),
        top_p=fields.number("top_p", 0.0, 1.0),
        top_k=fields.integer("top_k", -MAX_COUNT, MAX_COUNT),
        seed=fields.integer("seed", -(1 << 63), (1 << 64) - 1),
        raw=fields.flag("raw"),
        prompts_sha256=fields.text("prompts_sha256"),
    )
    return plain if version == OLDEST else _chosen(plain, fields, target)


def _chosen(plain: CaptureSettings, fields: Fields, target: TargetInfo) -> CaptureSettings:
    """With what version 2 says of the choices; what it leaves out was not asked for."""
    given = Fields(fields.where, {**{name: getattr(plain, name) for name in _CHOICES}, **fields.values})
    if isinstance(given.values["then_taps"], tuple):
        given.values["then_taps"] = []
    return replace(
        plain,
        taps_for=given.optional_integer("taps_for", 1, MAX_COUNT),
        then_taps=canonical_taps(given, "then_taps", target.layers),
        rows=given.choice("rows", ROWS),
        prompt_rows=given.optional_integer("prompt_rows", 1, MAX_COUNT),
    )


def _weights(root: Fields) -> WeightsInfo | None:
    if root.get("weights") is None:
        return None
    fields = root.object("weights")
    return WeightsInfo(
        file=fields.choice("file", ("target.safetensors",)),  # a fixed name cannot leave the folder
        bytes=fields.integer("bytes", 1, MAX_COUNT),
        sha256=fields.sha256("sha256"),
    )


def _check_agreement(header: TraceHeader, source: str) -> None:
    """What no single field shows."""
    if FINAL not in header.taps:
        raise TraceCorruptError(f"{source}: taps lacks {FINAL}, which every trace holds")
    if (header.embed == "stored") != (EMBED in header.taps):
        raise TraceCorruptError(
            f"{source}: embed is {header.embed!r} and the stored taps are {', '.join(header.taps)}: "
            f"{EMBED} must be among them exactly when it is 'stored'"
        )
    if header.taps[FINAL].dtype == FP8:
        raise TraceCorruptError(f"{source}: the tap {FINAL} is {FP8}, it is stored as it was computed in every trace")
    for name, tap in header.taps.items():
        if name != EMBED and tap.width != header.target.hidden_size:
            raise TraceCorruptError(
                f"{source}: tap {name} is {tap.width} wide, the target's hidden_size is {header.target.hidden_size}"
            )
    if header.state == "complete" and (header.requests is None or header.requests_sha256 is None):
        raise TraceCorruptError(f"{source}: state is 'complete' but requests or requests_sha256 is null")
    if header.state == "complete" and header.rounds != (header.rounds_sha256 is not None):
        raise TraceCorruptError(f"{source}: rounds is {header.rounds} but rounds_sha256 is {header.rounds_sha256!r}")


@ReadingTrace()
def read_header(folder: Path, *, verify: bool = True) -> TraceHeader:
    """The header of the trace in ``folder``, as ``from_json`` reads it. Raises TraceVersionError, TraceCorruptError."""
    path = folder / files.HEADER
    return TraceHeader.from_json(files.read_small(path, MAX_HEADER_FILE), str(path), verify=verify)
