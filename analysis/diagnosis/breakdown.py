"""What holds a head back, where a server parts from its replay, and which further observation would tell more."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from replay.analysis.counts import histograms, per_request, position_rates
from replay.analysis.diagnosis.evidence import DRAFTED, LENGTH, RoundDraft, RoundKey
from replay.analysis.diagnosis.verdict import Diagnosis, Stratum
from replay.traces.rounds import RequestInfo, Rounds

# Differences below these are not worth a sentence.
_CATEGORY, _LATE, _DEPTH = 0.15, 0.10, 0.25
_MIN_ROUNDS = 30


def separate(diagnosis: Diagnosis, steps: int) -> Iterator[str]:
    """Which further observation would tell apart what was not told apart, on a server of so many ``steps``."""
    if not diagnosis.undecided:
        return
    kind = diagnosis.healthy.evidence.kind
    if diagnosis.gains and diagnosis.verdict == "fault":
        yield "say with --wiring what the head was trained on, if its config or its trainer tells"
        yield "more requests: what the head accepts under these variants lies within noise"
        return
    if kind == LENGTH:
        yield "an accept length alone tells few faults apart: capture from the server itself, which counts rounds"
    if kind != DRAFTED:
        yield "start the server with `replay serve`, which records what it drafts round by round"
        return
    names = " ".join((*diagnosis.undecided, diagnosis.named or ""))
    if "weights.missing" in names:
        yield "the server's log from its start: which of the draft's tensors it did not load"
    if "position." in names or "attn." in names or "kv." in names:
        yield "longer prompts and outputs: positions, windows and draft KV show more the longer the context"
    if steps < 3:
        yield "more steps: what is fed back between steps shows from the second token on"
    yield "more requests: at these anchors the replays draft the same tokens"


def limits(rounds: Rounds, variant: str, *, unknown_share: float) -> Iterator[str]:
    """Sentences on what the head lacks. ``unknown_share`` of the target's tokens lie outside the draft vocabulary."""
    _, conditional = position_rates(histograms(rounds)[variant])
    counts = per_request(rounds)[variant]
    total = counts.sum(axis=0)
    mean = 1 + total[1] / total[0] if total[0] else 0.0
    yield f"data or training: {conditional[0]:.0%} of its first tokens are taken, of good public heads 65 to 75 %"
    if unknown_share > 0.02:
        yield f"vocabulary: {unknown_share:.1%} of the target's tokens are none that it can draft"
    if len(conditional) > 2 and conditional[2] < (1 - _DEPTH) * conditional[0]:
        yield (
            f"depth: of the rounds that got there, {conditional[0]:.0%} take the first token and {conditional[2]:.0%} "
            "the third; train more steps, or serve fewer"
        )
    for category, length, count in _by_category(rounds, variant):
        if count >= _MIN_ROUNDS and length < (1 - _CATEGORY) * mean:
            yield f"category {category}: accept length {length:.2f} over {count} rounds, {mean:.2f} overall"
    early, late = _halves(rounds, variant)
    if early and late and late < (1 - _LATE) * early:
        yield f"context length: accept length {early:.2f} in the first half of the positions, {late:.2f} in the second"


def _by_category(rounds: Rounds, variant: str) -> Iterator[tuple[str, float, int]]:
    counts = per_request(rounds)[variant]
    rows: dict[str, list[int]] = {}
    for place, request in enumerate(rounds.requests):
        if request.category:
            rows.setdefault(request.category, []).append(place)
    for category, places in rows.items():
        played, accepted = counts[places][:, :2].sum(axis=0)
        if played:
            yield category, 1 + accepted / played, int(played)


def _halves(rounds: Rounds, variant: str) -> tuple[float, float]:
    """Accept length of anchors below and above the middle of all anchors; 0 where there are too few rounds."""
    import polars as pl

    table = rounds.table.filter(pl.col("variant") == variant)
    if len(table) < 2 * _MIN_ROUNDS:
        return 0.0, 0.0
    middle = table["anchor"].median()
    parts = (table.filter(pl.col("anchor") <= middle), table.filter(pl.col("anchor") > middle))
    early, late = (1 + float(part["accepted"].sum()) / max(1, len(part)) for part in parts)
    return early, late


def strata(
    replayed: Mapping[RoundKey, RoundDraft],
    served: Mapping[RoundKey, RoundDraft],
    requests: Sequence[RequestInfo],
    cached: Mapping[str, int],
) -> list[Stratum]:
    """Agreement of drafted tokens by category, by cached prompt tokens and by place in the output.

    ``cached`` prompt tokens of each request that the server did not prefill, where it said so.
    """
    known = {request.request_id: request for request in requests}
    keys = [key for key in served if key in replayed and key[0] in known]
    views: dict[str, Callable[[RoundKey], str]] = {
        "category": lambda key: known[key[0]].category or "none",
        "cached prompt tokens": lambda key: "some" if cached.get(key[0], 0) else "none",
        "output position": lambda key: _bucket(key[1] - known[key[0]].prompt_tokens),
        "prompt length": lambda key: _bucket(known[key[0]].prompt_tokens),
    }
    found = []
    for by, view in views.items():
        grouped: dict[str, list[bool]] = {}
        for key in keys:
            grouped.setdefault(view(key), []).append(replayed[key].drafted == served[key].drafted)
        if len(grouped) > 1:
            found += [Stratum(by, value, len(same), sum(same)) for value, same in sorted(grouped.items())]
    return found


def _bucket(tokens: int) -> str:
    """A range of lengths, by powers of four: ``0-63``, ``64-255``, ..."""
    low, high = 0, 64
    while tokens >= high:
        low, high = high, high * 4
    return f"{low}-{high - 1}"
