"""What a recording server copies and writes where a request asks for less: held against everything, cut down after."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from sys import getrefcount
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.trace_maker import H, make_header, make_request

from replay.capture.asked import Asked, asked_of
from replay.capture.client.join import Recorded, first_missing, join
from replay.capture.client.spool_reader import rid_of
from replay.capture.plugin import alike
from replay.capture.plugin.columns import Columns
from replay.capture.plugin.live import LiveRecording
from replay.capture.plugin.recorder import RowRecorder
from replay.capture.spool import Entry, read_row_file, row_file_names, write_row_file
from replay.errors import CaptureError, TraceCorruptError
from replay.traces.captured import check_request, unfinite_row
from replay.traces.fp8 import quantise
from replay.traces.header import FP8, VERSION, TapInfo

CLIENT, OTHER = (f"replay-{letter * 16}" for letter in "ab")
WIDTH, VOCABULARY, K = 4, 80, 3
BOUNDARIES = (0, 2, 3, 16)
COLUMNS = Columns(BOUNDARIES, (1, 2, 3), WIDTH, VOCABULARY)
TAPS = ("embed", "2", "3", "16", "final")
TREE = 3  # nodes of a verify


def rid(name: str, asked: Asked | None, client: str = CLIENT) -> str:
    return rid_of(client, name + ("" if asked is None else asked.spell()), 0)


@pytest.mark.parametrize(
    "asked", [Asked(("embed", "3")), Asked((), first_row=7), Asked(("16",), True, 50_000), Asked((), True)]
)
def test_what_is_asked_goes_through_the_id(asked: Asked) -> None:
    assert asked_of(rid("0123456789ab", asked)) == asked


@pytest.mark.parametrize(
    "name",
    [
        "somebody-else", f"{CLIENT}-probe-0", f"{CLIENT}-0f.3.exact.0", f"{CLIENT}-0f.3_3.exact.0-0",
        f"{CLIENT}-0f.3_final.exact.0-0", f"{CLIENT}-0f.3.fp4.0-0", f"{CLIENT}-0f.3.fp8.-1-0",
        f"{CLIENT}-0f.3_.fp8.1-0", f"{CLIENT}-0f.3.fp8.1-0\n", f"{CLIENT}-0f.3.fp8.1234567890-0",
        f"x{CLIENT}-0f.3.fp8.0-0",
        f"{CLIENT}-0f.{'_'.join(map(str, range(2000)))}.fp8.0-0",
    ],
)  # fmt: skip
def test_any_other_id_asks_for_everything(name: str) -> None:
    assert asked_of(name) is None


def test_an_id_beyond_all_bounds_is_not_remembered() -> None:
    """A forward asks for each of its requests: ids of any length, of anybody, must not fill the server's memory."""
    long = f"{CLIENT}-{'0' * 5000}.3.fp8.0-0"
    held = getrefcount(long)
    assert asked_of(long) is None and getrefcount(long) == held


class Server:
    """Forwards of one model: each hands its rows to a recorder, whatever their requests ask for."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.recorder = Weighed(folder)
        self.live = LiveRecording(COLUMNS, K, self.recorder)
        self.random = torch.Generator().manual_seed(3)

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).bfloat16()

    def run(self, kind: str, rids: Sequence[str], ids: torch.Tensor, **more: Any) -> Any:
        rows = len(ids)
        mode = SimpleNamespace(
            is_idle=lambda: False, is_target_verify=lambda: kind == "verify", is_extend=lambda: kind == "prefill",
            is_decode=lambda: kind == "decode",
        )  # fmt: skip
        batch = SimpleNamespace(
            rids=list(rids), reqs=[SimpleNamespace(rid=one) for one in rids], forward_mode=mode, input_ids=ids, **more
        )
        hidden, final = self.numbers(rows, len(BOUNDARIES) * WIDTH), self.numbers(rows, WIDTH)
        logits = self.numbers(len(rids) if kind == "prefill" else rows, VOCABULARY)
        self.live.record_forward(batch, hidden, final, logits)
        return batch

    def prefill(self, rids: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> None:
        ids = torch.cat([torch.arange(at, at + rows) for at, rows in zip(starts, lengths, strict=True)])
        self.run("prefill", rids, ids, extend_seq_lens_cpu=lengths, extend_prefix_lens_cpu=starts)

    def decode(self, rids: Sequence[str], at: Sequence[int]) -> None:
        self.run("decode", rids, torch.tensor(at), positions=torch.tensor(at))

    def verify(self, rids: Sequence[str], anchors: Sequence[int], accepted: Sequence[int]) -> None:
        size = len(rids)
        ids = torch.cat([torch.arange(anchor, anchor + TREE) for anchor in anchors])
        batch = self.run("verify", rids, ids, spec_info=SimpleNamespace(topk=1, draft_token=ids))
        lens = torch.tensor(accepted) + 1
        result = SimpleNamespace(
            speculative_num_draft_tokens=TREE, next_token_ids=ids + 1, accept_lens=lens,
            accept_index=torch.arange(size * TREE).view(size, TREE), new_seq_lens=torch.tensor(anchors) + lens,
        )  # fmt: skip
        self.live.record_verify(result, batch)


class Weighed(RowRecorder):
    """A recorder that counts what it is given."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 5, lambda _: None)
        self.given = 0

    def submit(self, tensors: Any, build: Any) -> None:
        self.given += sum(tensor.nbytes for name, tensor in tensors.items() if name in ("hidden", "values", "scales"))
        super().submit(tensors, build)


