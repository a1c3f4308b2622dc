"""The self-check: silent about a good trace, and one sentence for each thing that was planted."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.trace_maker import K, V, changed, make_header, make_request, make_requests, make_weights, write_trace

from replay.traces import check_lm_head
from replay.traces.check import TraceFinding, check_trace
from replay.traces.header import TapInfo
from replay.traces.lm_head import recompute, ulp
from replay.traces.reader import Trace
from replay.traces.writer import CapturedRequest, ServerCounters, TraceWriter


def check(
    tmp_path: Path, *requests: CapturedRequest, dtype: str = "bfloat16", weights: bool = True
) -> list[TraceFinding]:
    folder = write_trace(tmp_path / "t", [requests], header=make_header(dtype), weights=weights)
    return list(check_trace(Trace.open(folder)))


def grave(findings: list[TraceFinding]) -> list[TraceFinding]:
    return [finding for finding in findings if finding.severity != "note"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_good_trace(tmp_path: Path, dtype: str, tied: bool) -> None:
    requests = [
        make_request(f"r{seed}", seed, prompt=1 + seed % 5, output=1 + seed % 7, dtype=dtype) for seed in range(40)
    ]
    folder = write_trace(tmp_path / "t", [requests], header=make_header(dtype, tied=tied))
    findings = list(check_trace(Trace.open(folder)))
    assert grave(findings) == []
    total = sum(len(request.output_ids) for request in requests)
    assert findings[-1].what.startswith(
        f"lm_head(final) was computed for {total} of {total} output positions, {total} of"
    )


def test_only_so_many_rows(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", [[make_request("a", 1, output=100), make_request("b", 2, output=20)]])
    assert "computed for 12 of 120 output positions" in list(check_trace(Trace.open(folder), rows=12))[-1].what


def test_batches_do_not_change_the_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(9)
    requests[4] = changed(requests[4], logsumexp=requests[4].logsumexp + 3)
    folder = write_trace(tmp_path / "t", [requests])
    at_once = list(check_trace(Trace.open(folder)))
    monkeypatch.setattr(check_lm_head, "BATCH_ROWS", 2)
    assert list(check_trace(Trace.open(folder))) == at_once


def wrong_argmax(request: CapturedRequest) -> CapturedRequest:
    """Another token's id stands first in row 1, and was emitted."""
    ids = request.topk_ids.clone()
    ids[1, 0] = next(token for token in range(V) if token not in ids[1])
    return changed(request, topk_ids=ids, output_ids=ids[:, 0].tolist())


def wrong_token(request: CapturedRequest) -> CapturedRequest:
    return changed(request, output_ids=[*request.output_ids[:2], int(request.topk_ids[2, 3]), *request.output_ids[3:]])


def wrong_sum(request: CapturedRequest) -> CapturedRequest:
    return changed(request, logsumexp=request.logsumexp + torch.tensor([0.0, 0.0, 0.5, 0.0]))


def wrong_probabilities(request: CapturedRequest) -> CapturedRequest:
    return changed(request, topk_logprobs=request.topk_logprobs - 1.0)


def rows_off_by_one(request: CapturedRequest) -> CapturedRequest:
    return changed(request, taps={**request.taps, "final": request.taps["final"].roll(1, 0)})


def zero_rows(request: CapturedRequest) -> CapturedRequest:
    values = request.taps["2"].clone()
    values[3:5] = 0
    return changed(request, taps={**request.taps, "2": values})


def token_twice(request: CapturedRequest) -> CapturedRequest:
    ids = request.topk_ids.clone()
    ids[0, 2] = ids[0, 3]
    return changed(request, topk_ids=ids)


def too_probable(request: CapturedRequest) -> CapturedRequest:
    return changed(request, topk_logprobs=torch.zeros(4, K))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            wrong_argmax,
            "lm_head(final) has another argmax than recorded at 1 of 4 positions, first at output token 1; ",
        ),
        (wrong_token, "the emitted token is not the recorded argmax at 1 of 4 positions, first at output token 2; "),
        (wrong_sum, "the recorded log-sum-exp is not lm_head(final)'s at 1 of 4 positions, first at output token 2; "),
        (
            wrong_probabilities,
            "recorded log-probabilities are not lm_head(final)'s at 4 of 4 positions, first at output ",
        ),
        (
            rows_off_by_one,
            "lm_head(final) has another argmax than recorded at 4 of 4 positions, first at output token 0",
        ),
        (zero_rows, "2 of 6 rows of 2 are all zero, first row 3"),
        (token_twice, "topk_ids names one token twice for one position"),
        (too_probable, "the recorded probabilities of the top 4 tokens add up to 4"),
    ],
)
def test_planted(tmp_path: Path, fault: Callable[[CapturedRequest], CapturedRequest], says: str) -> None:
    findings = grave(check(tmp_path, make_request("good", 1), fault(make_request("bad", 2)), make_request("also", 3)))
    assert {(finding.severity, finding.request_id) for finding in findings} == {("error", "bad")}
    assert findings[0].what.startswith(says)


