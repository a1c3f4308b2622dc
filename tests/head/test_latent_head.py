"""Latent heads: step logits equal those of Transformers' own DeepSeek-V3 modules, and both orders of products agree."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.heads import DEEPSEEK_YARN, LATENT, target_tables, tiny_checkpoint
from support.latent_peer import LatentPeer
from support.random_heads import FP64
from torch import Tensor

from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting import next_tokens
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.first_pass import first_pass
from replay.drafting.round_by_round import walk
from replay.drafting.rows import DraftInput
from replay.engines.behaviour import HEALTHY, RECORDED, Behaviour, Chunk
from replay.engines.precision import PLAIN, Precision, parse_precision
from replay.engines.profiles import ENGINES, NUMERICS
from replay.head.model import Head, TargetTables
from replay.head.products import FP32_ON_CPU, WHOLE_PROMPTS, Execution
from replay.simulator.binding import _prefill_rows

STEPS, LENGTH = 4, 22
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_parameters": DEEPSEEK_YARN},
    "neox": {"rope_interleave": False, "rope_parameters": DEEPSEEK_YARN},
    "every norm, bias": {"fc_norm": True, "norm_output": True, "bias": True},
    "target's lm_head": {"draft_vocab_size": None},
    "tied": {"draft_vocab_size": None, "tie_word_embeddings": True},
    "two taps, wider target": {
        "target_hidden_size": 40, "eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 2]},
    "large epsilon": {"rms_norm_eps": 0.1},
}  # fmt: skip


def latent_checkpoint(**options: Any) -> Checkpoint:
    """Half the gain in the layers: see ``calm`` in test_peer_head.py."""
    checkpoint = tiny_checkpoint(seed=3, **LATENT | options)
    tensors = {
        key: tensor / 2 if key.startswith("layers.") and tensor.ndim == 2 else tensor
        for key, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


def build(
    checkpoint: Checkpoint,
    numerics: str,
    execution: Execution = FP32_ON_CPU,
    behaviour: Behaviour = HEALTHY,
    precision: Precision = PLAIN,
) -> Head:
    tables = TargetTables(*target_tables(checkpoint))
    profile = replace(ENGINES["sglang"], numerics=numerics)
    return Head(checkpoint, tables, profile=profile, execution=execution, behaviour=behaviour, precision=precision)


def random_request(head: Head) -> DraftInput:
    """One prompt token, so that every row is an anchor's."""
    generator = torch.Generator().manual_seed(11)
    tokens_T = torch.randint(head.config.vocab_size, (LENGTH,), generator=generator)
    return DraftInput(tokens_T, torch.randn(LENGTH - 1, head.config.fc_inputs, generator=generator), 1)


