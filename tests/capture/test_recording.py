"""From a forward's tensors to the spool and back: which rows count, what is bounded, what is left out."""

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from replay.capture.client.join import Recorded, feed_of, first_missing, join
from replay.capture.client.passes import PassNumbers
from replay.capture.client.served import lacks_feed, pieces_of, rounds_of, same_histogram, tail_of
from replay.capture.launches import drop_launches
from replay.capture.logits import summarise_logits
from replay.capture.manifest import Manifest, read_manifests, write_manifest
from replay.capture.plugin import recorder as recorder_module
from replay.capture.plugin.facts import without_secrets
from replay.capture.plugin.recorder import RowRecorder, summarise_rows
from replay.capture.plugin.rows import decode_rows, feed_rows, prefill_rows, tree_parents, verify_rows
from replay.capture.spool import (
    Entry,
    launch_folder,
    read_row_file,
    row_file_names,
    write_row_file,
)
from replay.errors import CaptureError, TraceCorruptError

WIDTH, KEPT = 3, 2
TAPS = ("embed", "2")


def forward(rows: int, logits: int, first: int = 0) -> dict[str, torch.Tensor]:
    """What a hook hands over, each row telling its number from ``first`` on."""
    numbers = torch.arange(first, first + rows, dtype=torch.float32)
    return {
        "hidden": numbers[:, None].repeat(1, 2 * WIDTH) + torch.tensor([0.0] * WIDTH + [100.0] * WIDTH),
        "final": numbers[:, None].repeat(1, WIDTH),
        "input_ids": torch.arange(first, first + rows, dtype=torch.int32),
        "topk_ids": torch.zeros(logits, KEPT, dtype=torch.int32),
        "topk_logprobs": torch.zeros(logits, KEPT),
        "logsumexp": torch.zeros(logits),
    }


def test_prefill_rows() -> None:
    """Of 9 rows in all, 4 of them somebody else's."""
    entries, tensors = prefill_rows([("replay-a", 4, 3, 0), ("replay-b", 0, 2, 0)], 9, TAPS, WIDTH, forward(5, 2))
    assert entries == [
        Entry("replay-a", "prefill", 4, 3, 1, forward_rows=9),
        Entry("replay-b", "prefill", 0, 2, 1, forward_rows=9),
    ]
    assert tensors["tap.embed"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert tensors["tap.2"][:, 0].tolist() == [100, 101, 102, 103, 104]


def test_decode_rows() -> None:
    cpu = forward(2, 2) | {"starts": torch.tensor([7, 9], dtype=torch.int32)}
    entries, tensors = decode_rows(["replay-a", "replay-c"], 5, TAPS, WIDTH, cpu)  # 3 requests are somebody else's
    assert entries == [Entry("replay-a", "decode", 7, 1, 1, batch=5), Entry("replay-c", "decode", 9, 1, 1, batch=5)]
    assert tensors["input_ids"].tolist() == [0, 1]


def test_verify_rows_keep_what_was_accepted() -> None:
    # 3 requests, of which the second is somebody else's; 3 rows of the longest path of each of ours
    cpu = forward(6, 6) | {
        "drafted": torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]], dtype=torch.int32),
        "chosen": torch.tensor([[11, 50, 0], [1, 1, 1], [99, 0, 0]], dtype=torch.int32),
        "accept_lens": torch.tensor([2, 3, 1], dtype=torch.int32),
        "anchors": torch.tensor([40, 41, 42], dtype=torch.int32),
    }
    entries, tensors = verify_rows(["replay-a", "b", "replay-c"], [0, 2], 17, TAPS, WIDTH, cpu)
    ours = {"batch": 3, "verify_pass": 17}
    assert entries == [
        Entry("replay-a", "verify", 40, 2, 2, drafted=[11, 12], accepted=1, chosen=[11, 50], batch_row=0, **ours),
        Entry("replay-c", "verify", 42, 1, 1, drafted=[31, 32], accepted=0, chosen=[99], batch_row=2, **ours),
    ]
    assert tensors["input_ids"].tolist() == [0, 1, 3]


