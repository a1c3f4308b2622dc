"""Wirings as people have them, on the command line: ids of an engine, what the head states, and a doubt between."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.heads import INVENTED, write_head
from support.trace_maker import make_four, write_trace

from replay.capture.plugin.launch import ServeOptions
from replay.cli.app import cli
from replay.engines.wiring import Wiring
from replay.errors import UsageError


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A trace of four layers with taps embed, 2 and final, and a head that states [-1, 1], which is embed,2."""
    folder = tmp_path_factory.mktemp("pair")
    return str(write_trace(folder / "trace", [make_four()])), str(write_head(folder / "draft", INVENTED))


def run(command: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [command, *arguments])


def simulated(pair: tuple[str, str], *wirings: str) -> dict[str, object]:
    typed = [word for wiring in wirings for word in ("--wiring", wiring)]
    done = run("simulate", pair[0], "--draft", pair[1], "--steps", "2", "--json", *typed)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def wired(document: dict[str, object]) -> list[str]:
    variants = document["variants"]
    assert isinstance(variants, list)
    return [",".join(variant["wiring"]) for variant in variants]


def contradicting(document: dict[str, object]) -> list[str]:
    doubts = document["doubts"]
    assert isinstance(doubts, list)
    return [doubt for doubt in doubts if "what its config states" in doubt]


def test_ids_and_config_are_taken(pair: tuple[str, str]) -> None:
    found = simulated(pair, "sglang:-1,1", "vllm:0,2", "hf:2,-1", "config")
    assert wired(found) == ["embed,2", "2,final"]  # variants that come to the same stand there once
    assert contradicting(found) == []
    assert wired(simulated(pair, "config")) == wired(simulated(pair)) == ["embed,2"]


def test_a_wiring_that_the_head_does_not_state_is_doubted(pair: tuple[str, str]) -> None:
    (doubt,) = contradicting(simulated(pair, "2,embed", "2,final"))
    assert doubt == (
        "No variant feeds draft what its config states (layer ids [-1, 1]), which is embed,2 as sglang reads it: a "
        "server that goes by the config feeds that; --wiring config replays it."
    )
    head = simulated(pair, "2,embed")["draft"]
    assert isinstance(head, dict) and head["draft"]["stated_wiring"] == ["embed", "2"]


def test_a_plain_minus_one_is_explained_for_this_target(pair: tuple[str, str]) -> None:
    refused = run("simulate", pair[0], "--draft", pair[1], "--wiring", "-1,1")
    assert refused.exit_code == 1
    assert "type sglang:-1,1 (embed,2 of this target) or hf:-1,1 (final,1 of this target)" in refused.stderr


def test_a_diagnosis_takes_them_too(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is asked with; the diagnosis itself is left out."""
    asked: list[tuple[str, str]] = []

    def ask(*_: object, trained: Wiring, wiring: Wiring, **__: object) -> None:
        asked.append((str(trained), str(wiring)))
        raise UsageError("enough")

    monkeypatch.setattr("replay.diagnosis.diagnose.diagnose", ask)
    for trained, served in (("embed,2", "2,final"), ("config", "hf:2,4"), ("sglang:-1,1", "config")):
        run("diagnose", pair[0], "--draft", pair[1], "--wiring", trained, "--served-wiring", served)
    assert asked == [("embed,2", "2,final"), ("embed,2", "2,final"), ("embed,2", "embed,2")]


def test_a_server_is_given_taps(tmp_path: Path) -> None:
    """No server is started: what is typed is refused first, in words that hold the taps."""
    refused = run("serve", "--trace", str(tmp_path / "t"), "--wiring", "vllm:0,3", "--", "--port", "1")
    assert refused.exit_code == 1 and "is read by the target's class; add --model-path" in refused.stderr
    target = tmp_path / "target"
    target.mkdir()
    sizes = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 16,
             "vocab_size": 64}  # fmt: skip
    (target / "config.json").write_text(json.dumps(sizes))
    given = ("--", "--model", str(target))
    refused = run("serve", "--trace", str(tmp_path / "t"), "--wiring", "hf:2,4", *given)
    assert refused.exit_code == 1 and "--wiring 2,final names final" in refused.stderr
    refused = run("serve", "--trace", str(tmp_path / "t"), "--wiring", "sglang:-1,1", *given)
    assert refused.exit_code == 1 and "--wiring embed,2 needs a draft" in refused.stderr


def test_serve_reads_a_hub_id_in_the_cache_and_refuses_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's ids 0 and 2 are the taps embed and 2 of a Llama target."""
    sizes = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 16,
             "vocab_size": 64, "intermediate_size": 32, "num_attention_heads": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    there = {"org/there": str(tmp_path / "config.json")}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, *_, **__: there.get(name))
    typed = ("serve", "--trace", str(tmp_path / "rec"), "--wiring", "vllm:0,2", "--")
    refused = run(*typed, "--model-path", "org/absent")
    assert "org/absent is neither a folder here nor in the hub's cache; fetch it first, or type taps" in refused.stderr
    given: list[str | None] = []

    def serve(options: ServeOptions, *_: object) -> int:
        given.append(options.wiring)
        return 0

    monkeypatch.setattr("replay.capture.plugin.server.run_server", serve)
    assert run(*typed, "--model-path", "org/there").exit_code == 0 and given == ["embed,2"]
