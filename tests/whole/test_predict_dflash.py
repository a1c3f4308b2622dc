"""The rounds that replay predicts of a DFlash head are those of z-lab's own decoding loop (dflash 0.1.0), one by one.

A tiny Qwen3 target is recorded by ``replay capture``; the peer decodes the same prompts with its own target, cache and
loop. Its last blocks end with the text, where a server's do not: only whole blocks are compared.
"""

import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from support.dflash_heads import dflash_config, dflash_peer
from support.heads import write_head

import replay
from replay.cli.app import cli

LAYERS, WORDS, SIZE, OUTPUT = 6, 5, 5, 48
PROMPTS = [[1, 2, 3], [0, 1, 0, 2], [3], [2, 2, 1], [0, 3, 3, 1, 2], [2, 3]]
CONFIG = dflash_config(
    vocab_size=WORDS, hidden_size=24, num_attention_heads=3, num_key_value_heads=1, head_dim=8, intermediate_size=32,
    num_target_layers=LAYERS, dflash_config={"mask_token_id": WORDS - 1, "target_layer_ids": [0, 2, 4]},
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(6)  # of its kind one whose rounds accept 0 to 4 tokens
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=24, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, eos_token_id=None, initializer_range=0.25, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("draft") / "blocks", CONFIG)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    prompts = folder / "prompts.jsonl"
    rows = [{"id": f"p{place}", "input_ids": ids} for place, ids in enumerate(PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ["--model", str(target), "--prompts", str(prompts), "-o", str(folder / "trace")]
    ran = run("capture", *options, "--taps", "embed,1,2,3,4,5,final", "--max-new-tokens", OUTPUT, "--dtype", "float32")
    assert ran.exit_code == 0, ran.output
    return folder / "trace"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def decode(peer: Any, target: Any, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Output ids, and how many tokens each of the peer's rounds gave."""
    from dflash.model import dflash_generate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the installed Transformers renames what the peer says
        said = dflash_generate(peer, target, torch.tensor([prompt]), OUTPUT, None, return_stats=True)
    return said.output_ids[0].tolist(), said.acceptance_lengths


def test_rounds_equal_those_of_the_peers_loop(
    target: Path, draft: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr("dflash.model._cuda_time", time.perf_counter)
    head = replay.load_head(draft)
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    peer, opened = dflash_peer(CONFIG, head), replay.Trace.open(trace)
    rounds = replay.simulate(opened, {"blocks": head}, [replay.Variant("blocks", steps=SIZE - 1)])
    assert rounds.variants[0].wiring == ("1", "3", "5")
    compared, order = [], opened.requests["request_id"].to_list()
    for place, prompt in enumerate(PROMPTS):
        ids, lengths = decode(peer, model, prompt)
        assert opened.read(order.index(f"p{place}"), ()).tokens.tolist() == ids
        mine = rounds.table.filter(request_id=f"p{place}").sort("round")
        anchor = len(prompt)
        for length, mine_anchor, accepted in zip(lengths, mine["anchor"], mine["accepted"], strict=False):
            if anchor + SIZE > len(ids):
                break
            assert (mine_anchor, min(accepted + 1, len(ids) - 1 - anchor)) == (anchor, length)
            compared.append(accepted)
            anchor += length
        assert anchor + SIZE > len(ids)
    assert len(compared) > 100 and set(compared) == {0, 1, 2, 3, 4}


def test_simulate_takes_the_whole_block_and_the_trainers_wiring(draft: Path, trace: Path) -> None:
    ran = run("simulate", trace, "--draft", draft, "--json")
    assert ran.exit_code == 0, ran.output
    said = json.loads(ran.stdout)
    (variant,) = said["variants"]
    assert (variant["steps"], variant["wiring"]) == (SIZE - 1, ["1", "3", "5"])
    assert said["trace"]["wirings"]["1,3,5"] == [{"engine": "DFlash 0.1, SGLang 0.5.23", "ids": [0, 2, 4], "note": ""}]


def test_a_shorter_block_is_another_run(draft: Path, trace: Path) -> None:
    """As a server drafts that is told fewer tokens: not the first ones of a whole block, which block.size plays."""
    head, opened = replay.load_head(draft), replay.Trace.open(trace)
    whole = replay.parse_faults(f"block.size={SIZE}")
    variants = [
        replay.Variant("h", steps=4), replay.Variant("h", steps=2), replay.Variant("h", steps=2, faults=whole),
    ]  # fmt: skip
    rounds = replay.simulate(opened, {"h": head}, variants)
    first, short, cut = (
        {(row["request_id"], row["anchor"]): row["drafted"][:2] for row in rounds.table.to_dicts()
         if row["variant"] == one.name}
        for one in rounds.variants
    )  # fmt: skip
    assert all(first[anchor] == cut[anchor] for anchor in first.keys() & cut.keys())
    assert any(first[anchor] != short[anchor] for anchor in first.keys() & short.keys())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", 5], r"possible are 1 to 4; type --steps 4, or --fault block.size=6"),
        (["--steps", 3, "--fault", "block.size=3"], "blocks of 3 tokens, .*type --steps 2"),
        (["--topk", 2, "--num-draft-tokens", 4], "topk 2 drafts trees, .* drafts a block"),
        (["--engine", "eagle"], "engine eagle runs no head that drafts blocks"),
        (["--kv", "stale"], "fault kv.rollback=stale is one of heads that draft token by token"),
        (["--kv", "chunk:2"], "fault kv.chunk-boundary=2 is one of heads"),
        (["--kv", "overwrite"], "fault kv.slot-write=overwrite is one of heads"),
        (["--fault", "wiring.recycle-norm"], "fault wiring.recycle-norm=other is one of heads"),
        (["--fault", "wiring.concat-order"], "fault wiring.concat-order=qkv is one of heads"),
        (["--fault", "wiring.norm=residual"], "fault wiring.norm=residual is one of heads"),
        (["--fault", "wiring.norm=skip:fc_norm"], "has no fc_norm to leave out"),
        (["--fault", "wiring.multi-layer"], "fault wiring.multi-layer=input_layernorm is one of heads"),
        (["--fault", "shift.alignment"], "fault shift.alignment=token is one of heads"),
        (["--fault", "shift.stale-row"], "fault shift.stale-row=anchor is one of heads"),
        (["--fault", "state.hidden-row"], "fault state.hidden-row=drafted is one of heads"),
        (["--fault", "vocab.d2t"], "drafts over the whole vocabulary, without d2t"),
        (["--fault", "weights.overwritten=lm_head"], "has no lm_head of its own"),
        (["--fault", "block.mask-token=5"], "has tokens 0 to 4; type another than 5"),
        (["--wiring", "1,3"], "2 taps x 24 = 48 features, the head's fc takes 72"),
    ],
    ids=str,
)
def test_what_has_no_meaning_for_a_block_is_refused(
    options: list[object], message: str, draft: Path, trace: Path
) -> None:
    ran = run("simulate", trace, "--draft", draft, *options)
    assert ran.exit_code != 0
    assert re.search(message, " ".join(ran.output.split())), ran.output


def test_diagnose_takes_the_whole_block(draft: Path, trace: Path) -> None:
    """Six requests are too few to judge an accept length by, which is said before anything is tried."""
    ran = run("diagnose", trace, "--draft", draft, "--observed", 1.3)
    assert ran.exit_code == 1
    assert "leave the replay's accept length open between" in " ".join(ran.output.split())
