"""What prompts have in common is computed once by `capture --model`: held against the same capture without prefixes,
and the plan of prefixes against what each of its words says.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_target import tiny
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from replay.capture.local import prefixes
from replay.capture.local.prefixes import LEAST, Prefix, plan_prefixes
from replay.capture.local.record import capture_local
from replay.capture.local.target import LocalTarget
from replay.capture.options import CaptureOptions
from replay.traces.reader import Trace

TAPS = ("1", "2", "final")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference in any row, against that row's largest value."""
    return float(((a.float() - b.float()).abs().amax(-1) / b.float().abs().amax(-1)).max())


def prompts() -> list[dict[str, Any]]:
    """Two questions on one text of 140 tokens, one on 70 tokens of it, two runs of turns, and one like no other."""
    text = [(11 * i + i * i // 7) % 50 for i in range(220)]
    other = [(7 * i + 3) % 50 for i in range(200)]
    rows = [
        {"id": "one", "input_ids": [*text[:140], 3, 4, 5, 6, 7]},
        {"id": "two", "input_ids": [*text[:140], 9]},
        {"id": "short", "input_ids": [*text[:70], 44, 1, 2]},
        {"id": "turn 1", "input_ids": other[:90]},
        {"id": "turn 2", "input_ids": other[:170]},
        {"id": "turn 3", "input_ids": other},
        {"id": "alone", "input_ids": [5, 6, 7]},
        {"id": "given", "input_ids": [*text[:140], 8, 8], "output_ids": [1, 2, 3, 4]},
        {"id": "also given", "input_ids": [*text[:70], 1], "output_ids": [1]},
    ]
    return rows


def capture(folder: Path, kind: str, name: str, **changes: Any) -> Trace:
    if not (folder / "target").exists():
        tiny(folder / "target", kind, max_position_embeddings=300)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts()))
    options = CaptureOptions(
        model=str(folder / "target"), prompts=path, out=folder / name, taps="1,2", max_new_tokens=5, topk=4, **changes
    )
    capture_local(options, lambda event: None)
    return Trace.open(options.out)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_rows_are_those_of_whole_prompts(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 has learned positions; Gemma 2 has windows, so that nothing of it is computed ahead."""
    computed: list[int] = []
    real = LocalTarget.forward

    def forward(self: LocalTarget, ids_BS: torch.Tensor, *rest: Any) -> Any:
        computed.append(ids_BS.numel())
        return real(self, ids_BS, *rest)

    changes = {"final_logit_softcapping": None, "sliding_window": 20} if kind == "gemma2" else {}
    tiny(tmp_path / "target", kind, max_position_embeddings=300, **changes)
    monkeypatch.setattr(LocalTarget, "forward", forward)
    trace = capture(tmp_path, kind, "trace")
    together = sum(computed)
    computed.clear()
    monkeypatch.setattr(prefixes, "plan_prefixes", lambda prompts: [()] * len(prompts))
    whole = capture(tmp_path, kind, "whole", concurrency=1)
    assert kind == "gemma2" or together < sum(computed)
    names = whole.requests["request_id"].to_list()
    for index, name in enumerate(trace.requests["request_id"]):
        one, other = trace.read(index, TAPS), whole.read(names.index(name), TAPS)
        assert one.tokens.tolist() == other.tokens.tolist()
        assert all(relative(one.taps[tap], other.taps[tap]) < 1e-5 for tap in TAPS)
        assert torch.allclose(trace.logits(index)[1], whole.logits(names.index(name))[1], atol=1e-4)


def test_what_is_computed_once_is_stored_once(tmp_path: Path) -> None:
    """Whatever the batches are: each row of a prompt that another prompt begins with, from the first one on."""
    for concurrency in (1, 3, 8):
        trace = capture(tmp_path, "llama", f"trace {concurrency}", concurrency=concurrency)
        stored = Counter({record.request_id: record.prompt_tokens - record.shared for record in trace.records})
        text = stored["one"] + stored["two"] + stored["short"] + stored["given"] + stored["also given"]
        assert text == 140 + 5 + 1 + 3 + 2 + 1
        # The last row of a prompt runs alone; where that gives the bits of a longer prefill, it is stored once as well.
        assert 200 <= stored["turn 1"] + stored["turn 2"] + stored["turn 3"] <= 200 + 1 + 1


class Fake:
    """A target whose cache has one layer; its keys, values and rows are random."""

    device = torch.device("cpu")

    def new_cache(self) -> DynamicCache:
        cache = DynamicCache()
        cache.layers.append(DynamicLayer())
        return cache

    def forward(self, ids_1S: torch.Tensor, _mask: object, _positions: object, cache: DynamicCache) -> Any:
        new = torch.rand(1, 1, ids_1S.shape[1], 4)
        cache.update(new, new, 0)
        return {"final": torch.rand(1, ids_1S.shape[1], 8)}


def reachable(held: Iterable[Prefix | None]) -> int:
    """Bytes of the distinct tensors that prefixes keep alive."""
    found: dict[int, int] = {}
    for one in filter(None, held):
        layer = one.cache.layers[0]
        for tensor in (*one.rows["final"], layer.keys, layer.values):
            found[tensor.data_ptr()] = tensor.nbytes
    return sum(found.values())


def turns() -> dict[str, list[int]]:
    """Two conversations of ten turns, turn by turn."""
    texts = {"a": [3 * i % 50 for i in range(900)], "b": [7 * i % 50 for i in range(900)]}
    return {f"{name} {end}": text[:end] for end in range(100, 900, 80) for name, text in texts.items()}


@pytest.mark.parametrize("together", [1, 3, 20])
def test_all_prefixes_in_memory_are_counted_and_bounded(together: int) -> None:
    """Those that a batch goes on from as well, and rows that only another prefix's rows go on from."""
    asked = [*turns().items(), *reversed(turns().items())]
    most = 40_000  # of 20 prefixes that have ten times as much
    some = prefixes.Prefixes(Fake(), turns(), most)  # type: ignore[arg-type]
    computed = 0
    for start in range(0, len(asked), together):
        begun = some.of_batch(dict(asked[start : start + together]))
        computed += any(begun)
        held = some._held
        size = sum(one.bytes for one in held.values())
        assert reachable([*held.values(), *begun]) == size
        needed = {id(one): one for one in begun if one is not None}
        for one in [*needed.values()]:
            while one.before is not None:
                one = held[one.before]
                needed[id(one)] = one
        assert size <= max(most, sum(one.bytes for one in needed.values()))
    assert computed


def test_a_resumed_capture_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does one that can hold one prefix at a time."""
    whole = capture(tmp_path, "llama", "whole", concurrency=2)
    real = prefixes.Prefixes.of
    asked: list[str] = []

    def of(self: prefixes.Prefixes, name: str, prompt: Sequence[int]) -> Any:
        asked.append(name)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return real(self, name, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(prefixes.Prefixes, "of", of)
        with pytest.raises(Exception, match="--resume"):
            capture(tmp_path, "llama", "trace", concurrency=2)
    monkeypatch.setattr(prefixes.Prefixes.__init__, "__defaults__", (1,))
    trace = capture(tmp_path, "llama", "trace", concurrency=2, resume=True)
    assert trace.requests["request_id"].to_list() == whole.requests["request_id"].to_list()
    assert [record.shared for record in trace.records] == [record.shared for record in whole.records]
    for index in range(len(trace)):
        one, other = trace.read(index, TAPS), whole.read(index, TAPS)
        assert all(torch.equal(one.taps[tap], other.taps[tap]) for tap in TAPS)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=8))
def test_the_plan_is_what_its_words_say(parts: list[tuple[int, int, int]]) -> None:
    """With LEAST of 3: rising, at least LEAST apart, shared with another prompt, never the last token; and a prompt
    that has LEAST tokens or more in common with another one behind its last prefix has one more."""
    made: list[list[int]] = []
    for parent, keep, more in parts:
        begin = made[parent % len(made)][:keep] if made else []
        made.append([*begin, *[(len(made) * more + i) % 3 for i in range(more)]])
    with pytest.MonkeyPatch.context() as smaller:
        smaller.setattr(prefixes, "LEAST", 3)
        plan = plan_prefixes(made)
    for place, (prompt, cuts) in enumerate(zip(made, plan, strict=True)):
        ends = (0, *cuts)
        assert all(after - before >= 3 for before, after in itertools.pairwise(ends))
        assert ends[-1] < len(prompt)
        for cut in cuts:
            others = [other for other, text in enumerate(made) if other != place and text[:cut] == prompt[:cut]]
            assert any(cut in plan[other] for other in others)
        least = ends[-1] + 3
        beyond = [text for other, text in enumerate(made) if other != place and len(text) > least]
        assert len(prompt) <= least or not any(text[:least] == prompt[:least] for text in beyond)


def test_least_is_what_a_trace_shares() -> None:
    from replay.traces.sharing import BLOCK

    assert LEAST == BLOCK
