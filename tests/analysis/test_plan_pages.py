"""/metrics pages as timings: an interval in which one batch decoded all the time, and the refusal of every other.

The pages are written here from rounds that are counted by hand, in the names and labels that the engines give them.
"""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.page_server import page_server

from replay.analysis.plan.ask import Question, read_costs
from replay.analysis.plan.pages import is_page, timings_of_pages
from replay.analysis.plan.settings import PLAIN, Load, Setting, make_setting
from replay.cli.app import cli
from replay.errors import UsageError

SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="a{b}\\"c",tp_rank="0"} %(running)d.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="a{b}\\"c"} %(prompt)d.0
sglang:realtime_tokens_total{mode="decode",model_name="a{b}\\"c"} %(tokens)d.0
sglang:num_requests_total{model_name="a{b}\\"c"} %(ended)d.0
sglang:inter_token_latency_seconds_sum{model_name="a{b}\\"c"} %(seconds)r
sglang:inter_token_latency_seconds_bucket{le="0.1",model_name="a{b}\\"c"} 1.0
sglang:inter_token_latency_seconds_count{model_name="a{b}\\"c"} %(tokens)d.0
sglang:gen_throughput{model_name="a{b}\\"c"} %(speed)r
sglang:spec_accept_length{model_name="a{b}\\"c"} %(accept)r
sglang:spec_num_steps{model_name="a{b}\\"c"} %(steps)d.0
sglang:spec_num_draft_tokens{model_name="a{b}\\"c"} %(nodes)d.0
"""
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} %(running)d.0
vllm:prompt_tokens_total{engine="0",model_name="m"} %(prompt)d.0
vllm:generation_tokens_total{engine="0",model_name="m"} %(tokens)d.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} %(ended)d.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} %(seconds)r
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} %(count)d.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %(drafts)d.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} %(drafted)d.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} %(accepted)d.0
"""
START = dict(running=4, prompt=900, tokens=5000, ended=12, seconds=80.0, accept=2.5, steps=3, nodes=4, speed=90.5)
START |= dict(count=4000, drafts=3000, drafted=9000, accepted=2000)


def pages(form: str, **later: Any) -> list[str]:
    """Two pages: ``later`` is added to the first one's counters, gauges are as given."""
    gauges = ("running", "accept", "steps", "nodes")
    first = START | {name: later.pop(f"first_{name}") for name in gauges if f"first_{name}" in later}
    later = {"speed": 4.5} | later
    second = first | {name: value if name in gauges else first[name] + value for name, value in later.items()}
    return [form % first, form % second]


def read(texts: list[str], **said: float) -> tuple[Setting, Load, float, float | None]:
    (one,) = timings_of_pages(texts, "page", said)
    return one.setting, one.load, one.seconds, one.accept_length


def test_a_chain_of_sglang() -> None:
    """20 rounds of 4 requests, 30 ms each, 2.5 tokens a round: 200 tokens, 2.4 s of waiting."""
    told = read(pages(SGLANG, tokens=200, seconds=4 * 20 * 0.030))
    assert told == (make_setting(3), Load(4), pytest.approx(0.030), 2.5)


def test_requests_of_each_priority_stand_beside_their_sum() -> None:
    texts = pages(SGLANG, tokens=200, seconds=2.4)
    counts = 'sglang:num_running_reqs{model_name="m",priority="%d"} 2.0\n'
    total = [text.replace('tp_rank="0"}', 'priority="",tp_rank="0"}') + counts % 0 + counts % 1 for text in texts]
    assert read(total) == read(texts)


def test_sglang_without_drafting() -> None:
    quiet = dict(first_accept=0.0, first_steps=0, first_nodes=0, first_running=2)
    assert read(pages(SGLANG, tokens=100, seconds=2 * 50 * 0.02, **quiet)) == (PLAIN, Load(2), pytest.approx(0.02), 1.0)


def test_an_accept_length_that_moves_is_trusted_less() -> None:
    (one,) = timings_of_pages(pages(SGLANG, tokens=200, seconds=2.4, accept=2.0), "page", {})
    assert one.error == pytest.approx(0.25)


def test_a_tree_needs_its_topk() -> None:
    tree = pages(SGLANG, tokens=200, seconds=2.4, first_nodes=16)
    with pytest.raises(UsageError, match="page:topk=N"):
        read(tree)
    assert read(tree, topk=4)[0] == Setting(3, 4, 16)


@pytest.mark.parametrize("observations", [80, 200])
def test_vllm_by_both_ways_of_counting_its_histogram(observations: int) -> None:
    """20 rounds of 4 requests, 30 ms each, 3 drafted and 1.5 accepted: one observation a round, or one a token."""
    later = dict(tokens=200, drafts=80, drafted=240, accepted=120, seconds=2.4, count=observations)
    assert read(pages(VLLM, **later)) == (make_setting(3), Load(4), pytest.approx(0.030), 2.5)


def test_vllm_without_drafting() -> None:
    assert read(pages(VLLM, tokens=100, seconds=2.0)) == (PLAIN, Load(4), pytest.approx(0.02), 1.0)


@pytest.mark.parametrize(
    ("form", "later", "words"),
    [
        (VLLM, {"running": 5}, "4 requests ran at its beginning and 5 at its end"),
        (SGLANG, {"first_running": 0}, "0 requests ran"),
        (SGLANG, {"speed": 0.0}, "logged no decode in it"),
        (SGLANG, {"prompt": 7}, "7 tokens prefilled"),
        (SGLANG, {"ended": 1}, "1 request ended"),
        (SGLANG, {"tokens": 0, "seconds": 0.0}, "no token came"),
        (SGLANG, {"seconds": -5.0}, "counters fall"),
        (SGLANG, {"first_accept": 0.0, "accept": 2.0}, "has not said its accept length yet"),
        (SGLANG, {"first_steps": 0, "first_nodes": 0}, "type page:steps=N"),
        (SGLANG, {"first_accept": 9.0}, "page has accept length 9, and 3 steps accept 4 at most"),
        (SGLANG, {"accept": 4.01}, "accept length 4.01"),
        (VLLM, {"tokens": 500, "drafts": 80, "drafted": 240, "accepted": 420}, "accept length 6.25"),
        (VLLM, {"prompt": 7}, "7 tokens prefilled"),
        (VLLM, {"drafts": 80, "drafted": 200, "accepted": 120}, "2.50 tokens on average"),
        (VLLM, {"drafts": 40, "drafted": 120, "accepted": 120}, "80 rounds ran in it and 40 of them drafted"),
    ],
)  # fmt: skip
def test_an_interval_that_says_no_time_of_a_round_is_refused(form: str, later: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(pages(form, **({"tokens": 200, "seconds": 2.4} | later)))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"steps": 1.0, "draft_tokens": 2.0}, "drafted steps=3, and steps=1 was typed"),
        ({"steps": 1.0}, "drafted steps=3, and steps=1 was typed"),
        ({"steps": 0.0}, "steps is 0; possible are whole numbers from 1"),
        ({"draft_tokens": 16.0}, "drafted draft_tokens=4, and draft_tokens=16 was typed"),
    ],
)
def test_what_contradicts_the_page_is_refused(said: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(pages(SGLANG, tokens=200, seconds=2.4), **said)
    assert read(pages(SGLANG, tokens=200, seconds=2.4), steps=3)[0] == make_setting(3)


def test_an_accept_length_above_by_its_rounding_is_the_most() -> None:
    assert read(pages(SGLANG, tokens=200, seconds=2.4, first_accept=4.0, accept=4.004))[3] == 4.0


def test_of_several_intervals_the_clean_ones_are_taken() -> None:
    first, second = pages(SGLANG, tokens=200, seconds=2.4)
    between = SGLANG % (START | {"tokens": 5100, "seconds": 80.9, "prompt": 950})
    found = timings_of_pages([first, between, first, second, second], "page", {})
    assert [one.seconds for one in found] == [pytest.approx(0.030)]


def test_an_interval_goes_on_until_the_server_has_logged() -> None:
    """The gauges of the first page may be older than the batch; those of the last are not."""
    old = dict(tokens=5080, seconds=81.0, running=1)
    middle, last = SGLANG % (START | old), pages(SGLANG, tokens=200, seconds=2.4)[1]
    (one,) = timings_of_pages([SGLANG % (START | {"running": 1}), middle, last], "page", {})
    assert (one.load.batch, one.seconds) == (4, pytest.approx(0.030))


def test_a_single_page_says_nothing_and_pages_of_several_servers_neither() -> None:
    with pytest.raises(UsageError, match="is one page, which counts since the server started"):
        timings_of_pages([SGLANG % START], "page", {})
    two = pages(VLLM, tokens=100, seconds=2.0)
    two = [page + page.replace('engine="0"', 'engine="1"') for page in two]
    with pytest.raises(UsageError, match="several servers"):
        timings_of_pages(two, "page", {})
    with pytest.raises(UsageError, match="leave batch out"):
        timings_of_pages(pages(VLLM, tokens=100, seconds=2.0), "page", {"batch": 8})


@pytest.mark.parametrize("text", ["", "# sglang:", "[2026] sglang:num_running_reqs 4", '{"a": "sglang:x 1"}', "x 1\n"])
def test_other_text_is_no_page(text: str) -> None:
    assert not is_page(text)


def test_two_files_are_one_series(tmp_path: Path) -> None:
    names = [tmp_path / "before.txt", tmp_path / "after.txt"]
    for name, text in zip(names, pages(SGLANG, tokens=200, seconds=2.4), strict=True):
        name.write_text(text)
    (one,) = read_costs(Question(benches=[f"{names[0]},{names[1]}"])).timings
    assert one.seconds == pytest.approx(0.030)
    with pytest.raises(UsageError, match="is one page"):
        read_costs(Question(benches=[str(names[0])]))
    (tmp_path / "log.txt").write_text("hello")
    with pytest.raises(UsageError, match="not all are /metrics pages"):
        read_costs(Question(benches=[f"{names[0]},{tmp_path / 'log.txt'}"]))


def test_an_address_is_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.capture.client.metrics.time.sleep", lambda _: None)
    with page_server(pages(SGLANG, tokens=200, seconds=2.4)) as url:
        typed = ["plan", "--bench", f"{url}/metrics:seconds=1", "--time", "batch=4,ms=20"]
        done = CliRunner().invoke(cli, typed)
        gone = CliRunner().invoke(cli, ["plan", "--bench", f"{url}/none"])
    assert done.exit_code == 0 and "30.00" in done.output, done.output
    assert gone.exit_code == 1 and gone.output.startswith("replay: ")
    addresses = ("http://", "https://[::1/metrics", "HTTP://127.0.0.1:9/metrics")
    for typed in (
        *addresses,
        "http://127.0.0.1:9/metrics",
        "http:///metrics",
        f"{url}/metrics:seconds=0",
        f"{url}:a=1",
    ):
        refused = CliRunner().invoke(cli, ["plan", "--bench", typed])
        assert refused.exit_code == 1 and "Traceback" not in refused.output and refused.output.startswith("replay: ")
        assert "--server" not in refused.output and "file" not in refused.output


def test_a_name_that_is_empty_or_there_twice_is_refused(tmp_path: Path) -> None:
    names = [tmp_path / "before.txt", tmp_path / "after.txt"]
    for name, text in zip(names, pages(SGLANG, tokens=200, seconds=2.4), strict=True):
        name.write_text(text)
    (tmp_path / "link.txt").symlink_to(names[0])
    for typed in (f"{names[0]},", ",", f",{names[1]}"):
        with pytest.raises(UsageError, match="a file without a name"):
            read_costs(Question(benches=[typed]))
    both = f"{names[0]},{names[1]}"
    for benches in ([both, both], [f"{names[0]},{tmp_path / 'link.txt'}"], [both, str(tmp_path / "." / "after.txt")]):
        with pytest.raises(UsageError, match="twice, which is one measurement"):
            read_costs(Question(benches=benches))