def test_tree_parents() -> None:
    #        0
    #      / | \     children of a node are a list: first child, then each one's next sibling
    #     3  2  1
    #     |     |
    #     5     4
    first_child = [3, 4, -1, 5, -1, -1]
    next_sibling = [-1, -1, 1, 2, -1, -1]
    assert tree_parents(first_child, next_sibling) == (0, 0, 0, 1, 3)


def test_tree_parents_of_a_node_that_no_list_names() -> None:
    # node 2's parent was not kept; node 3 hangs on node 2, so no walk reaches it either
    assert tree_parents([1, -1, 3, -1], [-1, -1, -1, -1]) == (0, -1, 2)


def test_summary_is_the_one_of_a_local_capture() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[0, 7] = logits[0, 3] = 9.0  # a tie: the lower id comes first
    ours, theirs = summarise_rows(logits, 6), summarise_logits(logits, 6)
    assert torch.equal(ours["topk_ids"], theirs.topk_ids) and ours["topk_ids"][0, 0] == 3
    assert torch.equal(ours["topk_logprobs"], theirs.topk_logprobs)
    assert torch.equal(ours["logsumexp"], theirs.logsumexp)


@pytest.mark.parametrize("vocabulary", [64 * 40, 64 * 40 + 17])
def test_summary_of_a_large_vocabulary(vocabulary: int) -> None:
    """Ties everywhere: logits in steps of a half, the largest of them twice, in the first block and in the last."""
    logits = (torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(1)) * 4).round() / 2
    logits[:, 3] = logits[:, vocabulary - 1] = 99.0
    ours, theirs = summarise_rows(logits, 6), summarise_logits(logits, 6)
    assert ours["topk_ids"][:, :2].tolist() == [[3, vocabulary - 1]] * 9
    assert torch.equal(ours["topk_logprobs"], theirs.topk_logprobs) and torch.equal(ours["logsumexp"], theirs.logsumexp)
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(2))  # and none
    assert torch.equal(summarise_rows(logits, 6)["topk_ids"], summarise_logits(logits, 6).topk_ids)


def fed(first: int, rows: int) -> dict[str, torch.Tensor]:
    """What the hook before the draft's prefill hands over, each row telling its number from ``first`` on."""
    numbers = torch.arange(first, first + rows, dtype=torch.int32)
    features = numbers[:, None].repeat(1, 2 * WIDTH).bfloat16()
    return {"feed.token": numbers + 1, "feed.position": numbers, "feed.features": features}


