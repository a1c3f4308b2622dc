"""An independent speculative decoder: target and head token by token, real KV caches, propose, verify, accept.

Written from the definitions (arXiv 2503.01840 and SafeAILab/EAGLE's inference loop), with the Transformers target and
a head of its own. It shares no code with replay: it reads the head's files itself and knows nothing of traces.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel


class PlainHead:
    """A one-layer EAGLE-3 head with a growing key-value cache, in fp32, one row at a time."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.w = {name.removeprefix("midlayer."): tensor.float() for name, tensor in
                  load_file(folder / "model.safetensors").items() if name not in ("d2t", "t2d")}  # fmt: skip
        d2t = load_file(folder / "model.safetensors")["d2t"]
        self.target_id = [draft + int(offset) for draft, offset in enumerate(d2t)]
        self.embedding = embedding
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.width = self.config.get("head_dim", self.config["hidden_size"] // self.heads)
        self.theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.config["rms_norm_eps"]).sqrt() * self.w[f"{name}.weight"]

    def turn(self, x: Tensor, position: int) -> Tensor:
        """Rotary embedding as complex numbers: feature i and i + half are one point in the plane."""
        half = self.width // 2
        angle = position / self.theta ** (torch.arange(half) / half)
        plane = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(half), angle)
        return torch.cat([plane.real, plane.imag], dim=-1)

    def step(self, token: int, state: Tensor, position: int) -> tuple[int, Tensor]:
        """Append one row to the cache; the token it drafts and the state it hands on."""
        logits, state = self.row(token, state, position)
        return self.target_id[int(logits.argmax())], state

    def row(self, token: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Append one row to the cache; its logits over the draft vocabulary and the state it hands on."""
        x = torch.cat([self.norm(self.embedding[token], "input_layernorm"), self.norm(state, "hidden_norm")])
        q, k, v = (linear(x, self.w[f"self_attn.{part}_proj.weight"]).view(-1, self.width) for part in "qkv")
        self.keys.append(self.turn(k, position))
        self.values.append(v)
        q = self.turn(q, position)
        keys, values = torch.stack(self.keys, 1), torch.stack(self.values, 1)
        mixed = []
        for head in range(self.heads):
            shared = head * self.kv_heads // self.heads
            weights = (keys[shared] @ q[head] / self.width**0.5).softmax(0)
            mixed.append(weights @ values[shared])
        h = state + linear(torch.cat(mixed), self.w["self_attn.o_proj.weight"])
        y = self.norm(h, "post_attention_layernorm")
        y = silu(linear(y, self.w["mlp.gate_proj.weight"])) * linear(y, self.w["mlp.up_proj.weight"])
        h = h + linear(y, self.w["mlp.down_proj.weight"])
        return linear(self.norm(h, "norm"), self.w["lm_head.weight"]), h

    def fuse(self, features: Tensor) -> Tensor:
        return linear(features, self.w["fc.weight"])

    def forget(self, rows: int) -> None:
        """Drop every cached row from ``rows`` on."""
        del self.keys[rows:], self.values[rows:]


@dataclass
class DecodedRound:
    anchor: int
    drafted: list[int]
    accepted: int


def load_target(folder: Path) -> PreTrainedModel:
    """The target in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def decode(
    target: PreTrainedModel, head: PlainHead, prompt: Sequence[int], *, taps: Sequence[int], steps: int,
    new_tokens: int, eos: int,
) -> tuple[list[int], list[DecodedRound]]:  # fmt: skip
    """Speculative decoding of one prompt; the text, and every round with all its drafted tokens.

    A round's ``accepted`` stops at the end of the output, as nothing beyond it is emitted.
    """
    cache = DynamicCache(config=target.config)
    cache_name = "cache" if "cache" in signature(target.forward).parameters else "past_key_values"
    head.forget(0)

    def run(tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        out = target(torch.tensor([list(tokens)]), **{cache_name: cache}, output_hidden_states=True)
        features = torch.cat([out.hidden_states[tap][0] for tap in taps], dim=-1)
        return out.logits[0].argmax(-1), features

    text = list(prompt)
    choices, features = run(text)
    text.append(int(choices[-1]))
    rounds: list[DecodedRound] = []
    limit = len(prompt) + new_tokens
    while len(text) < limit and text[-1] != eos:
        anchor = len(text) - 1
        for row in range(len(head.keys), anchor):  # rows of true features that the head has not seen
            token, state = head.step(text[row + 1], head.fuse(features[row - (anchor - len(features))]), row)
        drafted = [token]
        for position in range(anchor, anchor + steps - 1):
            token, state = head.step(drafted[-1], state, position)
            drafted.append(token)
        head.forget(anchor)
        choices, features = run([text[-1], *drafted])
        accepted = 0
        while accepted < steps and drafted[accepted] == int(choices[accepted]):
            accepted += 1
        emitted = [*drafted[:accepted], int(choices[accepted])]
        if eos in emitted:
            emitted = emitted[: emitted.index(eos) + 1]
        emitted = emitted[: limit - len(text)]
        text += emitted
        rounds.append(DecodedRound(anchor, drafted, min(accepted, len(emitted))))
        if accepted < steps:
            cache.crop(accepted - steps)  # a negative number takes that many rows off the end
        features = features[: accepted + 1]
    return text[len(prompt) :], rounds
