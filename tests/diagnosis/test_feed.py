"""What was fed, named by comparison with the taps: against a slow twin, and where it cannot be told."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.less_maker import make_less
from support.trace_maker import H, changed, make_header, make_request, make_weights, write_trace

from replay.analysis.diagnosis.feed import Fed, Feeding, Slot, borne_out, contradiction, feeding_json, lines
from replay.diagnosis.feed import read_feeding
from replay.errors import TraceCorruptError
from replay.traces.captured import CapturedRequest
from replay.traces.check import check_trace
from replay.traces.feed import Feed
from replay.traces.header import TapInfo
from replay.traces.reader import Trace

TAPS = ("2", "3", "final")
LOOKUP = make_weights()


def request(name: str, seed: int, **changes: object) -> CapturedRequest:
    made = make_request(name, seed, prompt=7, output=3)
    generator = torch.Generator().manual_seed(100 + seed)
    taps = {"3": torch.randn(9, H, generator=generator).bfloat16(), **made.taps}
    return changed(made, **{"taps": taps, **changes})


def rows_of(one: CapturedRequest, tap: str, shift: int, rows: list[int]) -> torch.Tensor:
    """Rows [F, H] of a tap, ``shift`` away; zeros where there are none, and for the tap ``zeros``."""
    ids = [*one.prompt_ids, *one.output_ids]
    whole = LOOKUP[ids[:-1]] if tap == "embed" else one.taps.get(tap, torch.zeros(9, H).bfloat16())
    padded = torch.cat([torch.zeros(1, H).bfloat16(), whole, torch.zeros(1, H).bfloat16()])
    return padded[[1 + row + shift for row in rows]]


def fed(
    one: CapturedRequest, places: list[tuple[str, int]], rows: list[int], *, token: int = 1, offset: int = 0
) -> CapturedRequest:
    """``one`` whose draft was fed these places, slot by slot, and token x[i + ``token``] at position i + ``offset``."""
    ids = torch.tensor([*one.prompt_ids, *one.output_ids], dtype=torch.int32)
    row_F = torch.tensor(rows, dtype=torch.int32)
    features = torch.cat([rows_of(one, tap, shift, rows) for tap, shift in places], dim=1)
    return changed(one, feed=Feed(row_F, ids[row_F.long() + token], row_F + offset, features))


def make_trace(folder: Path, requests: list[CapturedRequest]) -> Trace:
    header = make_header()
    header = dataclasses.replace(header, taps={tap: TapInfo("bfloat16", H) for tap in TAPS})
    return Trace.open(write_trace(folder / "t", [requests[:2], requests[2:]], header=header))


def feeding(tmp_path: Path, places: list[tuple[str, int]], **how: int) -> Feeding:
    requests = [fed(request(f"r{seed}", seed), places, [0, 3, 6], **how) for seed in range(4)]
    found = read_feeding(make_trace(tmp_path, requests))
    assert found is not None
    return found


def twin(trace: Trace, slot: int) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], int], int]:
    """Equal rows and compared rows of every place, and rows of zeros: row by row, number by number."""
    equal: dict[tuple[str, int], int] = {}
    compared: dict[tuple[str, int], int] = {}
    zeros = 0
    for index in range(len(trace)):
        feed, rows = trace.feed(index), trace.read(index, trace.taps)
        assert feed is not None
        for row, features in zip(feed.row_F.tolist(), feed.features_FW, strict=True):
            given = features[slot * H : (slot + 1) * H]
            zeros += not any(given.tolist())
            for tap, values in rows.taps.items():
                for shift in (-1, 0, 1):
                    if 0 <= row + shift < len(values):
                        there = values[row + shift].view(torch.int16).tolist() == given.view(torch.int16).tolist()
                        equal[tap, shift] = equal.get((tap, shift), 0) + there
                        compared[tap, shift] = compared.get((tap, shift), 0) + 1
    return equal, compared, zeros


def test_counts_are_those_of_the_twin(tmp_path: Path) -> None:
    """Different places in every slot and request, the token of a row that occurs twice, a slot of zeros in one."""
    places = [("embed", 0), ("3", -1), ("2", 1)]
    requests = [fed(request(f"r{seed}", seed), places[seed:] + places[:seed], [0, 2, 4, 8]) for seed in range(3)]
    trace = make_trace(tmp_path, [*requests, fed(request("r3", 3), [("zeros", 0), ("final", 0), ("2", 0)], [1, 5])])
    found = read_feeding(trace)
    assert found is not None and (found.requests, found.rows) == (4, 14)
    for slot in found.slots:
        assert (slot.equal, slot.compared, slot.zeros) == twin(trace, slot.slot)


def test_every_slot_is_named(tmp_path: Path) -> None:
    found = feeding(tmp_path, [("embed", 0), ("2", 0), ("3", 0)])
    assert [slot.place for slot in found.slots] == [("embed", 0), ("2", 0), ("3", 0)]
    assert found.wiring == ("embed", "2", "3")
    assert (found.next_token, found.offset, found.at_offset) == (12, 0, 12)
    assert list(lines(found)) == [
        "slot 0: embed, bit for bit in 12 of 12 rows",
        "slot 1: R[2], bit for bit in 12 of 12 rows",
        "slot 2: R[3], bit for bit in 12 of 12 rows",
        "token: row i embeds x[i+1] in 12 of 12 rows",
        "position: that of its row in 12 of 12 rows",
    ]
    assert borne_out(found, Fed(("embed", "2", "3")))
    document = json.loads(json.dumps(feeding_json(found), allow_nan=False))
    assert document["slots"][1] == {
        "slot": 1, "tap": "2", "shift": 0, "rows": 12, "equal": 12, "zeros": 0, "broken": 0, "also": [],
        "nearest": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("places", "how", "said", "rules_out"),
    [
        ([("2", 0), ("zeros", 0)], {}, "slot 1: zeros in 12 of 12 rows", Fed(("2", "3"))),
        ([("2", 0), ("final", 0)], {}, "slot 1: final, bit for bit in 12 of 12 rows", Fed(("2", "3"))),
        ([("2", 0), ("3", 0)], {}, "slot 1: R[3], bit for bit in 12 of 12 rows", Fed(("2", "3"), zeros=(1,))),
        ([("2", 0), ("3", 0)], {}, "slot 1: R[3], bit for bit", Fed(("2", "3"), unrecorded=True)),
        ([("2", -1), ("3", -1)], {}, "R[2] of the row before, bit for bit in 8 of 8 rows", Fed(("2", "3"))),
        ([("2", 1), ("3", 1)], {}, "R[3] of the row after, bit for bit in 12 of 12 rows", Fed(("2", "3"))),
        ([("2", 0), ("3", 0)], {"token": 0}, "x[i+1] in 0 of 12 rows, x[i] in 12", Fed(("2", "3"))),
        ([("2", 0), ("3", 0)], {}, "x[i+1] in 12 of 12 rows", Fed(("2", "3"), own_token=True)),
        ([("2", 0), ("3", 0)], {"offset": 5}, "position: that +5 of its row in 12 of 12 rows", Fed(("2", "3"))),
        ([("2", 0), ("3", 0)], {}, "position: that of its row in 12 of 12 rows", Fed(("2", "3"), offset=1)),
    ],
)
def test_what_differs_is_said_and_rules_out(
    tmp_path: Path, places: list[tuple[str, int]], how: dict[str, int], said: str, rules_out: Fed
) -> None:
    found = feeding(tmp_path, places, **how)
    assert said in "\n".join(lines(found))
    assert contradiction(found, rules_out) and not borne_out(found, rules_out)
    zeros = tuple(slot for slot, (tap, _) in enumerate(places) if tap == "zeros")
    shift, offset = places[0][1], how.get("offset", 0)
    right = Fed(tuple(tap for tap, _ in places), shift, zeros, own_token=how.get("token") == 0, offset=offset)
    assert borne_out(found, right)


def test_positions_that_end_rule_out_those_that_go_on(tmp_path: Path) -> None:
    """Rows 0, 3 and 6 of four requests at positions 0, 2 and 2, as where a server has three positions."""
    requests = []
    for seed in range(4):
        one = fed(request(f"r{seed}", seed), [("2", 0), ("3", 0)], [0, 3, 6])
        assert one.feed is not None
        one.feed.position_F[:] = one.feed.row_F.clamp_max(2)
        requests.append(one)
    found = read_feeding(make_trace(tmp_path, requests))
    assert found is not None and found.positions == {(0, 0): 4, (3, 2): 4, (6, 2): 4}
    assert contradiction(found, Fed(("2", "3"))).endswith(", and not that of its row")
    assert contradiction(found, Fed(("2", "3"), offset=1)).endswith(", and not that +1 of its row")
    assert contradiction(found, Fed(("2", "3"), max_position=5)).endswith(", and not that of its row and 4 at most")
    assert borne_out(found, Fed(("2", "3"), max_position=3))


def test_single_rows_that_stand_elsewhere_decide_nothing() -> None:
    slot = Slot(0, 8, 0, {("2", 0): 8}, {("2", 0): 8}, ("2", 0), 1.0)
    stands = {(row, row if row > 1 else row + 7): 1 for row in range(8)}
    found = Feeding(1, 8, (slot,), 8, 0, 0, 6, stands)
    assert borne_out(found, Fed(("2",))) and contradiction(found, Fed(("2",), offset=7))


def test_rows_of_prompts_that_the_trace_lacks_are_not_compared(tmp_path: Path) -> None:
    """Only the first rows were seen to be fed, and the trace has the last one of each prompt."""
    whole = make_trace(tmp_path, [fed(request(f"r{seed}", seed), [("2", 0), ("zeros", 0)], [0, 3]) for seed in (0, 1)])
    found = read_feeding(make_less(tmp_path / "less", whole, prompt_rows=1))
    assert found is not None and found.wiring is None and not any(found.slots[0].compared.values())
    assert list(lines(found))[:3] == [
        "slot 0: not compared, the trace lacks the 4 rows that were seen; to name it, record more rows of prompts "
        "(--prompt-rows)",
        "slot 1: zeros in 4 of 4 rows",
        "token: row i embeds x[i+1] in 4 of 4 rows",
    ]
    other = Fed(("3", "2"), zeros=(1,))
    assert contradiction(found, other) == "" and not borne_out(found, other)
    assert contradiction(found, dataclasses.replace(other, own_token=True)).startswith("token: row i embeds")
    assert [slot["nearest"] for slot in feeding_json(found)["slots"]] == [None, None]  # type: ignore[union-attr]
    more = read_feeding(make_less(tmp_path / "more", whole, prompt_rows=4))
    assert more is not None and more.slots[0].compared["2", 0] == more.slots[0].equal["2", 0] == 2


def test_a_tap_that_was_not_recorded_is_not_identified(tmp_path: Path) -> None:
    """Features near R[3], but none of its bits: the nearest is said, and that it is not it."""
    requests = []
    for seed in range(4):
        one = fed(request(f"r{seed}", seed), [("2", 0), ("3", 0)], [0, 3, 6])
        assert one.feed is not None
        one.feed.features_FW[:, H:] *= 1.01
        requests.append(one)
    found = read_feeding(make_trace(tmp_path, requests))
    assert found is not None and found.wiring is None
    slot = found.slots[1]
    assert slot.place is None and not slot.told and slot.nearest == ("3", 0) and slot.cosine > 0.99
    said = "slot 1: not identified, no recorded tap has its bits; nearest is R[3] with cosine 1.000"
    assert f"{said}; to name it, record more taps: `replay serve --taps ...`" in lines(found)
    assert not contradiction(found, Fed(("2", "3")))  # it may have been cast on the way
    assert contradiction(found, Fed(("3", "3"))) and contradiction(found, Fed(("2", "3"), unrecorded=True))
    assert not borne_out(found, Fed(("2", "3"), unrecorded=True))
    assert feeding_json(found)["slots"][1]["tap"] is None and feeding_json(found)["slots"][1]["nearest"]["tap"] == "3"


def test_what_is_no_number_is_said(tmp_path: Path) -> None:
    requests = []
    for seed in range(4):
        one = fed(request(f"r{seed}", seed), [("2", 0), ("3", 0)], [0, 3, 6])
        assert one.feed is not None
        one.feed.features_FW[:, H] = math.nan
        one.feed.features_FW[0, 0] = math.inf
        requests.append(one)
    found = read_feeding(make_trace(tmp_path, requests))
    assert found is not None and found.wiring is None
    assert list(lines(found))[:2] == [
        "slot 0: R[2], bit for bit in 8 of 12 rows, NaN or Inf in 4 of 12",
        "slot 1: NaN or Inf in 12 of 12 rows",
    ]
    assert contradiction(found, Fed(("2", "3"))).startswith("slot 1: NaN or Inf")
    assert [slot["broken"] for slot in feeding_json(found)["slots"]] == [4, 12]


def test_taps_of_equal_rows_cannot_be_told_apart(tmp_path: Path) -> None:
    requests = []
    for seed in range(4):
        one = request(f"r{seed}", seed)
        requests.append(fed(changed(one, taps={**one.taps, "3": one.taps["2"]}), [("3", 0)], [0, 3, 6]))
    found = read_feeding(make_trace(tmp_path, requests))
    assert found is not None and found.slots[0].also == (("3", 0),)
    assert "slot 0: R[2], bit for bit in 12 of 12 rows; cannot be told from R[3]" in next(lines(found))
    assert not contradiction(found, Fed(("3",))) and not contradiction(found, Fed(("2",)))


def test_a_check_finds_feeds_of_two_widths(tmp_path: Path) -> None:
    """A shard holds one width; another of the same trace may come with another."""
    places = [("2", 0), ("3", 0)]
    requests = [fed(request(f"r{seed}", seed), places if seed < 2 else places[:1], [0, 3, 6]) for seed in range(4)]
    found = [finding.what for finding in check_trace(make_trace(tmp_path, requests)) if finding.severity == "error"]
    assert f"feeds of one server have features of {H}, {2 * H} columns; capture it again" in found


def test_single_rows_decide_nothing() -> None:
    """One struck row in eight is said, and rules nothing out."""
    slot = Slot(0, 8, 1, {("2", 0): 7, ("3", 0): 0}, {("2", 0): 8, ("3", 0): 8}, ("2", 0), 0.9)
    found = Feeding(1, 8, (slot,), 7, 0, 0, 8)
    assert not contradiction(found, Fed(("2",))) and contradiction(found, Fed(("3",)))
    assert next(lines(found)) == "slot 0: R[2], bit for bit in 7 of 8 rows"


def test_nan_is_fed_as_it_is(tmp_path: Path) -> None:
    one = fed(request("r0", 0), [("2", 0), ("3", 0)], [0, 3, 6])
    assert one.feed is not None
    one.feed.features_FW[1, 3] = float("nan")
    found = read_feeding(make_trace(tmp_path, [one]))
    assert found is not None and found.slots[0].equal["2", 0] == 2
    json.dumps(feeding_json(found), allow_nan=False)


def test_a_trace_without_a_feed_has_nothing_to_say(tmp_path: Path) -> None:
    trace = make_trace(tmp_path, [request("r0", 0)])
    assert read_feeding(trace) is None and feeding_json(None) == {"slots": [], "fed": None}


def test_nothing_is_near_to_zeros(tmp_path: Path) -> None:
    found = feeding(tmp_path, [("2", 0), ("zeros", 0)])
    assert found.slots[1].zeroed and found.slots[1].place is None
    assert feeding_json(found)["slots"][1]["nearest"] is None


def test_only_so_many_requests_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request("r0", 0), *(fed(request(f"r{seed}", seed), [("2", 0)], [2]) for seed in range(1, 4))]
    trace, asked = make_trace(tmp_path, requests), []

    def feed_of(self: Trace, index: int, whole: Callable[[Trace, int], Feed | None] = Trace.feed) -> Feed | None:
        asked.append(index)
        return whole(self, index)

    monkeypatch.setattr(Trace, "feed", feed_of)
    found = read_feeding(trace, most=2)
    assert found is not None and (found.requests, found.rows, asked) == (2, 2, [0, 1, 2])
    assert math.isclose(found.slots[0].cosine, 1.0)


def spoil(trace: Trace, tap: str, row: int) -> None:
    """NaN into one number of a bfloat16 tap of the first shard."""
    layout = trace.layouts[0]
    with layout.path.open("r+b") as file:
        file.seek(layout.tensors[f"tap.{tap}"].start + 2 * H * row)
        file.write(b"\xc0\x7f")


def test_only_rows_that_are_compared_are_read(tmp_path: Path) -> None:
    """A row of NaN elsewhere in the request is not looked at; beside a fed row it is near to nothing."""
    trace = make_trace(tmp_path, [fed(request("r0", 0), [("2", 0), ("3", 0)], [0, 3])])
    before = read_feeding(trace)
    spoil(trace, "2", 6)  # rows 0 and 3 have neighbours 1, 2 and 4
    with pytest.raises(TraceCorruptError, match="NaN"):
        trace.read(0, trace.taps)
    assert before is not None and read_feeding(trace) == before
    spoil(trace, "2", 2)
    after = read_feeding(trace)
    assert after is not None and [slot.equal for slot in after.slots] == [slot.equal for slot in before.slots]
