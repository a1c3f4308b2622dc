"""`replay diagnose`: every hypothesis replayed and held against what a server did.

Of the top layer: it joins the simulator, what was observed, and the statistics.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replay.analysis.counts import Counts, per_request
from replay.analysis.diagnosis import evidence as ev
from replay.analysis.diagnosis.breakdown import limits, strata
from replay.analysis.diagnosis.evidence import DRAFTED, HISTOGRAM, LENGTH, by_anchor
from replay.analysis.diagnosis.feed import Fed, borne_out, contradiction
from replay.analysis.diagnosis.verdict import Diagnosis, Gain, Scored, Stratum, judge
from replay.analysis.ladder.ladder import Ladder
from replay.analysis.summary import VariantSummary, summarise
from replay.checkpoint.checkpoint import Checkpoint
from replay.diagnosis.feed import read_feeding
from replay.diagnosis.hypotheses import Hypothesis, drafts_noise, other_wirings, pairs, singles
from replay.diagnosis.ladder import climb
from replay.engines.wiring import Wiring, parse_wiring
from replay.errors import TraceError, UsageError
from replay.faults.remedies import remedy
from replay.simulator.binding import bind, resolve
from replay.simulator.simulation import ReplayProgress, simulate
from replay.simulator.variant import ResolvedVariant, Variant
from replay.traces.reader import Trace
from replay.traces.rounds import HEALTHY_NAME

if TYPE_CHECKING:
    import polars as pl

    from replay.capture.observed import Observed
    from replay.traces.rounds import Rounds

# Served rounds on which every hypothesis is tried, and the best of them.
SCREENING_ROUNDS = 400
FINAL_ROUNDS = 2000
SCREENING_TOKENS = 2500  # output tokens, where no rounds were recorded
FINALISTS = 6
# Of these single faults every two are tried as a pair.
_PAIRED = 5
# Kinds that change the head's tensors: each needs weights of its own, so they run one after the other.
_OWN_TENSORS = ("weights.", "vocab.", "precision.")
# Kinds that change what the draft is fed.
_FEEDING = ("wiring.", "shift.")
# Relative half width of the replay's interval beyond which an observed accept length says nothing.
_WIDEST = 0.2


@dataclass(frozen=True, slots=True)
class Trying:
    """``done`` of ``total`` hypotheses of this stage replayed."""

    stage: str
    done: int
    total: int


Tell = Callable[[Trying], None]


def served_variant(trace: Trace, draft: str, **given: object) -> Variant:
    """The variant that the recorded server ran, from the trace's header; what is ``given`` (not None) goes before it.

    Raises UsageError for values that cannot be.
    """
    details = trace.header.engine.details
    told: dict[str, object] = {}
    for name, key in (
        ("steps", "speculative_num_steps"),
        ("topk", "speculative_eagle_topk"),
        ("num_draft_tokens", "speculative_num_draft_tokens"),
    ):
        if str(details.get(key, "")).isdigit():
            told[name] = int(details[key])
    stored = details.get("speculative_draft_kv_cache_dtype") or details.get("kv_cache_dtype")
    if stored in ("fp8_e4m3", "fp8_e5m2"):
        told["precision"] = f"kv={stored}"
    if details.get("wiring"):
        told["wiring"] = parse_wiring(details["wiring"], layers=trace.header.target.layers)
    told |= {name: value for name, value in given.items() if value is not None}
    if told.get("topk", 1) == 1:
        told.pop("num_draft_tokens", None)
    return Variant(draft=draft, **told)  # type: ignore[arg-type]


def diagnose(
    trace: Trace,
    checkpoint: Checkpoint,
    served: Variant,
    *,
    trained: Wiring | None = None,
    observed: "Observed | None" = None,
    ladder: bool = True,
    on_event: Tell = lambda _: None,
) -> Diagnosis:
    """Why a server that ran ``served`` accepted what it did.

    ``trained`` is the wiring the head was made for, where known; ``observed`` an accept length from elsewhere, else
    the trace's own server is explained. With ``ladder`` the way from the training metric down to what was observed
    follows (ladder.py). Raises TraceError where nothing was observed, UsageError where the two differ
    in steps, and whatever ``simulate`` raises.
    """
    case = _Case(trace, checkpoint, resolve(served, checkpoint, trace), trained, observed, on_event)
    found = case.close()
    return replace(found, ladder=case.climb(found)) if ladder else found


@dataclass(frozen=True, slots=True)
class _Tried:
    """A hypothesis, its evidence, and of finalists what it accepts: by anchor, or in sums by request."""

    hypothesis: Hypothesis
    scored: Scored
    by_anchor: dict[ev.RoundKey, ev.RoundDraft]
    counts: Counts


class _Case:
    """One diagnosis: what was observed, and the replays so far."""

    def __init__(
        self,
        trace: Trace,
        checkpoint: Checkpoint,
        served: ResolvedVariant,
        trained: Wiring | None,
        observed: "Observed | None",
        tell: Tell,
    ) -> None:
        self._trace, self._checkpoint, self._served, self._tell = trace, checkpoint, served, tell
        self._trained = None if trained == served.wiring else trained
        self._observed = observed
        self._variants: dict[str, ResolvedVariant] = {}
        self._histograms: dict[str, tuple[int, ...]] = {}
        self._rounds: pl.DataFrame | None = None
        self._feeding = read_feeding(trace)
        self._kind = self._find_observed()
        self._screen = self._first_rounds(SCREENING_ROUNDS)
        self._rounds = self._first_rounds(FINAL_ROUNDS)
        self._some = self._first_requests(SCREENING_TOKENS)

    def close(self) -> Diagnosis:
        """Try every hypothesis, the best ones again on everything, and judge."""
        tried = self._try("single faults", singles(self._served, self._checkpoint, self._trace))
        best = max(tried, key=_posterior)
        if best.hypothesis.kind != HEALTHY_NAME or not best.scored.fits:
            # Noise explains every round a little, and leaves no room for a second cause.
            told = [one for one in tried if not drafts_noise(one.hypothesis, self._checkpoint)]
            likely = [one.hypothesis for one in sorted(told, key=_posterior, reverse=True)[:_PAIRED]]
            tried += self._try("pairs of faults", pairs(likely, self._checkpoint, self._trace))
        if self._trained is None:
            wirings = other_wirings(self._served, self._checkpoint, self._trace)
        else:
            variant = replace(self._served, wiring=self._trained)
            wirings = [Hypothesis("wiring.aux-layer-id", str(self._trained), variant, tried[0].scored.log_prior)]
        named = wirings if self._trained is not None else []
        tried += self._try("other wirings", [*wirings, *self._as_fed([*wirings, *(one.hypothesis for one in tried)])])
        chosen = {item.name: item for item in [*_finalists(tried), *named]}
        final = self._try("the likeliest on more rounds", list(chosen.values()), whole=True)
        return self._verdict(tried, final)

    def climb(self, found: Diagnosis) -> Ladder:
        """From the training metric to what was observed, with the fault that was found among the rungs."""
        served, right = self._served, self._trained or self._served.wiring
        named = next((gain for gain in found.gains if gain.label == found.named), None)
        if named is not None:
            right = parse_wiring(named.value) if named.kind == "wiring.aux-layer-id" else right
        elif found.named is not None:
            served = self._variants[found.named]

        def tell(progress: ReplayProgress) -> None:
            self._tell(Trying("the ladder", progress.done, progress.total))

        return climb(
            self._trace,
            self._checkpoint,
            served,
            right,
            trained_steps=None,
            observed=self._counted(),
            served_products=False,
            on_event=tell,
        )

    def _counted(self) -> "float | dict[str, list[int]]":
        """What was observed as the ladder takes it: an accept length, or accepted tokens counted by request."""
        if self._observed is not None:
            return self._observed.accept_length
        if self._kind == DRAFTED:
            return _histograms(self._trace.served_rounds(), self._served.steps)
        return {name: list(counts) for name, counts in self._histograms.items()}

    # ---- what was observed ----

    def _find_observed(self) -> str:
        if self._observed is not None:
            most, seen = self._served.steps + 1, self._observed.accept_length
            if seen > most:
                raise UsageError(
                    f"an accept length of {seen:g} was observed, {self._served.steps} steps give at most {most}; "
                    "type the server's --steps"
                )
            steps = self._observed.num_steps
            if steps is not None and steps != self._served.steps:
                raise UsageError(
                    f"{self._observed.source} says {steps} steps, {self._served.steps} are replayed; "
                    f"type --steps {steps}"
                )
            return LENGTH
        rounds = self._trace.served_rounds()
        if len(rounds):
            self._rounds = rounds
            return DRAFTED
        records = self._trace.records
        self._histograms = {item.request_id: item.server_histogram for item in records if item.server_histogram}
        if not self._histograms:
            raise TraceError(
                f"{self._trace.path} says nothing of what a server accepted; give --observed with an accept length or "
                "a file that has one, or capture from a server that `replay serve` started"
            )
        return HISTOGRAM

    def _first_rounds(self, most: int) -> "pl.DataFrame | None":
        """Whole requests of the served rounds, in trace order, up to about ``most`` rounds."""
        if self._rounds is None:
            return None
        counts = dict(self._rounds.group_by("request_id").len().iter_rows())
        kept: list[str] = []
        for record in self._trace.records:
            if sum(counts[name] for name in kept) >= most:
                break
            if record.request_id in counts:
                kept.append(record.request_id)
        return self._rounds.filter(self._rounds["request_id"].is_in(kept))

    def _first_requests(self, most: int) -> set[str]:
        """Requests in trace order up to about ``most`` output tokens, and at least two."""
        kept: set[str] = set()
        total = 0
        for record in self._trace.records:
            if total >= most and len(kept) > 1:
                break
            kept.add(record.request_id)
            total += record.output_tokens
        return kept

    # ---- replays ----

    def _try(self, stage: str, hypotheses: Sequence[Hypothesis], *, whole: bool = False) -> list[_Tried]:
        """Every hypothesis with its evidence, in the given order; by anchor only for the whole."""
        found: dict[str, _Tried] = {}
        rounds = self._rounds if whole else self._screen
        for batch in _batches(hypotheses):
            variants = [item.variant for item in batch]
            replayed = simulate(
                self._trace,
                {self._served.draft: self._checkpoint},
                variants,
                follow=rounds,
                only=None if whole or self._kind == DRAFTED else self._some,
                served_products=whole,
            )
            counts = per_request(replayed)
            for item, info in zip(batch, replayed.variants, strict=True):
                self._variants[item.name] = item.variant
                table = replayed.table.filter(replayed.table["variant"] == info.name)
                contradicted, shown = self._held_against_feed(item)
                scored = Scored(
                    item.name, item.kind, item.value, item.log_prior,
                    self._evidence(table, counts[info.name], rounds, noise=drafts_noise(item, self._checkpoint)),
                    contradicted=contradicted, borne_out=shown,
                )  # fmt: skip
                kept = by_anchor(table) if whole and self._kind == DRAFTED else {}
                found[item.name] = _Tried(item, scored, kept, counts[info.name])
            self._tell(Trying(stage, len(found), len(hypotheses)))
        return [found[item.name] for item in hypotheses]

    def _evidence(
        self, table: "pl.DataFrame", counts: Counts, rounds: "pl.DataFrame | None", *, noise: bool
    ) -> ev.Evidence:
        steps = self._served.steps
        if self._observed is not None:
            return ev.length_evidence(counts, self._observed.accept_length, self._observed.rounds)
        if rounds is not None and noise:
            return ev.accepted_evidence(by_anchor(table), by_anchor(rounds), steps)
        if rounds is not None:
            return ev.drafted_evidence(by_anchor(table), by_anchor(rounds), steps)
        return ev.histogram_evidence(_histograms(table, steps), self._histograms, steps)

    # ---- what the draft was fed ----

    def _held_against_feed(self, hypothesis: Hypothesis) -> tuple[str, bool]:
        """How the bits that were fed contradict a hypothesis, and whether they show it. Nothing of what was observed
        elsewhere, on a server that may have fed its draft otherwise."""
        if self._feeding is None or self._observed is not None:
            return "", False
        fed = self._feeds(hypothesis.variant)
        return contradiction(self._feeding, fed), borne_out(self._feeding, fed)

    def _feeds(self, variant: ResolvedVariant) -> Fed:
        """What its draft is fed; faults of weights and runs aside, which are costly to apply and change none of it."""
        faults = tuple(fault for fault in variant.faults if fault.kind.startswith(_FEEDING))
        subject = bind(replace(variant, faults=faults), self._checkpoint, self._trace)
        behaviour = subject.behaviour
        return Fed(
            subject.wiring.taps,
            shift=-(behaviour.pairing == "earlier-features"),
            zeros=behaviour.zero_slots,
            unrecorded=behaviour.unit_taps,
            own_token=behaviour.pairing == "own-token",
        )

    def _as_fed(self, others: Sequence[Hypothesis]) -> list[Hypothesis]:
        """The wiring that was really fed, where nothing else that is tried stands for it."""
        taps = self._feeding.wiring if self._feeding is not None and self._observed is None else None
        if taps is None or len(taps) != len(self._served.wiring.taps):
            return []
        if any(self._feeds(one.variant) == Fed(taps) for one in others):
            return []
        variant = replace(self._served, wiring=Wiring(taps))
        alike = [one.log_prior for one in others if one.kind == "wiring.aux-layer-id"]
        prior = max(alike, default=others[-1].log_prior)
        return [Hypothesis("wiring.aux-layer-id", ",".join(taps), variant, prior)]

    # ---- the verdict ----

    def _verdict(self, tried: Sequence[_Tried], final: Sequence[_Tried]) -> Diagnosis:
        screened = next(one for one in tried if one.hypothesis.kind == HEALTHY_NAME)
        healthy = next(one for one in final if one.hypothesis.kind == HEALTHY_NAME)
        whole = {one.hypothesis.name: one.scored for one in final}
        scored = [
            whole.get(one.hypothesis.name) or _drawn_out(one.scored, screened.scored, healthy.scored) for one in tried
        ]
        gains = self._gains(final, healthy)
        best = sorted(final, key=_posterior, reverse=True)[:3]
        wanted = {
            HEALTHY_NAME,
            *(one.hypothesis.name for one in best),
            *(gain.name for gain in gains[:1] + [gain for gain in gains if gain.tied][:4]),
        }
        walks = self._own_walks([one.hypothesis for one in final if one.hypothesis.name in wanted])
        summary, rounds = walks[HEALTHY_NAME]
        if self._kind == LENGTH:
            self._check_width(summary)
        lengths = {name: walk.accept_length for name, (walk, _) in walks.items()}
        rates = summary.position_conditional
        diagnosis = judge(
            scored,
            gains=gains,
            first_rate=rates[0] if rates else float("nan"),
            stated=self._trained is not None,
        )
        fixes = self._fixes({gain.value for gain in gains})
        ranked = tuple(
            replace(item, accept_length=lengths.get(item.name, item.accept_length), fix=fixes(item.kind, item.value))
            for item in diagnosis.ranked
        )
        better = tuple(
            replace(gain, accept_length=lengths.get(gain.name, gain.accept_length), fix=fixes(gain.kind, gain.value))
            for gain in diagnosis.gains
        )
        named = next((item for item in ranked if item.name == diagnosis.named), None)
        as_other = next((gain for gain in better if gain.label == diagnosis.named), None)
        return replace(
            diagnosis,
            ranked=ranked,
            gains=better,
            expected=lengths[HEALTHY_NAME] if as_other is None else as_other.accept_length,
            fix=as_other.fix if as_other else named.fix if named else "",
            separate=tuple(self._separate(diagnosis)),
            limits=tuple(limits(rounds, summary.name, unknown_share=_unknown_share(self._trace, self._checkpoint)))
            if diagnosis.verdict == "head"
            else (),
            strata=tuple(self._strata(healthy, rounds)) if diagnosis.verdict == "engine" else (),
            feeding=self._feeding,
        )

    def _check_width(self, summary: VariantSummary) -> None:
        """Refuse to hold one number against a replay that leaves its own open. Raises TraceError."""
        low, high = summary.accept_length_ci95
        if not high - low <= 2 * _WIDEST * summary.accept_length:
            raise TraceError(
                f"{summary.rounds} rounds of {summary.played_requests} requests leave the replay's accept length open "
                f"between {low:.2f} and {high:.2f}, too wide to hold an observed one against; capture more prompts"
            )

    def _gains(self, final: Sequence[_Tried], healthy: _Tried) -> list[Gain]:
        """Finalists that accept more than what was served, at the same anchors where these are known, best first."""
        found: dict[str, tuple[Gain, _Tried]] = {}
        for one in final:
            item = one.hypothesis
            if item.kind == HEALTHY_NAME or (self._trained is not None and item.value != str(self._trained)):
                continue
            gain, low, high = self._over(one, healthy)
            value = self._fed(item) if item.kind == "wiring.aux-layer-id" else item.value
            if gain > 0:
                made = Gain(item.name, item.kind, value, gain, (low, high), log_prior=item.log_prior)
                found.setdefault(made.label, (made, one))  # several names of one wiring are one gain
        ordered = sorted(found.values(), key=lambda pair: -pair[0].gain)
        return [replace(made, tied=self._over(ordered[0][1], one)[1] <= 0) for made, one in ordered]

    def _over(self, one: _Tried, other: _Tried) -> tuple[float, float, float]:
        """How much more the one accepts than the other, with its interval."""
        if self._kind == DRAFTED:
            return ev.accepted_gain(one.by_anchor, other.by_anchor)
        return ev.length_gain(one.counts, other.counts)

    def _fed(self, hypothesis: Hypothesis) -> str:
        """The taps that a layer-id hypothesis feeds, however its value says it."""
        return str(bind(hypothesis.variant, self._checkpoint, self._trace).wiring)

    def _own_walks(self, hypotheses: Sequence[Hypothesis]) -> "dict[str, tuple[VariantSummary, Rounds]]":
        """What each of them would do by itself, over the whole trace."""
        found = {}
        for batch in _batches(hypotheses):
            variants = [item.variant for item in batch]
            rounds = simulate(self._trace, {self._served.draft: self._checkpoint}, variants, served_products=False)
            for item, summary in zip(batch, summarise(rounds), strict=True):
                found[item.name] = (summary, rounds)
        return found

    def _fixes(self, wirings: set[str]) -> Callable[[str, str], str]:
        """The remedy of a hypothesis; for one of ``wirings`` it is that wiring."""
        target = self._trace.header.target
        right = self._trained or self._served.wiring

        def fix(kind: str, value: str) -> str:
            if kind == HEALTHY_NAME:
                return ""
            wiring = parse_wiring(value, layers=target.layers) if value in wirings and "," in value else right
            return remedy(kind, value, wiring, model_type=target.model_type, layers=target.layers)

        return fix

    def _separate(self, diagnosis: Diagnosis) -> Iterator[str]:
        """Which further observation would tell apart what was not told apart."""
        if not diagnosis.undecided:
            return
        if diagnosis.gains and diagnosis.verdict == "fault":
            yield "say with --wiring what the head was trained on, if its config or its trainer tells"
            yield "more requests: what the head accepts under these variants lies within noise"
            return
        if self._kind == LENGTH:
            yield "an accept length alone tells few faults apart: capture from the server itself, which counts rounds"
        if self._kind != DRAFTED:
            yield "start the server with `replay serve`, which records what it drafts round by round"
            return
        kinds = " ".join(diagnosis.undecided) + " " + (diagnosis.named or "")
        if "weights.missing" in kinds:
            yield "the server's log from its start: which of the draft's tensors it did not load"
        if "position." in kinds or "attn." in kinds or "kv." in kinds:
            yield "longer prompts and outputs: positions, windows and draft KV show more the longer the context"
        if self._served.steps < 3:
            yield "more steps: what is fed back between steps shows from the second token on"
        yield "more requests: at these anchors the replays draft the same tokens"

    def _strata(self, healthy: _Tried, rounds: "Rounds") -> Iterator[Stratum]:
        if self._rounds is None:
            return
        cached = {item.request_id: item.server_cached_tokens or 0 for item in self._trace.records}
        yield from strata(healthy.by_anchor, by_anchor(self._rounds), rounds.requests, cached)


def _histograms(table: "pl.DataFrame", steps: int) -> dict[str, list[int]]:
    """Rounds by accepted tokens [steps + 1] of each request."""
    accepted: dict[str, Counter[int]] = {}
    for request, number in table.select("request_id", "accepted").iter_rows():
        accepted.setdefault(request, Counter())[number] += 1
    return {request: [counted[number] for number in range(steps + 1)] for request, counted in accepted.items()}


def _posterior(one: _Tried) -> float:
    return one.scored.log_posterior


def _finalists(tried: Sequence[_Tried]) -> list[Hypothesis]:
    """The healthy server, the likeliest, and those that accept most."""
    ordered = sorted(tried, key=_posterior, reverse=True)[:FINALISTS]
    most = sorted(tried, key=lambda one: one.scored.evidence.accept_length, reverse=True)
    near = [one for one in most if one.scored.evidence.accept_length >= 0.97 * most[0].scored.evidence.accept_length]
    most = [*most[:2], *sorted(near, key=lambda one: one.scored.log_prior, reverse=True)[:3]]
    healthy = [one for one in tried if one.hypothesis.kind == HEALTHY_NAME]
    return list({one.hypothesis.name: one.hypothesis for one in [*healthy, *ordered, *most]}.values())


def _drawn_out(one: Scored, screened: Scored, whole: Scored) -> Scored:
    """A hypothesis that was only screened, its likelihood drawn out to as many rounds as the finalists had.

    The rounds and how many agree stay those that were compared.
    """
    if one.evidence.kind == LENGTH or not screened.evidence.rounds:
        return one
    scale = whole.evidence.rounds / screened.evidence.rounds
    if scale == 1:
        return one
    evidence = replace(
        one.evidence,
        log_likelihood=one.evidence.log_likelihood * scale,
        agrees_R=None,
        nats_R=None,
    )
    return replace(one, evidence=evidence)


def _batches(hypotheses: Sequence[Hypothesis]) -> Iterator[list[Hypothesis]]:
    """Those that share weights at once, the others one by one, so that few copies of the head are in memory."""
    alone = [item for item in hypotheses if any(kind in item.kind for kind in _OWN_TENSORS)]
    shared = [item for item in hypotheses if item not in alone]
    if shared:
        yield shared
    yield from ([item] for item in alone)


def _unknown_share(trace: Trace, checkpoint: Checkpoint) -> float:
    """Share of the output tokens that the head cannot draft."""
    import torch

    d2t_W = checkpoint.tensors.get("d2t")
    if d2t_W is None:
        return 0.0
    known_V = torch.zeros(checkpoint.config.vocab_size, dtype=torch.bool)
    known_V[torch.arange(len(d2t_W)) + d2t_W.long()] = True
    total = unknown = 0
    for index in range(len(trace.records)):
        rows = trace.read(index, ())
        output = rows.tokens[rows.prompt_tokens :]
        total += len(output)
        unknown += int((~known_V[output.clamp_max(len(known_V) - 1)]).sum())
    return unknown / total if total else 0.0
