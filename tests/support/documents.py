"""Documents of every command, printed by it on small traces and rounds: what docs/json.md is held to."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.check_cases import CHAIN, EAGLE3, Case, ids, write_case
from support.dump_cases import make_target as make_llama
from support.dump_writers import run_target, stacked
from support.fake_server import FakeServer, fake_server, make_target
from support.heads import INVENTED, tiny_config, write_head
from support.report_cases import nothing, sweep
from support.rounds_maker import make_rounds, make_variant
from support.served_maker import HEAD, STEPS, WIDTH, WIRING, make_checkpoint, make_served
from support.timed_server import TimedServer, timed_server
from support.trace_maker import V, changed, make_four, make_header, make_request, make_weights, write_trace

from replay.analysis.diagnosis.breakdown import Depth, Profile, Stratum
from replay.analysis.diagnosis.document import to_json
from replay.analysis.diagnosis.evidence import Disturbance, Evidence
from replay.analysis.diagnosis.feed import Feeding, Slot
from replay.analysis.diagnosis.gain import Gain
from replay.analysis.diagnosis.scored import Scored, Unknown
from replay.analysis.diagnosis.verdict import Diagnosis
from replay.analysis.followed import Agreement
from replay.analysis.json_document import document
from replay.capture.plugin.server import Ready
from replay.cli.app import cli
from replay.traces.captured import CapturedRequest, ServerCounters
from replay.traces.rounds import Rounds
from replay.traces.rounds_file import write_rounds

Document = Mapping[str, Any]
HEAT = 2.5  # the invented target's logits are large


def no_constant(name: str) -> object:
    """For json.loads, which would take them."""
    raise ValueError(f"{name} is no JSON")


def read(text: str) -> Document:
    """One document and nothing else, as RFC 8259 has it."""
    found = json.loads(text, parse_constant=no_constant)
    assert isinstance(found, dict)
    return found


def run(*arguments: object, exit_code: int = 0) -> Document:
    """What the command prints with --json."""
    done = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert done.exit_code == exit_code, done.output
    return read(done.stdout)


# ---- what the commands run on ----


def counted_trace(folder: Path) -> Path:
    """Four greedy requests, with what a server counted of them."""
    counters = ServerCounters(completion_tokens=12, verify_rounds=8, histogram=(5, 2, 1), cached_tokens=0)
    return write_trace(folder, [[changed(request, server=counters) for request in make_four()]])


def _vllm_counters(folder: Path) -> Path:
    path = folder / "metrics"
    path.write_text("vllm:spec_decode_num_drafts_total 4.0\nvllm:spec_decode_num_accepted_tokens_total 2.0\n")
    return path


def served_like(folder: Path) -> Path:
    """One request more of the same target, of no category."""
    return write_trace(folder, [[changed(make_request("more", 9, output=9), category=None)]])


def sampled_trace(folder: Path) -> Path:
    """Four requests drawn at a temperature, every token's probability recorded."""
    header = make_header()
    header = replace(header, topk=V, capture=replace(header.capture, temperature=HEAT))
    return write_trace(folder, [[_drawn(f"r{seed}", seed) for seed in range(4)]], header=header)


def _drawn(name: str, seed: int) -> CapturedRequest:
    request = make_request(name, seed, prompt=2 + seed, output=20)
    logits = (request.taps["final"][len(request.prompt_ids) - 1 :] @ make_weights().T).float()
    drawn = (logits / HEAT).softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(seed))[:, 0]
    top = logits.topk(V)
    return changed(
        request, output_ids=drawn.tolist(), temperature=HEAT, topk_ids=top.indices.int(),
        topk_logprobs=top.values - request.logsumexp[:, None],
    )  # fmt: skip


def trees() -> Rounds:
    """A chain and a tree, two requests of two categories."""
    rounds = make_rounds({make_variant("chain"): [[1, 2], [0, 1]], make_variant("tree", topk=2): [[2, 2], [1, 1]]})
    named = [replace(one, category=name) for one, name in zip(rounds.requests, "ab", strict=True)]
    return replace(rounds, requests=tuple(named))


def written(rounds: Rounds, path: Path) -> Path:
    write_rounds(rounds, path)
    return path


# ---- by command ----


def simulate_documents(folder: Path) -> list[Document]:
    draft = write_head(folder / "draft", INVENTED)
    counted, sampled = counted_trace(folder / "counted"), sampled_trace(folder / "sampled")
    served, made = make_served(folder / "served", make_checkpoint()), write_head(folder / "made", HEAD)
    return [
        run("simulate", served.path, "--draft", made, "--wiring", WIRING, "--steps", STEPS, "--steps", 1),
        run("simulate", counted, "--draft", draft, "--steps", 1, "--steps", 3),
        run("simulate", counted, "--draft", draft, "--steps", 2, "--rank-precision", "w4a16:g32"),
        run("simulate", counted, served_like(folder / "more"), "--draft", draft, "--by", "category", "--limit", 3),
        run("simulate", counted, "--draft", draft, "--request", "r1", "--observed", 1.4),
        run("simulate", counted, "--draft", draft, "--request", "r2", "--observed", _vllm_counters(folder)),
        run("simulate", sampled, "--draft", draft, "--verify", "rejection", "--verify", "target-only:acc=0.5"),
    ]