# each request: its name, what it asks for, and the client that asks
ASKED: dict[str, tuple[Asked | None, str]] = {
    "a": (Asked(("3", "16")), CLIENT),
    "b": (Asked(("embed", "3"), True, 5), CLIENT),
    "c": (None, CLIENT),
    "d": (Asked((), False, 9), OTHER),
    "e": (Asked(("3", "16"), False, 3), CLIENT),
    "f": (Asked(("3", "17"), True, 3), CLIENT),  # there is no such tap: all of it
    "g": (Asked(("2",), True, 0), OTHER),
}
PROMPT, OUTPUT = 10, 6


def forwards(server: Server, name: Callable[[str], str]) -> None:
    """Prompts of 10 tokens in pieces of 4 and 6, beside somebody else's; verifies and a decode; "e" is put back."""
    everyone = [name(letter) for letter in ASKED]
    server.prefill(["x", *everyone], [0] * 8, [2] + [4] * 7)
    server.prefill([*everyone[:3], "x", *everyone[3:]], [4, 4, 4, 0, 4, 4, 4, 4], [6, 6, 6, 3, 6, 6, 6, 6])
    server.verify([everyone[6], "x", *everyone[:6]], [10] * 8, [2, 0, 2, 2, 2, 2, 1, 2])
    server.prefill([everyone[4]], [0], [12])
    server.decode(["x", *everyone[:4], "x", *everyone[4:]], [1, 13, 13, 13, 13, 1, 12, 13, 13])
    server.verify(everyone, [14, 14, 14, 14, 13, 14, 14], [1, 1, 1, 1, 2, 1, 1])
    server.recorder.close()


def recorded_in(folder: Path) -> dict[str, list[Recorded]]:
    """What lies in a spool, by the name of a request."""
    found: dict[str, list[Recorded]] = {}
    for name in row_file_names(folder):
        file = read_row_file(folder / name, TAPS, WIDTH)
        for index, entry in enumerate(file.entries):
            found.setdefault(entry.rid.split("-")[2][0], []).append(Recorded(file, index))
    return found


@pytest.mark.parametrize("block", [1, 5 * WIDTH, 1 << 24])
def test_rows_that_are_asked_for_are_those_of_everything_cut_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, block: int
) -> None:
    """Bit for bit, fp8 as the client rounds it, in a batch of requests of which each asks for something else."""
    monkeypatch.setattr(alike, "_BLOCK", block)
    asking, whole = Server(tmp_path / "asking"), Server(tmp_path / "whole")
    forwards(asking, lambda letter: rid(letter, *ASKED[letter]))
    forwards(whole, lambda letter: rid(letter, None, ASKED[letter][1]))
    assert asking.recorder.failure is None and whole.recorder.failure is None
    less, all_of_it = recorded_in(tmp_path / "asking"), recorded_in(tmp_path / "whole")
    assert set(less) == set(all_of_it) == set(ASKED)
    prompt, output = list(range(PROMPT)), list(range(PROMPT, PROMPT + OUTPUT))
    for letter, (asked, _) in ASKED.items():
        first = 0 if asked is None else asked.first_row
        taps = TAPS if asked is None or "17" in asked.taps else (*asked.taps, "final")
        mine = join(letter, prompt, output, less[letter], taps, first)
        theirs = join(letter, prompt, output, all_of_it[letter], taps)
        rounded = asked is not None and asked.rounded and "17" not in asked.taps
        for tap in taps:
            rows = theirs.taps[tap][first:]
            values, scales = quantise(rows) if rounded and tap != "final" else (rows, None)
            assert torch.equal(mine.taps[tap].view(torch.uint8), values.view(torch.uint8)), (letter, tap)
            assert scales is None or torch.equal(mine.scales[tap], scales)
        assert set(mine.scales) == (set(taps) - {"final"} if rounded else set())
        assert (mine.rounds, mine.pieces, mine.tail_ids) == (theirs.rounds, theirs.pieces, theirs.tail_ids)
        assert torch.equal(mine.topk_ids, theirs.topk_ids) and torch.equal(mine.logsumexp, theirs.logsumexp)
        assert mine.pieces is not None and len(mine.rounds) == 2


