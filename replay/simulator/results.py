"""What a simulation gathers: sums of each variant, its rounds as a table, and the rounds of a run that is followed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.config import FAMILY_NAMES
from replay.checkpoint.hub import step_of
from replay.engines.wiring import Wiring, dflash_ids, engine_ids
from replay.errors import WiringError
from replay.printable import counted
from replay.simulator.binding import stated_wiring
from replay.simulator.variant import ResolvedVariant
from replay.traces.header import ONE_TARGET
from replay.traces.reader import Trace
from replay.traces.rounds import RequestInfo, VariantInfo
from replay.verify.estimator import Estimate, Estimator

if TYPE_CHECKING:
    import polars as pl


@dataclass(slots=True)
class Tally:
    """Running sums of one variant."""

    seconds: float = 0.0
    by_request: dict[str, list[int]] = field(default_factory=dict)  # anchors, anchors_accepted, ties
    estimator: Estimator | None = None

    def count(self, request_id: str, *, anchors: int = 0, accepted: int = 0, ties: int = 0) -> None:
        """Add what was counted in a request."""
        sums = self.by_request.setdefault(request_id, [0, 0, 0])
        for column, number in enumerate((anchors, accepted, ties)):
            sums[column] += number

    def take(self, played: "Played") -> None:
        """Add what was gathered of other requests of the same variant."""
        self.seconds += played.seconds
        self.by_request |= played.by_request
        if self.estimator is not None:
            self.estimator.found |= played.estimates


@dataclass(frozen=True, slots=True)
class Played:
    """One variant on some requests: its sums as in ``Tally``, its rounds, and the notes of its head.

    ``table`` is as in ``Rounds``; what its column ``variant`` says does not count.
    """

    seconds: float
    by_request: dict[str, list[int]]
    estimates: dict[str, Estimate]
    table: "pl.DataFrame"
    notes: tuple[str, ...]


def variant_info(name: str, variant: ResolvedVariant, tally: Tally, trace: Trace) -> VariantInfo:
    """A resolved variant with what was gathered under it."""
    none = [0, 0, 0]
    sums = [tally.by_request.get(record.request_id, none) for record in trace.records]
    anchors, accepted, ties = (sum(row[column] for row in sums) for column in range(3))
    return VariantInfo(
        name=name,
        draft=variant.draft,
        wiring=variant.wiring.taps,
        steps=variant.steps,
        topk=variant.topk,
        num_draft_tokens=variant.num_draft_tokens,
        precision=str(variant.precision),
        numerics=variant.numerics.name,
        kv=variant.kv,
        verify=str(variant.verify),
        temperature=trace.header.capture.temperature,
        engine=variant.engine.name,
        faults=tuple(map(str, variant.faults)),
        seconds=round(tally.seconds, 3),
        anchors=anchors,
        anchors_accepted=accepted,
        ties=ties,
        expected=None if tally.estimator is None else tally.estimator.expected(),
        by_request=tuple((row[0], row[1], row[2]) for row in sums),
    )


def request_info(row: Mapping[str, Any], loop: tuple[int, int] = (0, 0), tokens: str | None = None) -> RequestInfo:
    """A row of the trace's request table as a rounds file keeps it.

    ``loop`` as ``find_loop`` gives it, ``tokens`` as ``tokens_sha256`` does.
    """
    histogram = row["server_histogram"]
    return RequestInfo(
        request_id=row["request_id"],
        category=row["category"],
        prompt_tokens=row["prompt_tokens"],
        output_tokens=row["output_tokens"],
        observed_rounds=row["server_verify_rounds"],
        observed_histogram=None if histogram is None else tuple(histogram),
        source=row["source"],
        temperature=row["temperature"],
        loop_tokens=loop[0],
        loop_period=loop[1],
        tokens_sha256=tokens,
    )


def describe_trace(trace: Trace) -> dict[str, Any]:
    """What a report and ``simulate --json`` say of the trace."""
    header = trace.header
    return {
        "path": str(trace.path.absolute()),  # rounds are looked at from other folders too
        "target": header.target.name,
        "model_type": header.target.model_type,
        **{fact: getattr(header.target, fact) for fact in ONE_TARGET},
        "engine": header.engine.name,
        "engine_version": header.engine.version,
        "taps": list(trace.taps),
        "missing": list(header.missing),
        "doubts": [*_unfinished(trace), *trace.doubts],
        "requests": len(trace.requests),
        **({"part": trace.part} if trace.part else {}),
    }


def _unfinished(trace: Trace) -> Iterator[str]:
    if trace.header.state != "complete":
        yield (
            "The recording of the trace has not ended: what is whole is replayed, "
            f"{counted(len(trace.requests), 'request')}, and what comes later may differ."
        )


def describe_wirings(
    variants: Sequence[ResolvedVariant], checkpoints: Mapping[str, Checkpoint], trace: Trace
) -> dict[str, list[dict[str, Any]]]:
    """For each wiring, the layer ids to write so that each engine feeds it to the heads that read it."""
    target = trace.header.target
    kinds: dict[Wiring, set[bool]] = {}
    for variant in variants:
        config = checkpoints[variant.draft].config  # ids in speculators' dialect are R indices whatever the family
        kinds.setdefault(variant.wiring, set()).add(config.block is not None and not config.vllms)
    said = {}
    for wiring, blocks in kinds.items():
        read = engine_ids(wiring, architecture=target.architecture, layers=target.layers) if False in blocks else ()
        said[str(wiring)] = [
            {"engine": one.engine, "ids": None if one.ids is None else list(one.ids), "note": one.note}
            for one in (*read, *((dflash_ids(wiring),) if True in blocks else ()))
        ]
    return said


def describe_head(
    name: str,
    checkpoint: Checkpoint,
    variants: Sequence[ResolvedVariant],
    said: Iterable[Sequence[str]],
    trace: Trace,
) -> dict[str, Any]:
    """What a report says of a head, and the notes of all its variants: ``said`` has those of each of ``variants``."""
    config = checkpoint.config
    return {
        "family": FAMILY_NAMES[config.family],
        "path": checkpoint.path,
        "step": step_of(checkpoint.path),
        "taps": config.num_taps,
        "layers": config.num_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "vocab_size": config.vocab_size,
        "layer_ids": None if config.layer_ids is None else list(config.layer_ids),
        "stated_wiring": _stated(name, checkpoint, variants, trace),
        "dtype": config.dtype,
        "notes": join_notes(checkpoint, (told for one, told in zip(variants, said, strict=True) if one.draft == name)),
    }


def join_notes(checkpoint: Checkpoint, said: Iterable[Iterable[str]]) -> list[str]:
    """The notes of a head, and those of all its replays in sorted order: the same whoever replayed which part."""
    own = dict.fromkeys(checkpoint.notes)
    return [*own, *sorted({note for told in said for note in told}.difference(own))]


def _stated(name: str, checkpoint: Checkpoint, variants: Sequence[ResolvedVariant], trace: Trace) -> list[str] | None:
    """The taps that the engine of the head's variants feeds for what it states; None where it states no layer ids, or
    ids that feed nothing."""
    engine = next((variant.engine for variant in variants if variant.draft == name), None)
    if engine is None or (checkpoint.config.layer_ids is None and checkpoint.config.use_aux_hidden_state):
        return None
    try:
        return list(stated_wiring(checkpoint, engine, trace).taps)
    except WiringError:
        return None