def test_feed_rows() -> None:
    entries, tensors = feed_rows([("replay-a", range(3, 32, 4)), ("replay-b", range(0, 1))], fed(0, 9))
    assert [(entry.kind, entry.rows, entry.logits) for entry in entries] == [("feed", 0, 0)] * 2
    assert [entry.fed for entry in entries] == [[3, 7, 11, 15, 19, 23, 27, 31], [0]]
    assert tensors["feed.token"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


# ---- the writing thread ----


def rows(name: str, cpu: dict[str, torch.Tensor]) -> tuple[list[Entry], dict[str, torch.Tensor]]:
    return prefill_rows([(name, 0, len(cpu["final"]), 0)], len(cpu["final"]), TAPS, WIDTH, cpu)


def test_recorder_writes_what_it_was_given(tmp_path: Path) -> None:
    failures: list[str] = []
    recorder = RowRecorder(tmp_path, 5, failures.append)
    for number in range(3):
        recorder.submit(forward(4, 1, 10 * number), lambda cpu, n=number: rows(f"replay-{n}", cpu))  # type: ignore[misc]
    recorder.close()
    assert failures == [] and recorder.failure is None
    read = [read_row_file(tmp_path / name, TAPS, WIDTH) for name in row_file_names(tmp_path)]
    assert [entry.rid for file in read for entry in file.entries] == ["replay-0", "replay-1", "replay-2"]


def test_recorder_makes_the_forward_wait_rather_than_grow(tmp_path: Path) -> None:
    one = forward(4, 1)
    size = sum(tensor.nbytes for tensor in one.values())
    gate, submitted = threading.Event(), []
    recorder = RowRecorder(tmp_path, 5, lambda _: None, most_bytes=2 * size)

    def slow(cpu: dict[str, torch.Tensor]) -> tuple[list[Entry], dict[str, torch.Tensor]]:
        gate.wait(10)
        return rows("replay-a", cpu)

    def forwards() -> None:
        for number in range(4):
            recorder.submit(one, slow)  # type: ignore[arg-type]
            submitted.append(number)

    thread = threading.Thread(target=forwards)
    thread.start()
    deadline = time.monotonic() + 5
    while len(submitted) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert submitted == [0, 1]  # the third waits: two are under way
    gate.set()
    thread.join(10)
    recorder.close()
    assert submitted == [0, 1, 2, 3]


def test_recorder_that_cannot_write_lets_the_forward_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []

    def full(*args: object, **given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder_module, "write_row_file", full)
    size = sum(tensor.nbytes for tensor in forward(4, 1).values())
    recorder = RowRecorder(tmp_path, 5, failures.append, most_bytes=size)
    for _ in range(5):  # more than fit: none of them may wait for ever
        recorder.submit(forward(4, 1), lambda cpu: rows("replay-a", cpu))  # type: ignore[arg-type]
    recorder.close()
    assert failures == [f"cannot write to {tmp_path}: No space left on device"]
    recorder.submit(forward(4, 1), lambda cpu: rows("replay-a", cpu))  # type: ignore[arg-type]
    assert row_file_names(tmp_path) == []


def test_recorder_whose_disk_hangs_lets_the_forward_go_on(tmp_path: Path) -> None:
    """Neither the wait nor the report of its end may hold the forward longer than the limit."""
    gate, failures = threading.Event(), []

    def report(reason: str) -> None:
        gate.wait(10)  # it would write to the same disk
        failures.append(reason)

    def hang(_: object) -> tuple[list[Entry], dict[str, torch.Tensor]]:
        gate.wait(10)
        return [], {}

    size = sum(tensor.nbytes for tensor in forward(4, 1).values())
    recorder = RowRecorder(tmp_path, 5, report, most_bytes=size, longest_wait=0.2)
    began = time.monotonic()
    for _ in range(3):
        recorder.submit(forward(4, 1), hang)  # type: ignore[arg-type]
    assert time.monotonic() - began < 2
    reason = f"{tmp_path} took no rows for 0 s while {size} bytes were waiting"
    assert recorder.failure == reason and failures == []
    gate.set()
    recorder.close()
    assert failures == [reason]


def test_recorder_gives_every_client_files_of_its_own(tmp_path: Path) -> None:
    """One forward of two clients and a stray request; each file's rows and logits are those of its entries."""
    rids = [f"replay-{'a' * 16}-1-0", "replay-stray", f"replay-{'b' * 16}-1-0", f"replay-{'a' * 16}-2-0"]
    cpu = forward(8, 8) | {
        "drafted": torch.zeros(4, 2, dtype=torch.int32),
        "chosen": torch.zeros(4, 2, dtype=torch.int32),
        "accept_lens": torch.tensor([2, 1, 2, 1], dtype=torch.int32),
        "anchors": torch.zeros(4, dtype=torch.int32),
    }
    cpu["logsumexp"] = torch.arange(8.0)
    recorder = RowRecorder(tmp_path, 5, lambda _: None)
    recorder.submit(cpu, lambda given: verify_rows(rids, range(4), 0, TAPS, WIDTH, given))
    recorder.close()
    found = {}
    for name in row_file_names(tmp_path):
        file, tensors = read_row_file(tmp_path / name, TAPS, WIDTH), load_file(tmp_path / name)
        found[tuple(entry.rid for entry in file.entries)] = (
            tensors["input_ids"].tolist(), tensors["tap.2"][:, 0].tolist(), tensors["logsumexp"].tolist()
        )  # fmt: skip
    assert found == {
        (rids[0], rids[3]): ([0, 1, 6], [100, 101, 106], [0, 1, 6]),
        (rids[1],): ([2], [102], [2]),
        (rids[2],): ([4, 5], [104, 105], [4, 5]),
    }


def test_feeds_lie_beside_the_rows_of_their_client(tmp_path: Path) -> None:
    """One file of a client has prefills and feeds, another's has a feed alone: nothing of the target was due in it."""
    rids = [f"replay-{letter * 16}-1-0" for letter in "ab"]
    recorder = RowRecorder(tmp_path, 5, lambda _: None)
    recorder.submit(forward(4, 1), lambda cpu: rows(rids[0], cpu))
    recorder.submit(fed(0, 3), lambda cpu: feed_rows([(rids[0], [0]), (rids[1], [1, 2])], cpu))
    recorder.close()
    read = [read_row_file(tmp_path / name, TAPS, WIDTH) for name in row_file_names(tmp_path)]
    found = {file.entries[0].rid: file for file in read}
    tokens = {rid: load_file(file.layout.path)["feed.token"].tolist() for rid, file in found.items()}
    assert tokens == {rids[0]: [1], rids[1]: [2, 3]}
    assert [entry.kind for entry in found[rids[0]].entries] == ["prefill", "feed"]
    assert found[rids[0]].first_fed == [0, 0] and "input_ids" not in found[rids[1]].layout.tensors


@pytest.mark.parametrize("lacking", ["feed.token", "feed.position", "feed.features"])
def test_a_feed_that_is_not_whole_is_refused(tmp_path: Path, lacking: str) -> None:
    entries, tensors = feed_rows([("replay-a", [0, 1])], fed(0, 2))
    tensors = {name: (tensor[:, :-1] if tensor.ndim > 1 else tensor[:-1]) if name == lacking else tensor
               for name, tensor in tensors.items()}  # fmt: skip
    write_row_file(tmp_path, 3, 1, entries, {name: [tensor] for name, tensor in tensors.items()})
    with pytest.raises(TraceCorruptError, match=f"{lacking} is"):
        read_row_file(tmp_path / row_file_names(tmp_path)[0], TAPS, WIDTH)


# ---- what counts ----


def verify(anchor: int, accepted: int, token: int = 0) -> Entry:
    """A round whose chosen tokens are ``token``, ``token`` + 1, ..."""
    chosen = [token + i for i in range(accepted + 1)]
    return Entry("r", "verify", anchor, accepted + 1, accepted + 1, [1, 2], (), accepted, chosen, batch=1)


def prefill(start: int, stop: int, forward_rows: int | None = None) -> Entry:
    return Entry("r", "prefill", start, stop - start, 1, forward_rows=forward_rows or stop - start)


def test_rounds_in_order_without_the_one_that_overlapped_the_end() -> None:
    entries = [prefill(0, 5), verify(5, 1), verify(7, 2), verify(10, 0)]
    assert [(one.anchor, one.accepted) for one in rounds_of(entries, 11)] == [(5, 1), (7, 2)]


def test_retraction_after_a_round_was_taken_keeps_it() -> None:
    # L = 5; round at 5 takes 2 tokens, so 8 are known: positions 0 to 7 are prefilled anew, in two chunks
    entries = [prefill(0, 5), verify(5, 1), prefill(0, 4), prefill(4, 8), verify(8, 0), verify(9, 1)]
    assert [one.anchor for one in rounds_of(entries, 20)] == [5, 8, 9]


def test_retraction_before_a_round_was_taken_drops_it() -> None:
    # the round at 7 ran while its request was retracted: tokens up to x[7] were known, so rows 0 to 7 come anew
    entries = [prefill(0, 5), verify(5, 1), verify(7, 2), prefill(0, 3), prefill(3, 8), verify(8, 0)]
    assert [one.anchor for one in rounds_of(entries, 20)] == [5, 8]
    assert [one.anchor for one in rounds_of(entries[:5], 9)] == [5]  # and nothing came after


def test_pieces_are_those_that_made_the_prompts_rows() -> None:
    """Of a prompt of 7 tokens."""
    first = [prefill(0, 4, 9), prefill(4, 7, 3)]
    assert pieces_of(first, 7) == ((4, 9), (3, 3))
    assert pieces_of([*first, verify(7, 1), verify(9, 0)], 7) == ((4, 9), (3, 3))
    # put back: the last prefill goes on over two tokens of the output
    assert pieces_of([*first, verify(7, 1), prefill(0, 3, 8), prefill(3, 9, 6)], 7) == ((3, 8), (4, 6))
    assert pieces_of([*first, verify(7, 1), prefill(0, 7, 8), prefill(7, 9, 6)], 7) == ((7, 8),)
    # put back in the middle of its prefill; then only a part is prefilled anew, from a cached piece on, or inside it
    assert pieces_of([prefill(0, 4, 9), prefill(0, 6, 6), prefill(6, 7, 6)], 7) == ((6, 6), (1, 6))
    assert pieces_of([*first, prefill(4, 8, 5)], 7) == ((4, 9), (3, 5))
    assert pieces_of([*first, prefill(2, 8, 6)], 7) is None
    assert pieces_of([prefill(3, 7, 4)], 7) is None and pieces_of([prefill(0, 4, 4)], 7) is None
    assert pieces_of([], 7) is None


def test_passes_of_processes_and_captures_are_told_apart() -> None:
    passes = PassNumbers(100, 2)
    assert [passes.number(pid, count) for pid, count in ((8, 0), (9, 0), (8, 1), (9, 7))] == [100, 101, 102, 115]
    assert passes.number(10, 0) is None  # more processes than there should be
    assert PassNumbers(0, 1).number(8, 5) == 5


def test_tail_is_what_was_chosen_beyond_the_output() -> None:
    entries = [prefill(0, 5), verify(5, 1, 60), verify(7, 2, 70)]  # tokens 6, 7 are 60, 61; 8, 9, 10 are 70, 71, 72
    assert tail_of(entries, 9) == (71, 72)
    assert tail_of(entries, 11) == ()
    assert tail_of([*entries, verify(10, 0, 90)], 10) == (72, 90)  # the verify that overlapped the end goes on with it
    assert tail_of([*entries, prefill(0, 8)], 9) == ()  # begun anew: what came later is void


def test_histograms_agree_but_for_zeros_at_the_end() -> None:
    assert same_histogram((3, 1), (3, 1, 0, 0)) and not same_histogram((3, 1), (3, 1, 1))


# ---- files ----


def write_one(folder: Path, entry: Entry, first: int = 0) -> Path:
    spans = [(entry.rid, entry.start, entry.rows, 0)]
    _, tensors = prefill_rows(spans, entry.rows, TAPS, WIDTH, forward(entry.rows, 1, first))
    write_row_file(folder, 3, 1, [entry], {name: [part] for name, part in tensors.items()})
    return folder / row_file_names(folder)[0]


def test_final_stays_with_the_logits_when_rows_are_computed_again(tmp_path: Path) -> None:
    # L = 2, tokens 0 to 5: a prefill, a verify of rows 2 and 3 with logits, then all of rows 0 to 4 again
    recorded = []
    for number, (start, count, logits, shift) in enumerate([(0, 2, 1, 0), (2, 2, 2, 10), (0, 5, 1, 20)]):
        cpu = forward(count, logits, shift) | {"input_ids": torch.arange(start, start + count, dtype=torch.int32)}
        _, tensors = prefill_rows([("r", start, count, 0)], count, TAPS, WIDTH, cpu)
        kind = Entry("r", "prefill", start, count, logits, forward_rows=count + 5)
        write_row_file(tmp_path, 3, number, [kind], {name: [part] for name, part in tensors.items()})
        file = read_row_file(tmp_path / row_file_names(tmp_path)[-1], (*TAPS, "final"), WIDTH)
        recorded.append(Recorded(file, 0))
    joined = join("r", [0, 1], [2, 3, 4, 5], recorded, ("2", "final"))
    assert joined.taps["2"][:, 0].tolist() == [120, 121, 122, 123, 124]
    assert joined.taps["final"][:, 0].tolist() == [20, 1, 10, 11, 24]
    assert joined.pieces == ((2, 10),) and joined.pid == 3


def test_a_feed_counts_beside_the_rows_it_was_made_of(tmp_path: Path) -> None:
    """Rows that a later prefill computed anew had other bits when the draft was fed them; so had those after it."""
    recorded = []
    steps = [
        (prefill(0, 6), None), (None, (0, [1, 3, 5])), (verify(6, 1), None),  # fed rows 1, 3, 5
        (prefill(2, 9), None), (None, (10, [2, 8])),  # put back: rows 2 to 8 anew
    ]  # fmt: skip
    for number, (entry, feed) in enumerate(steps):
        if feed is not None:
            (entry,), tensors = feed_rows([("r", feed[1])], fed(feed[0], len(feed[1])))
        else:
            assert entry is not None
            _, tensors = prefill_rows([], 0, TAPS, WIDTH, forward(entry.rows, entry.logits))
        write_row_file(tmp_path, 3, number, [entry], {name: [part] for name, part in tensors.items()})
        recorded.append(Recorded(read_row_file(tmp_path / row_file_names(tmp_path)[-1], TAPS, WIDTH), 0))
    found = feed_of(recorded, 12)
    assert found is not None
    assert (found.row_F.tolist(), found.token_F.tolist()) == ([1, 2, 8], [1, 11, 12])
    assert found.features_FW[:, 0].tolist() == [0, 10, 11]
    first = feed_of(recorded[:3], 4)
    assert first is not None and first.row_F.tolist() == [1, 3]  # of the rows that there are
    assert feed_of(recorded[:1], 12) is None


def test_a_feed_is_due_after_each_prefill_from_the_start() -> None:
    feed, again = Entry("r", "feed", 0, 0, 0, fed=[1]), prefill(0, 9)
    assert lacks_feed([prefill(0, 4)]) and lacks_feed([prefill(0, 4), prefill(4, 2)])
    assert not lacks_feed([prefill(0, 4), feed, prefill(4, 2), verify(6, 1)])
    assert lacks_feed([prefill(0, 4), feed, verify(6, 1), again])  # put back, its first feed counts no more
    assert not lacks_feed([prefill(0, 4), feed, again, feed]) and not lacks_feed([prefill(8, 4)])


def test_missing_rows_are_seen(tmp_path: Path) -> None:
    file = read_row_file(write_one(tmp_path, prefill(2, 6)), TAPS, WIDTH)
    assert first_missing([Recorded(file, 0)], 6) == 0
    whole = read_row_file(write_one(tmp_path, prefill(0, 4)), TAPS, WIDTH)
    assert first_missing([Recorded(whole, 0)], 6) == 4 and first_missing([Recorded(whole, 0)], 4) is None


@pytest.mark.parametrize("cut", [0, 7, 8, 60, -1])
def test_torn_rows_are_refused_by_name(tmp_path: Path, cut: int) -> None:
    path = write_one(tmp_path, prefill(0, 4))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TraceCorruptError, match=path.name):
        read_row_file(path, TAPS, WIDTH)