def test_what_is_under_way_is_what_is_asked_for(tmp_path: Path) -> None:
    """In a prefill of 8 rows, 3 of 4 taps are left out; in fp8 with a scale, and 6 rows less: counted on paper."""
    for number, (asked, expected) in enumerate(
        [
            (None, 8 * 4 * 2 * WIDTH),
            (Asked(("3",)), 8 * 2 * WIDTH),
            (Asked(("3",), True), 8 * (WIDTH + 4)),
            (Asked(("2", "3"), True, 6), 2 * 2 * (WIDTH + 4)),
            (Asked((), True), 0),
        ]
    ):
        server = Server(tmp_path / str(number))
        server.prefill([rid("a", asked)], [0], [8])
        server.recorder.close()
        assert server.recorder.given == expected


def test_rows_before_the_first_one_are_not_missing_and_those_after_it_are(tmp_path: Path) -> None:
    server = Server(tmp_path / "spool")
    server.prefill([rid("a", Asked(("3",), False, 7))], [0], [4])
    server.prefill([rid("a", Asked(("3",), False, 7))], [4], [6])
    server.recorder.close()
    recorded = recorded_in(tmp_path / "spool")["a"]
    assert [(one.entry.rows, one.entry.left_out, one.entry.kept) for one in recorded] == [(4, 4, 0), (6, 3, 3)]
    assert first_missing(recorded, 10, 7) is None and first_missing(recorded[1:], 10, 7) == 0
    assert first_missing(recorded, 11, 7) == 10 and first_missing(recorded, 10, 6) == 6
    assert first_missing(recorded, 10) == 0
    with pytest.raises(CaptureError, match="r: the server recorded 3, final of position 7, and not 16"):
        join("r", list(range(10)), [10], recorded, ("3", "16", "final"), 7)
    with pytest.raises(CaptureError, match="r: the server recorded no row for position 5 of 10"):
        join("r", list(range(10)), [10], recorded, ("3", "final"), 5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"taps": ["tap.17"]}, "taps is .*must be some of embed, 2, 3, 16, final"),
        ({"left_out": 0}, r"tap.final is \[2, 4\], its entries make it \[4, 4\]"),
        ({"scale": None}, r"scale.3 is missing, its entries make it \[2\]"),
        ({"scale": 3}, r"scale.3 is \[3\], its entries make it \[2\]"),
    ],
)
def test_files_of_less_that_disagree_with_themselves_are_refused(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    values, scales = quantise(torch.ones(2, WIDTH))
    tensors = {
        "input_ids": torch.zeros(4, dtype=torch.int32), "topk_ids": torch.zeros(1, K, dtype=torch.int32),
        "topk_logprobs": torch.zeros(1, K), "logsumexp": torch.zeros(1), "tap.3": values, "scale.3": scales,
        "tap.final": torch.ones(2, WIDTH),
    }  # fmt: skip
    tensors |= {name: torch.ones(2, WIDTH) for name in change.get("taps", ())}
    if "scale" in change:
        tensors.pop("scale.3")
        tensors |= {} if change["scale"] is None else {"scale.3": torch.ones(change["scale"])}
    entry = Entry(rid("a", None), "prefill", 0, 4, 1, forward_rows=4, left_out=change.get("left_out", 2))
    write_row_file(tmp_path, 3, 1, [entry], {name: [part] for name, part in tensors.items()}, partial=True)
    with pytest.raises(TraceCorruptError, match=why):
        read_row_file(tmp_path / row_file_names(tmp_path)[0], TAPS, WIDTH)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_is_still_seen(odd: float) -> None:
    """The plugin rounds before the client looks: the scale of such a row is none either, and no trace takes it."""
    rows = torch.ones(3, WIDTH)
    rows[1, 2] = odd
    assert unfinite_row(quantise(rows)[1]) == 1
    made, header = make_request("r", 1), make_header()
    values, scales = quantise(torch.ones(len(made.taps["2"]), H))
    rounded = replace(made, taps={**made.taps, "2": values}, scales={"2": scales})
    header = replace(header, taps={**header.taps, "2": TapInfo(FP8, H)}, version=VERSION)
    check_request(rounded, header, ())
    scales[4] = quantise(rows)[1][1]
    with pytest.raises(CaptureError, match="request 'r': scale of tap 2 holds NaN or Inf, first in row 4"):
        check_request(rounded, header, ())
