"""What may be wrong with a server: the fault table with the values that are likely, each as a variant to replay.

Priors follow how often a kind is the primary cause in public threads (counted over about 300 of them); a kind's share
is split evenly over its values, so that trying many values makes none of them likelier.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import log

from replay.checkpoint.checkpoint import Checkpoint
from replay.engines.wiring import Wiring
from replay.errors import ReplayError
from replay.faults.change import Subject
from replay.faults.table import FAULTS, Fault
from replay.simulator.binding import bind
from replay.simulator.variant import ResolvedVariant
from replay.traces.reader import Trace
from replay.traces.rounds import HEALTHY_NAME
from replay.traces.taps import EMBED, sort_taps, tap_name

_P_HEALTHY = 0.5
_P_PAIR = 0.05  # two independent faults at once, relative to the likelier of them alone

# Public threads whose primary cause is of this kind.
REPORTS: Mapping[str, int] = {
    "wiring.aux-layer-id": 13,
    "weights.missing": 9,
    "vocab.d2t": 8,
    "wiring.aux-missing": 5,
    "wiring.norm": 7,
    "wiring.recycle-norm": 7,
    "kv.prefix-reuse": 8,
    "position.max-len": 6,
    "attn.window": 5,
    "shift.alignment": 4,
    "kv.slot-write": 5,
    "kv.rollback": 6,
    "position.offset": 5,
    "precision.draft-weights": 6,
    "precision.draft-kv": 3,
    "precision.dtype-cast": 2,
    "position.rope-geometry": 4,
    "position.rope-params": 5,
    "state.hidden-row": 3,
    "weights.layout": 4,
    "wiring.multi-layer": 3,
    "kv.handoff": 4,
    "wiring.aux-capture-stage": 2,
    "tree.parent-kv": 2,
    "wiring.concat-order": 2,
    "kv.chunk-boundary": 4,
    "kv.skip-draft": 2,
    "weights.overwritten": 1,
}


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One explanation: the variant that a server would then have run.

    ``kind`` and ``value`` as in the fault table (``healthy`` and empty for none; pairs are joined by ``+``).
    """

    kind: str
    value: str
    variant: ResolvedVariant
    log_prior: float

    @property
    def name(self) -> str:
        """``healthy``, ``kind=value`` or two of these joined by ``+``."""
        if self.kind == HEALTHY_NAME:
            return HEALTHY_NAME
        return self.value if "+" in self.kind else f"{self.kind}={self.value}"


def singles(served: ResolvedVariant, checkpoint: Checkpoint, trace: Trace) -> list[Hypothesis]:
    """The healthy server, then every single fault that head and trace can show. ``served`` is resolved."""
    weight = sum(REPORTS.get(kind, 1) for kind in FAULTS)
    found = [Hypothesis(HEALTHY_NAME, "", served, log(_P_HEALTHY))]
    for kind in FAULTS:
        fitting = list(_fitting(kind, served, checkpoint, trace))
        for value, variant in fitting:
            share = (1 - _P_HEALTHY) * REPORTS.get(kind, 1) / weight / len(fitting)
            found.append(Hypothesis(kind, value, variant, log(share)))
    return found


def pairs(likely: Sequence[Hypothesis], checkpoint: Checkpoint, trace: Trace) -> list[Hypothesis]:
    """Every two of these single faults, of different kinds, that can be played together."""
    found = []
    for first, second in combinations(likely, 2):
        if first.kind == second.kind or HEALTHY_NAME in (first.kind, second.kind):
            continue
        variant = replace(first.variant, faults=(*first.variant.faults, *second.variant.faults))
        prior = max(first.log_prior, second.log_prior) + log(_P_PAIR)
        if _plays(variant, checkpoint, trace):
            name = f"{first.name}+{second.name}"
            found.append(Hypothesis(f"{first.kind}+{second.kind}", name, variant, prior))
    return found


def drafts_noise(hypothesis: Hypothesis, checkpoint: Checkpoint) -> bool:
    """Whether nobody can know its drafts, only how many are taken.

    A matrix that was never loaded holds whatever was in memory, and the weight of a norm inside the target, behind
    which its rows may have been taken, is in no trace.
    """
    if hypothesis.name == "wiring.aux-capture-stage=normed":
        return True
    tensor = checkpoint.tensors.get(f"{hypothesis.value}.weight")
    return hypothesis.kind == "weights.missing" and tensor is not None and tensor.ndim > 1


def other_wirings(served: ResolvedVariant, checkpoint: Checkpoint, trace: Trace) -> list[Hypothesis]:
    """Other taps for the head, as layer-id hypotheses.

    Likeliest what the head's config states under any convention, then taps that were all pushed along by one more at
    the front or the back (embed,3,31 served as 3,31,59), then each slot from each recorded tap.
    """
    fed, taps, config = served.wiring.taps, trace.taps, checkpoint.config
    stated = [tuple(map(tap_name, _shifted(config.layer_ids, by))) for by in (1, 0)] if config.layer_ids else []
    pushed = [(tap, *fed[:-1]) for tap in taps] + [(*fed[1:], tap) for tap in taps]
    pushed.sort(key=lambda names: EMBED not in names)
    slots = [(*fed[:slot], tap, *fed[slot + 1 :]) for slot in range(len(fed)) for tap in taps]
    rows = [sort_taps(names) for names in [*pushed, *slots] if len(set(names)) == len(names)]
    found: dict[Wiring, Hypothesis] = {}
    for place, names in enumerate([*stated, *pushed, *slots, *rows]):
        wiring = Wiring(names)
        variant = replace(served, wiring=wiring)
        if wiring == served.wiring or wiring in found or not _plays(variant, checkpoint, trace):
            continue
        # Shares that fall with the place: the first ones hold most of what the kind has.
        share = (1 - _P_HEALTHY) * REPORTS["wiring.aux-layer-id"] / sum(REPORTS.values()) / (place + 2) ** 2
        found[wiring] = Hypothesis("wiring.aux-layer-id", str(wiring), variant, log(share))
    return list(found.values())