@pytest.mark.parametrize(
    "entry",
    [
        Entry("r", "prefill", 0, 5, 1, forward_rows=5),  # more rows than there are
        Entry("r", "prefill", 0, 4, 5, forward_rows=4),  # more logits than rows
        Entry("r", "prefill", 0, 4, 1, forward_rows=3),  # more rows than its forward
        Entry("r", "verify", 0, 4, 1, accepted=1, chosen=[1, 2], batch=1),
        Entry("r", "verify", 0, 4, 1, accepted=3, chosen=[1, 2, 3, 4], batch=2, batch_row=2),
        Entry("r", "guess", 0, 4, 1),
        Entry("r", "prefill", 0, 4, 1, fed=[2], forward_rows=4),
        Entry("r", "feed", 0, 4, 1, fed=[2]),
        Entry("r", "feed", 0, 0, 0),
        Entry("r", "prefill", 0, 4, 1, forward_rows=4, left_out=5),
        Entry("r", "prefill", 0, 4, 1, forward_rows=4, left_out=1),  # more rows with taps than it has
        Entry("r", "decode", 0, 4, 1, left_out=4),
    ],
)
def test_entries_that_disagree_are_refused(tmp_path: Path, entry: Entry) -> None:
    _, tensors = prefill_rows([("r", 0, 4, 0)], 4, TAPS, WIDTH, forward(4, 1))
    write_row_file(tmp_path, 3, 1, [entry], {name: [part] for name, part in tensors.items()})
    with pytest.raises(TraceCorruptError):
        read_row_file(tmp_path / row_file_names(tmp_path)[0], TAPS, WIDTH)