def test_rows_of_another_request(tmp_path: Path) -> None:
    """The batch was mixed up: the second request bears the first one's rows. A shared prompt alone is no finding."""
    one = make_request("one", 1, prompt=4)
    same_prompt = changed(make_request("two", 2, prompt=4), prompt_ids=one.prompt_ids)
    shared = {tap: torch.cat([one.taps[tap][:4], same_prompt.taps[tap][4:]]) for tap in one.taps}
    logits = make_request("two", 1, prompt=4)
    # the first output token is chosen by row 3, which is now the first request's
    second = changed(
        same_prompt,
        taps=shared,
        topk_ids=torch.cat([logits.topk_ids[:1], same_prompt.topk_ids[1:]]),
        topk_logprobs=torch.cat([logits.topk_logprobs[:1], same_prompt.topk_logprobs[1:]]),
        logsumexp=torch.cat([logits.logsumexp[:1], same_prompt.logsumexp[1:]]),
        output_ids=[logits.output_ids[0], *same_prompt.output_ids[1:]],
    )
    assert grave(check(tmp_path / "a", one, second)) == []
    mixed_up = changed(make_request("two", 1, prompt=4), prompt_ids=[token ^ 1 for token in one.prompt_ids])
    assert grave(check(tmp_path / "b", one, mixed_up)) == [
        TraceFinding(
            "error",
            "two",
            "7 rows of final are bit for bit those of request 'one', though the tokens before them differ",
        )
    ]


def near_tie(request: CapturedRequest, lm_head: torch.Tensor) -> CapturedRequest:
    """Row 0's best two tokens share one lm_head row, so either may be recorded as first."""
    first, second = request.topk_ids[0, :2].tolist()
    lm_head[second] = lm_head[first]
    made = make_request(request.request_id, 5, lm_head=lm_head)
    ids = made.topk_ids.clone()
    ids[0, :2] = ids[0, :2].flip(0)
    return changed(made, topk_ids=ids, output_ids=[int(ids[0, 1]), *ids[1:, 0].tolist()])


def test_near_ties_are_counted_and_not_failed(tmp_path: Path) -> None:
    lm_head = make_weights()
    request = near_tie(make_request("tie", 5, lm_head=lm_head), lm_head)
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        writer.write_target_weights(lm_head, None)
        writer.add([request])
        writer.finish()
    findings = list(check_trace(Trace.open(tmp_path / "t")))
    assert grave(findings) == []
    assert "near ties, the two best logits within one bfloat16 ulp, are 1, of which" in findings[-1].what
    assert findings[-1].what.endswith("1 as emitted token")


def test_sampled_and_forced_tokens_are_not_compared(tmp_path: Path) -> None:
    sampled = changed(wrong_token(make_request("sampled", 1)), temperature=0.8)
    forced = changed(wrong_token(make_request("forced", 2)), source="forced", finish_reason="forced")
    findings = check(tmp_path, sampled, forced)
    assert grave(findings) == []
    assert "8 of 8 output positions, 0 of them greedy" in findings[-1].what


def test_without_weights(tmp_path: Path) -> None:
    (finding,) = grave(check(tmp_path, make_request("a", 1), weights=False))
    assert finding.severity == "warning"
    assert finding.what.startswith("lm_head(final) was not checked: ")