def replayed_logits(monkeypatch: pytest.MonkeyPatch, head: Head) -> list[Tensor]:
    """Our logits [R, W] of each step."""
    seen: list[Tensor] = []
    choose = next_tokens.choose

    def tap(head: Head, logits_AW: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(logits_AW)
        return choose(head, logits_AW)

    with monkeypatch.context() as patch:
        patch.setattr(next_tokens, "choose", tap)
        draft_every_anchor(head, [random_request(head)], STEPS)
    return seen


def peer_logits(checkpoint: Checkpoint, head: Head, rope: dict[str, Any]) -> list[Tensor]:
    """The peer's, fed its own drafts."""
    target_embed_VE, target_lm_head_VE = target_tables(checkpoint)
    embed_VE = checkpoint.tensors.get("embed_tokens.weight", target_embed_VE)
    tables = {"own": checkpoint.tensors.get("lm_head.weight"), "target": target_lm_head_VE, "embed": embed_VE}
    lm_head_WE = tables[checkpoint.config.lm_head]
    assert lm_head_WE is not None
    item = random_request(head)
    d2t_W = checkpoint.tensors.get("d2t", torch.zeros(len(lm_head_WE), dtype=torch.long))

    def next_id(logits_W: Tensor) -> int:
        best = int(logits_W.argmax())
        return best + int(d2t_W[best])

    peer = LatentPeer(checkpoint, embed_VE, lm_head_WE, rope)
    return peer.logits(item.tokens_T[1 : item.rows + 1], item.features_RKD[: item.rows], STEPS, next_id)


def differences(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    assert [part.shape for part in ours] == [part.shape for part in theirs] and len(ours) == STEPS
    return [float((mine - peer).abs().max()) for mine, peer in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("name", OPTIONS)
def test_step_logits_equal_those_of_transformers_modules(
    name: str, numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = latent_checkpoint(**OPTIONS[name])
    head = build(checkpoint, numerics)
    theirs = peer_logits(checkpoint, head, OPTIONS[name].get("rope_parameters", PLAIN_ROPE))
    assert max(differences(replayed_logits(monkeypatch, head), theirs)) < 1e-4
    assert all(step.std(dim=0).mean() > 0.3 for step in theirs)  # there is something to tell apart


# Each is a fault of a latent head; the value is what the peer of the sound head differs by at least.
BROKEN: dict[str, Behaviour] = {
    "the other pairs": Behaviour(other_pairs=True),
    "the factor on scores missing": Behaviour(score_factor=1 / 1.459),
    "latent not normed": Behaviour(skip_norms=("kv_a_layernorm",)),
    "query not normed": Behaviour(skip_norms=("q_a_layernorm",)),
}


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_head_is_told_apart(fault: str, numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = latent_checkpoint(rope_parameters=DEEPSEEK_YARN)
    head = build(checkpoint, numerics)
    theirs = peer_logits(checkpoint, head, DEEPSEEK_YARN)
    broken = head.variation(BROKEN[fault], checkpoint.config)
    assert differences(replayed_logits(monkeypatch, broken), theirs)[0] > 1e-2
    assert max(differences(replayed_logits(monkeypatch, head), theirs)) < 1e-4  # the head itself is as it was


@pytest.mark.parametrize("precision", ["bf16", "bf16+kv=fp8_e4m3:scale=1", "bf16+kv=int8", "bf16+w4a16:g32"])
def test_both_orders_store_the_same_rows(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the draft KV is stored in: a latent and a rope key, never what is made of them. Norms, softmax and the
    absorbed order's attention are fp32 in any dtype."""
    checkpoint = latent_checkpoint(rope_parameters=DEEPSEEK_YARN)
    parsed = parse_precision(precision)
    absorbed, plain = (
        replayed_logits(monkeypatch, build(checkpoint, order, FP64, precision=parsed)) for order in ("sglang", "hf")
    )
    assert max(differences(absorbed, plain)) < 1e-5
    if parsed.kv is not None:
        sound = replayed_logits(monkeypatch, build(checkpoint, "hf", FP64))
        assert max(differences(plain, sound)) > 1e-3


def test_products_as_small_as_a_servers_change_no_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = latent_checkpoint(rope_parameters=DEEPSEEK_YARN)
    whole, small = (
        replayed_logits(monkeypatch, build(checkpoint, "sglang", replace(FP64, product_rows=rows)))
        for rows in (None, 4)
    )
    assert max(differences(whole, small)) < 1e-12


PROMPT = 9
WHOLE, IN_TWO = ((PROMPT, PROMPT),), ((5, 5), (4, 4))


def first_states(head: Head, pieces: tuple[tuple[int, int], ...] = (), prompt: int = PROMPT) -> Tensor:
    """The states [A, E] from which each anchor drafts its first token."""
    item = replace(random_request(head), prompt_tokens=prompt, pieces=pieces)
    return first_pass(head, [item, item]).output.normed_RE


@pytest.mark.parametrize("prefill_rows", [None, 4, PROMPT, WHOLE_PROMPTS])
@pytest.mark.parametrize("product_rows", [None, 4])
def test_a_prompt_prefilled_whole_is_unabsorbed_and_nothing_else_is(
    product_rows: int | None, prefill_rows: int | None
) -> None:
    """As SGLang 0.5.23 models/deepseek_common/attention_backend_handler.py has it, to the last bit."""
    execution = Execution(torch.bfloat16, product_rows=product_rows, prefill_rows=prefill_rows)
    head = build(latent_checkpoint(rope_parameters=DEEPSEEK_YARN), "sglang", execution)
    other = head.of_whole_prompts()
    assert other is not None and other.of_whole_prompts() is None
    unabsorbed, by_row, absorbed = first_states(other, WHOLE), first_states(head, WHOLE), first_states(head, IN_TWO)
    anchors = len(by_row) // 2
    first = torch.arange(len(by_row)) % anchors == 0
    assert torch.equal(by_row[first], unabsorbed[first]) and not torch.equal(by_row[first], absorbed[first])
    assert torch.equal(by_row[~first], absorbed[~first]) and not torch.equal(by_row[~first], unabsorbed[~first])
    # what the trace does not tell is taken from the rows that a server prefills at once
    assert torch.equal(first_states(head)[first], (by_row if (prefill_rows or 0) >= PROMPT else absorbed)[first])


@pytest.mark.parametrize(("chunk", "whole"), [(4, False), (PROMPT - 1, False), (PROMPT, True), (RECORDED, True)])
def test_a_prompt_that_comes_in_chunks_is_not_prefilled_whole(chunk: Chunk, whole: bool) -> None:
    """The last chunk finds rows before it, whatever the trace says of the server's own pieces."""
    checkpoint = latent_checkpoint(rope_parameters=DEEPSEEK_YARN)
    head = build(checkpoint, "sglang", Execution(torch.bfloat16, prefill_rows=WHOLE_PROMPTS))
    chunked = head.variation(replace(head.behaviour, chunk=chunk), head.config)
    for pieces in (WHOLE, ()):
        expected = first_states(head, WHOLE if whole else IN_TWO)[0]
        assert torch.equal(first_states(chunked, pieces)[0], expected)


def test_a_server_says_whether_it_cuts_prompts() -> None:
    told = {said: _prefill_rows({"chunked_prefill_size": said}) for said in ("-1", "64", "None")}
    assert told == {"-1": WHOLE_PROMPTS, "64": 64, "None": None} and _prefill_rows({}) is None


def test_a_prompt_prefilled_whole_sees_keys_and_values_as_they_were_made() -> None:
    """In its last row (SGLang 0.5.23 forward_mha.py ``forward_normal_prepare``); the draft KV it leaves is rounded."""
    checkpoint = latent_checkpoint(rope_parameters=DEEPSEEK_YARN)
    sound, rounded = (
        build(checkpoint, "sglang", precision=parse_precision(precision))
        for precision in ("fp32", "fp32+kv=fp8_e4m3:scale=1")
    )
    apart_A = (first_states(sound, WHOLE) - first_states(rounded, WHOLE)).abs().amax(1)
    first = torch.arange(len(apart_A)) % (len(apart_A) // 2) == 0
    assert apart_A[first].max() == 0 < 1e-3 < apart_A[~first].min()
    assert (first_states(sound, IN_TWO) - first_states(rounded, IN_TWO)).abs().amax(1)[first].min() > 1e-3


def test_a_walk_begins_from_a_whole_prompt_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    head = build(latent_checkpoint(rope_parameters=DEEPSEEK_YARN), "sglang", Execution(torch.bfloat16))
    seen: list[Tensor] = []
    choose = next_tokens.choose
    monkeypatch.setattr(next_tokens, "choose", lambda one, logits: (seen.append(logits), choose(one, logits))[1])
    for pieces in (WHOLE, IN_TWO):
        seen.clear()
        walk(head, [replace(random_request(head), prompt_tokens=PROMPT, pieces=pieces)], STEPS)
        expected = {kind: head.logits(first_states(head, kind)[:1]) for kind in (WHOLE, IN_TWO)}
        assert [kind for kind, logits in expected.items() if torch.equal(seen[0], logits)] == [pieces]