def test_rows_with_logits_have_taps_unless_none_has(tmp_path: Path) -> None:
    """A client wants the last rows of a prompt: a row that it does not want cannot have chosen an output token."""
    for number, left_out in enumerate((2, 3, 4)):
        _, tensors = prefill_rows([("r", 0, 4, left_out)], 4, TAPS, WIDTH, forward(4, 2))
        kept = {name: [part[left_out:] if name.startswith("tap.") else part] for name, part in tensors.items()}
        entry = Entry("r", "prefill", 0, 4, 2, forward_rows=4, left_out=left_out)
        write_row_file(tmp_path, 3, number, [entry], kept)
    first, second, third = (tmp_path / name for name in row_file_names(tmp_path))
    assert read_row_file(first, TAPS, WIDTH).entries[0].kept == 2 and read_row_file(third, TAPS, WIDTH)
    with pytest.raises(TraceCorruptError, match="logits is 2, must be at most its 1 rows with taps"):
        read_row_file(second, TAPS, WIDTH)


def test_final_begins_where_the_rows_that_are_kept_begin(tmp_path: Path) -> None:
    """The last 3 of 6 rows have logits, and the last 2 alone are wanted."""
    _, tensors = prefill_rows([("r", 0, 6, 0)], 6, TAPS, WIDTH, forward(6, 3))
    entry = Entry("r", "prefill", 0, 6, 3, forward_rows=6)
    write_row_file(tmp_path, 3, 1, [entry], {name: [part] for name, part in tensors.items()})
    file = read_row_file(tmp_path / row_file_names(tmp_path)[0], (*TAPS, "final"), WIDTH)
    joined = join("r", [0, 1, 2, 3, 4, 5], [6], [Recorded(file, 0)], ("2", "final"), 4)
    assert joined.taps["final"][:, 0].tolist() == [4, 5] and joined.taps["2"][:, 0].tolist() == [104, 105]