def _shifted(ids: Sequence[int], by: int) -> list[int]:
    return [max(0, index + by) for index in ids]


def _fitting(
    kind: str, served: ResolvedVariant, checkpoint: Checkpoint, trace: Trace
) -> Iterator[tuple[str, ResolvedVariant]]:
    healthy = _signature(bind(served, checkpoint, trace), served)
    for value in dict.fromkeys(_values(kind, served, checkpoint, trace)):
        variant = replace(served, faults=(*served.faults, Fault(kind, value)))
        if not _plays(variant, checkpoint, trace):
            continue
        if _signature(bind(variant, checkpoint, trace), served) != healthy:
            yield value, variant


def _signature(subject: Subject, served: ResolvedVariant) -> tuple[object, ...]:
    """What tells subjects of one head apart."""
    own = subject.own_embedding
    if own == served.engine.own_embedding:
        own = None
    tensors = id(subject.checkpoint.tensors)
    return subject.wiring, subject.behaviour, subject.config, own, subject.tree_kv, subject.precision, tensors


def _plays(variant: ResolvedVariant, checkpoint: Checkpoint, trace: Trace) -> bool:
    """Whether head and trace can show the variant at all: the refusals of ``bind`` are what they cannot."""
    try:
        bind(variant, checkpoint, trace)
    except ReplayError:
        return False
    return True


def _chunk_sizes(trace: Trace) -> tuple[int, ...]:
    """The server's own ``--chunked-prefill-size`` where the trace has it (-1: prompts are whole), else the usual ones.

    Prompts that share a prefill share its chunk, so that under load a prompt's own chunks end elsewhere.
    """
    stated = trace.header.engine.details.get("chunked_prefill_size", "")
    if not stated.lstrip("-").isdigit():
        return (16, 64, 256, 2048, 8192)
    return (int(stated),) if int(stated) > 0 else ()


def _stated_windows(trace: Trace) -> tuple[int, ...]:
    """The rows that the server's ``--speculative-draft-window-size`` lets a row see, itself included (attn.window)."""
    stated = trace.header.engine.details.get("speculative_draft_window_size", "")
    return (int(stated) + 1,) if stated.isdigit() else ()


def _values(kind: str, served: ResolvedVariant, checkpoint: Checkpoint, trace: Trace) -> Iterator[str]:
    """Values of one kind that are worth a replay."""
    config = checkpoint.config
    slots = range(len(served.wiring.taps))
    longest = max((record.tokens for record in trace.records), default=0)
    prompts = sorted(record.prompt_tokens for record in trace.records) or [0]
    match kind:
        case "wiring.aux-layer-id":
            yield from ("1", "-1", "default")
            yield from (f"{slot}:{shift}" for slot in slots for shift in (1, -1))
        case "wiring.aux-missing":
            yield from (*map(str, slots), "all")
        case "wiring.norm":
            yield "residual"
            for norm in ("input_norm", "fc_norm", "hidden_norm", "input_layernorm", "post_attention_layernorm", "norm"):
                yield f"skip:{norm}"
        case "position.offset":
            # Where the step is not added, SGLang's rows all stand where its first one does, vLLM's at the anchor row.
            yield from ("1", "-1", "2", "stuck:1", "stuck")
        case "position.rope-params":
            yield from (f"theta:{theta}" for theta in (10000, 500000, 1000000) if theta != config.rope.theta)
            if config.rope.type != "default":
                yield "scaling:none"
        case "position.rope-geometry":
            yield from ("interleaved", "partial:0.5", "partial:0.25")
        case "position.max-len":
            limits = sorted({limit for limit in (config.max_position_embeddings, 2048) if limit < longest})
            yield from (f"{limit}{beyond}" for limit in limits for beyond in ("", ":dummy"))
        case "attn.window":
            windows = (*_stated_windows(trace), 16, 32, 64, 128, 512, 2048)
            yield from (str(window) for window in windows if window < longest)
        case "vocab.d2t":
            yield from ("absolute", "identity", "offset:1", "offset:-1")
        case "weights.missing":
            norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
            yield from ("lm_head", "fc", "norm", *(f"layers.0.{norm}" for norm in norms), "layers.0.self_attn.o_proj")
        case "kv.prefix-reuse":
            sizes = [size for size in (4, 16, 64, 256, prompts[len(prompts) // 2] // 2) if 0 < size < prompts[-1]]
            yield from (f"{size}{fill}" for size in sizes for fill in ("", ":masked"))
        case "kv.chunk-boundary":
            yield from (str(size) for size in _chunk_sizes(trace) if size < prompts[-1])
        case "kv.skip-draft":
            return  # a span that nobody knows of cannot be guessed
        case "precision.draft-weights":
            yield from ("fp8", "int8", "w8a8", "w4a16:g128", "w4a16:g128:sym7", "nvfp4")
        case "precision.draft-kv":
            yield from ("fp8_e4m3", "fp8_e5m2")
        case "precision.dtype-cast":
            yield from ("fp16", "bf16")
        case "wiring.recycle-norm":
            yield "other"
        case "tree.parent-kv":
            yield from (layout for layout in ("slot", "path") if served.topk > 1 and layout != served.kv)
        case _:
            yield from FAULTS[kind].values.split("|")