def report_documents(folder: Path) -> list[Document]:
    """Of a sweep, and of rounds that are none, where every ratio lacks its denominator."""
    paths = [written(rounds, folder / f"{name}.parquet") for name, rounds in (("s", sweep()), ("n", nothing()))]
    joined = [paths[0], written(sweep(), folder / "other.parquet")]
    return [run("report", *joined), *(run("report", path, *more) for path in paths for more in ((), ("--peers",)))]


def compare_documents(folder: Path) -> list[Document]:
    mixed = written(trees(), folder / "trees.parquet")
    many = written(sweep(), folder / "sweep.parquet")
    empty = written(nothing(), folder / "nothing.parquet")
    counted, played = counted_trace(folder / "counted"), folder / "played.parquet"
    run("simulate", counted, "--draft", write_head(folder / "draft", INVENTED), "-o", played)
    recordings = run("compare", played, played, "--trace-a", counted, "--trace-b", counted)
    return [run("compare", mixed), run("compare", many), run("compare", empty, empty), recordings]


def show_documents(folder: Path) -> list[Document]:
    """Of requests with texts, one as a server prefilled it, and of rounds whose trace is gone."""
    made = make_served(folder / "served", make_checkpoint(), requests=2, pieces=[None, [(3, 3), (4, 4)]])
    draft, path = write_head(folder / "draft", HEAD), folder / "rounds.parquet"
    run("simulate", made.path, "--draft", draft, "--wiring", WIRING, "--steps", STEPS, "-o", path)
    gone = written(make_rounds({make_variant("v"): [[1, 0]]}), folder / "gone.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay.simulator.tokens.read_spelling", lambda _: lambda token: b"%d " % token)
        patch.setattr("replay.simulator.tokens.fingerprint_target", lambda _: made.header.target.fingerprint)
        patch.setattr("replay.capture.target_files.fingerprint_target", lambda _: made.header.target.fingerprint)
        return [run("show", path, "--limit", 2, "--target", folder), run("show", gone)]


def plan_documents(folder: Path) -> list[Document]:
    """Of timings that suffice, of some that leave the answer open, and of a tree whose accept length nobody said."""
    length = ("--length", "steps=3,accept=2.5")
    served, made = make_served(folder / "served", make_checkpoint()), write_head(folder / "made", HEAD)
    return [
        run("plan", "--time", "ms=20,context=100", "--time", "steps=3,accept=2,ms=30,context=100"),
        run("plan", "--time", "ms=20", "--time", "batch=8,ms=22", *length, "--batch", "4"),
        run("plan", "--cost", "pass=20", *length, "--time", "steps=2,topk=2,draft_tokens=6,ms=30"),
        run("plan", "--time", "ms=10", "--time", "steps=3,accept=2,ms=20.1", "--steps", "1,2"),
        run("plan", served.path, "--draft", made, "--wiring", WIRING, "--cost", "pass=20,draft=1", "--steps", "1,3"),
    ]


def time_documents(folder: Path) -> list[Document]:
    """Of a server that drafts, asked for texts, and of one that does not."""
    (prompts := folder / "prompts.jsonl").write_text('{"input_ids": [1, 2, 3]}')
    found = []
    for steps, typed in ((3, ("--prompts", prompts)), (0, ())):
        with timed_server(TimedServer(steps, paced=True)) as server:
            out = folder / f"{steps}.jsonl"
            found.append(run("time", "--server", server.url, "-o", out, "--batch", 1, "--repeats", 1, *typed))
    return found


def diagnose_documents(folder: Path) -> list[Document]:
    """Of a server with a fault and its feed recorded, of a head made for other taps, and what is rare."""
    sizes = {"hidden_size": WIDTH, "vocab_size": V, "draft_vocab_size": 48, "intermediate_size": 24, "head_dim": 8}
    draft = write_head(folder / "head", tiny_config(**sizes, eagle_config={}))
    fed = make_served(folder / "fed", make_checkpoint(), "wiring.aux-layer-id=1", fed=("3", "zeros", "1"))
    rewired = make_served(folder / "rewired", make_checkpoint(), "wiring.aux-layer-id=1", wiring="3,5,6")
    return [
        run("diagnose", fed.path, "--draft", draft),
        run("diagnose", rewired.path, "--draft", draft, "--no-ladder"),
        read(json.dumps(document(to_json(rare_diagnosis())), allow_nan=False)),
    ]