def test_manifest_goes_and_comes(tmp_path: Path) -> None:
    manifest = Manifest("0" * 16, 12, "host", "recording", True, no_feed="x", wiring=("embed", "3"), details={"a": "b"})
    write_manifest(tmp_path, manifest)
    assert read_manifests(tmp_path) == [manifest]
    text = (tmp_path / "rank-12.json").read_text()
    (tmp_path / "rank-12.json").write_text(text.replace('"version": 3', '"version": 2'))
    with pytest.raises(CaptureError, match="same replay"):
        read_manifests(tmp_path)
    (tmp_path / "rank-12.json").write_text(text[:50])
    with pytest.raises(TraceCorruptError, match="rank-12"):
        read_manifests(tmp_path)


@pytest.mark.parametrize("launch", ["", "../../etc", "0123456789abcdeF", "0123456789abcdef0"])
def test_launch_ids_never_lead_elsewhere(tmp_path: Path, launch: str) -> None:
    with pytest.raises(CaptureError, match="no launch id"):
        launch_folder(tmp_path, launch)


def test_a_new_start_clears_what_earlier_ones_left(tmp_path: Path) -> None:
    old, new = (launch_folder(tmp_path, digit * 16) for digit in "01")
    for folder in (old, new):
        folder.mkdir(parents=True)
        write_one(folder, prefill(0, 4))
    (tmp_path / "spool" / "notes").mkdir()
    (tmp_path / "spool" / ("2" * 16)).symlink_to(new)
    drop_launches(tmp_path, "1" * 16)
    assert not old.exists() and len(row_file_names(new)) == 1 and (tmp_path / "spool" / "notes").exists()


def test_secrets_are_not_kept() -> None:
    typed = ["--api-key", "k", "--admin-api-key=k", "--port", "1", "--speculative-num-draft-tokens", "6"]
    assert without_secrets(typed) == [
        "--api-key", "***", "--admin-api-key=***", "--port", "1", "--speculative-num-draft-tokens", "6",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "option", ["--api", "--api-k", "--ap", "--admin", "--admin-api-ke", "--ad", "--ssl-keyfile-p", "--ssl-keyfile-pass"]
)
def test_beginnings_of_secret_options_hide_their_values_too(option: str) -> None:
    assert without_secrets([option, "k", "--port", "1"]) == [option, "***", "--port", "1"]
    assert without_secrets([f"{option}=k=", "--port", "1"]) == [f"{option}=***", "--port", "1"]
    assert without_secrets(["--", "a", "--attention-backend", "b"]) == ["--", "a", "--attention-backend", "b"]