def test_what_the_server_counted(tmp_path: Path) -> None:
    request = changed(make_request("a", 1, output=9), server=ServerCounters(7, 3, [1, 1], 0))
    assert [finding.what for finding in grave(check(tmp_path, request))] == [
        "9 output tokens, though max_new_tokens was 8",
        "the server counted 7 output tokens, the trace holds 9",
        "the server counted 3 verify rounds, its histogram adds up to 2",
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_ulp_is_the_distance_to_the_next_number(dtype: str) -> None:
    """Against the next bit pattern, which is the next number of that sign."""
    kind = getattr(torch, dtype)
    values = torch.tensor([1.0, 1.5, 1.75, 2.0, 3.0, 16.0, 31.0, 0.25, 100.0]).to(kind)
    bits = torch.int32 if dtype == "float32" else torch.int16
    following = (values.view(bits) + 1).view(kind)
    assert torch.equal(ulp(values.float(), dtype), following.float() - values.float())
    assert torch.equal(ulp(-values.float(), dtype), ulp(values.float(), dtype))


def test_slices_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliced and running, against one plain matrix product in float64."""
    from replay.traces import lm_head

    final, weight = make_weights(seed=3)[:10], make_weights()
    ids = torch.arange(30).reshape(10, 3) * 2
    monkeypatch.setattr(lm_head, "_WEIGHT_BYTES", 4 * 16 * 7)  # seven vocabulary rows a slice
    made = recompute(final, weight, ids, dtype="bfloat16")
    logits = final.double() @ weight.double().T
    assert made.best_id.tolist() == logits.argmax(1).tolist()
    expected = {"best": logits.max(1).values, "second": logits.topk(2).values[:, 1]}
    expected |= {"logsumexp": logits.logsumexp(1), "asked": logits.gather(1, ids)}
    for name, values in expected.items():
        torch.testing.assert_close(getattr(made, name), values.float(), rtol=1e-6, atol=1e-5)


def test_the_bound_holds_and_is_not_idle() -> None:
    """A bfloat16 product stays within the tolerance of every logit; one and a half ulps more would not."""
    final, weight = make_weights(seed=3), make_weights()
    ids = torch.arange(V).expand(V, V)
    made = recompute(final, weight, ids, dtype="bfloat16")
    off = ((final @ weight.T).float() - made.asked).abs()
    assert bool((off <= made.tolerance[:, None]).all())
    peak = made.asked.abs().amax(1)
    assert bool((made.tolerance < peak * 2.0**-7 + 1e-3).all())


PEAK = """
import resource, sys
from replay.traces.check import check_trace
from replay.traces.reader import Trace
for folder in sys.argv[1:]:
    print(sum(finding.severity == "error" for finding in check_trace(Trace.open(folder))))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_stays_flat(tmp_path: Path) -> None:
    """Checking 48 MiB peaks like checking 4 MiB, within 8 MiB."""
    width, lm_head = 1024, torch.randn(V, 1024).bfloat16()
    header = make_header()
    target = dataclasses.replace(header.target, hidden_size=width)
    taps = {tap: TapInfo("bfloat16", width) for tap in header.taps}
    header = dataclasses.replace(header, target=target, taps=taps)
    requests = [wide_request(f"{number}", lm_head) for number in range(12)]
    for name, batches in (("small", [requests[:1]]), ("large", [requests[:6], requests[6:]])):
        with TraceWriter.create(tmp_path / name, header) as writer:
            writer.write_target_weights(lm_head, None)
            for batch in batches:
                writer.add(batch)
            writer.finish()
    command = [sys.executable, "-I", "-c", PEAK, tmp_path / "small", tmp_path / "large"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    small_errors, small, large_errors, large = map(int, out)
    assert small_errors == large_errors == 0
    assert large - small < 8


def wide_request(name: str, lm_head: torch.Tensor) -> CapturedRequest:
    """1024 rows as wide as ``lm_head``, its logits summary true."""
    rows = torch.randn(1024, lm_head.shape[1]).bfloat16()
    logits = (rows[-4:] @ lm_head.T).float()
    top = logits.topk(K, dim=1)
    return changed(
        make_request(name, 1, prompt=1021),
        taps={"2": rows, "final": rows},
        topk_ids=top.indices.to(torch.int32),
        topk_logprobs=top.values - logits.logsumexp(1, keepdim=True),
        logsumexp=logits.logsumexp(1),
        output_ids=top.indices[:, 0].tolist(),
    )


def test_a_request_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    requests = [make_request("a", 1), make_request("b", 2)]
    folder = write_trace(tmp_path / "t", [requests[:1], requests[1:]])
    path = folder / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-2:] = b"\xc0\x7f"  # the last value of the last tap is NaN
    path.write_bytes(data)
    findings = list(check_trace(Trace.open(folder)))
    assert [(finding.request_id, finding.severity) for finding in grave(findings)] == [(None, "error"), ("a", "error")]
    assert "tap.final holds NaN or Inf in row 5 of request 'a'" in grave(findings)[1].what
    assert "4 of 4 output positions" in findings[-1].what