def rare_diagnosis() -> Diagnosis:
    """An engine verdict, slots that are not named or not told apart, and numbers that are not known."""
    evidence = Evidence("length", 0, 0, 0, 0, -1.0, -1.0, 0, nan, nan)
    healthy = Scored("healthy", "healthy", "", 0.0, evidence, 1.0)
    places = {("2", 0): 4, ("3", -1): 4}
    slots = (Slot(0, 4, 0, places, places, ("2", 0), 1.0), Slot(1, 4, 0, {("2", 0): 0}, {("2", 0): 4}, ("2", 0), 0.5))
    parts = (Stratum("category", "code", 4, 2, 0.1, (0.2, 0.8)), Stratum("category", "chat", 0, 0, 0.1, (nan, nan)))
    return Diagnosis(
        "engine", "nothing explains it", None, nan, nan, healthy, (healthy,), limits=("data",),
        gains=(Gain("v", "wiring", "3", 0.1, (nan, nan)),), feeding=Feeding(1, 4, slots, 4, 0, 0, 4),
        profile=Profile((Depth(1, 4, 2, 2, 0.5), Depth(2, 4, 0, 0, nan)), parts), values=("2", "8"),
        unknown=Unknown(0.9, Disturbance(0.5, 0.01), "healthy", None),
        mending=(0.1, nan, nan), agreement=Agreement(4, 2, 0, 2, 0.1, 0.05, 0.0, 8, 2, nan),
    )  # fmt: skip


def check_documents(folder: Path) -> list[Document]:
    """Of a head that is broken and of one that is sound."""
    pairs = [write_case(folder / name, case) for name, case in (("broken", Case(ids(26, 14, 1))), ("sound", Case()))]
    more = ("--exit-zero", "--server-args", EAGLE3 + CHAIN)
    return [run("check", "--draft", draft, "--target", target, *more) for draft, target in pairs]


def inspect_documents(folder: Path) -> list[Document]:
    trace, draft = counted_trace(folder / "counted"), write_head(folder / "draft", INVENTED)
    return [run("inspect", trace), run("inspect", trace, "--check"), run("inspect", draft)]


def trace_documents(folder: Path) -> list[Document]:
    one, other = counted_trace(folder / "one"), served_like(folder / "other")
    return [
        run("trace", "merge", one, other, "-o", folder / "both"),
        run("trace", "subset", one, "--limit", 2, "-o", folder / "part"),
        run("trace", "stats", one, other),
    ]


def capture_documents(folder: Path) -> list[Document]:
    """From a server that records, one of whose prompts it refuses."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"r{first}", "input_ids": [first, 3]}) + "\n" for first in (1, 2)))
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "long", "input_ids": [1] * 10_000}) + "\n")
    with fake_server(FakeServer(make_target(folder / "tiny"), folder / "recording", refused=(2,))) as server:
        typed = ("--prompts", prompts, "-o", folder / "trace", "--max-new-tokens", 4)
        return [run("capture", "--server", server.url, *typed)]


def import_documents(folder: Path) -> list[Document]:
    """Of a dump of one text of a small Llama."""
    target = make_llama(folder / "target")
    dump = stacked(folder / "dump", run_target(target, [(range(9), range(9, 20))], torch.float32), (1, 3))
    return [run("import", dump, "-o", folder / "trace", "--target", target, "--taps", "1,3")]


def serve_documents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    """Of a server that is ready; a process that is one is in tests/capture/test_serve.py."""
    ready = Ready(
        "http://127.0.0.1:30000", str(folder), "0011", "recording", "", 1, ("3", "final"), ("3", "2"), ("2", "3"),
        {"replay": "0.1.0", "sglang": "0.5.23"},
    )  # fmt: skip

    def serve(options: object, note: object, on_ready: Callable[[Ready], None]) -> int:
        on_ready(ready)
        return 0

    monkeypatch.setattr("replay.capture.plugin.server.run_server", serve)
    return [run("serve", "--trace", folder / "trace")]


def demo_documents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    """Of a trace that lies there already, with a head that fits it."""
    counted_trace(folder / "trace")
    draft = write_head(folder / "draft", INVENTED)
    monkeypatch.setattr("replay.cli.demo.demo_options", lambda *_, **__: None)
    monkeypatch.setattr("replay.cli.demo.WIRINGS", ("embed,2", "2,embed"))
    monkeypatch.setattr("replay.traces.sample_files.sample_head", lambda: draft)
    return [run("demo", "-o", folder)]


def documents(command: str, folder: Path) -> list[Document]:
    """Some documents of ``command``, which together have every key that it can print."""
    with pytest.MonkeyPatch.context() as patch:
        match command:
            case "serve":
                return serve_documents(folder, patch)
            case "demo":
                return demo_documents(folder, patch)
            case "faults":
                return [run("faults")]
            case _ if command in _MAKERS:
                return _MAKERS[command](folder)
            case _:
                raise AssertionError(f"no documents of {command}: write a function that makes some, put it in _MAKERS")


_MAKERS: Mapping[str, Callable[[Path], list[Document]]] = {
    "simulate": simulate_documents,
    "report": report_documents,
    "compare": compare_documents,
    "show": show_documents,
    "plan": plan_documents,
    "time": time_documents,
    "diagnose": diagnose_documents,
    "check": check_documents,
    "inspect": inspect_documents,
    "trace": trace_documents,
    "capture": capture_documents,
    "import": import_documents,
}
