"""A small Llama-form target in plain torch: batched greedy or sampled generation, and features for training a draft
head.

Nothing here knows about drafting. The point is speed on a CPU: one fused matrix for q, k, v and one for gate and up,
the grouped query heads of one key head handed to attention as query rows, and slots kept sorted by length so that a
short sequence does not pay for a long one.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in fp32, round, then scale: the order in which Transformers rounds."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Matrix:
    """A weight packed once for the CPU's matrix units; F.linear packs it anew at every call."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 256) if weight.dtype == torch.bfloat16 else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return product


class Layer:
    """The weights of one layer."""

    def __init__(self, tensors: dict[str, Tensor], i: int) -> None:
        part = {
            k.removeprefix(f"model.layers.{i}."): v for k, v in tensors.items() if k.startswith(f"model.layers.{i}.")
        }
        self.norm1, self.norm2 = part["input_layernorm.weight"], part["post_attention_layernorm.weight"]
        self.qkv = Matrix(torch.cat([part[f"self_attn.{name}_proj.weight"] for name in "qkv"]))
        self.o, self.down = Matrix(part["self_attn.o_proj.weight"]), Matrix(part["mlp.down_proj.weight"])
        self.gate_up = Matrix(torch.cat([part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]]))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NeoX rotary embedding; cos and sin broadcast against x."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Target:
    """Weights of a Llama-form checkpoint (bf16, tied or untied head) and the one forward pass everything uses."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        config = json.loads((folder / "config.json").read_text())
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.layers: int = config["num_hidden_layers"]
        self.hidden: int = config["hidden_size"]
        self.key_heads: int = config["num_key_value_heads"]
        self.groups: int = config["num_attention_heads"] // self.key_heads
        self.width: int = config.get("head_dim") or self.hidden // config["num_attention_heads"]
        self.eps: float = config["rms_norm_eps"]
        theta: float = (config.get("rope_parameters") or config)["rope_theta"]
        self.embed = tensors["model.embed_tokens.weight"]
        self.head = Matrix(tensors.get("lm_head.weight", self.embed))
        self.norm = tensors["model.norm.weight"]
        self.weights = [Layer(tensors, i) for i in range(self.layers)]
        frequency = theta ** -(torch.arange(0, self.width, 2).float() / self.width)
        angle = torch.outer(torch.arange(4096).float(), frequency).repeat(1, 2)
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def qkv(self, w: Layer, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [B, T, N, G, H] and k, plain v [B, T, N, H]."""
        b, t, _ = x_BTD.shape
        n, g, h = self.key_heads, self.groups, self.width
        q, k, v = w.qkv(rms_norm(x_BTD, w.norm1, self.eps)).split([n * g * h, n * h, n * h], dim=-1)
        q = rotate(q.view(b, t, n * g, h), cos, sin).view(b, t, n, g, h)
        return q, rotate(k.view(b, t, n, h), cos, sin), v.view(b, t, n, h)

    def after_attention(self, w: Layer, x_BTD: Tensor, mixed_BTD: Tensor) -> Tensor:
        """The rest of a layer: output projection, residual, MLP, residual."""
        x_BTD = x_BTD + w.o(mixed_BTD)
        gate, up = w.gate_up(rms_norm(x_BTD, w.norm2, self.eps)).chunk(2, dim=-1)
        return x_BTD + w.down(F.silu(gate) * up)

    def stream(self, ids_BT: Tensor, taps: tuple[int, ...]) -> tuple[dict[int, Tensor], Tensor]:
        """Right-padded sequences from their start: the residual stream at the taps, and the final norm's output."""
        b, t = ids_BT.shape
        x = F.embedding(ids_BT, self.embed)
        cos, sin = self.cos[None, :t, None], self.sin[None, :t, None]
        taken: dict[int, Tensor] = {}
        for i, w in enumerate(self.weights):
            if i in taps:
                taken[i] = x
            q, k, v = self.qkv(w, x, cos, sin)
            mixed = F.scaled_dot_product_attention(
                q.reshape(b, t, -1, self.width).transpose(1, 2),
                k.transpose(1, 2).repeat_interleave(self.groups, dim=1),
                v.transpose(1, 2).repeat_interleave(self.groups, dim=1),
                is_causal=True,
            )
            x = self.after_attention(w, x, mixed.transpose(1, 2).reshape(b, t, -1))
        return taken, rms_norm(x, self.norm, self.eps)


class Slots:
    """A key-value cache with one slot per sequence, each at its own length; features are kept beside it."""

    def __init__(
        self, target: Target, slots: int, capacity: int, prefix: list[int], taps: tuple[int, ...] = ()
    ) -> None:
        """All sequences begin with `prefix`, computed once. The stream at `taps` and the final state are kept."""
        self.target, self.taps = target, taps
        self.kept = torch.zeros(slots, capacity, len(taps) + 1, target.hidden, dtype=target.embed.dtype)
        shape = (target.layers, slots, target.key_heads, capacity, target.width)
        self.k, self.v = torch.zeros(shape, dtype=target.embed.dtype), torch.zeros(shape, dtype=target.embed.dtype)
        self.length = torch.zeros(slots, dtype=torch.long)
        self.shared = 0
        self._prefill([0], [prefix])
        self.shared = len(prefix)
        self.kept[1:, : self.shared] = self.kept[:1, : self.shared]
        self.k[:, 1:, :, : self.shared], self.v[:, 1:, :, : self.shared] = (
            cache[:, :1, :, : self.shared] for cache in (self.k, self.v)
        )

    def prefill(self, slots: list[int], prompts: list[list[int]], together: int = 8) -> None:
        """Put prompts into slots (whatever was there is gone), a few of like length at a time."""
        order = sorted(range(len(slots)), key=lambda i: len(prompts[i]))
        for first in range(0, len(order), together):
            part = order[first : first + together]
            self._prefill([slots[i] for i in part], [prompts[i] for i in part])

    def _prefill(self, slots: list[int], prompts: list[list[int]]) -> None:
        target, index, shared = self.target, torch.tensor(slots), self.shared
        t = max(map(len, prompts))
        ids = torch.zeros(len(prompts), t - shared, dtype=torch.long)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt) - shared] = torch.tensor(prompt[shared:])
        self.length[index] = torch.tensor([len(prompt) for prompt in prompts])
        if t == shared:
            return
        x = F.embedding(ids, target.embed)
        cos, sin = target.cos[None, shared:t, None], target.sin[None, shared:t, None]
        causal = torch.ones(t - shared, t, dtype=torch.bool).tril(shared)
        for i, w in enumerate(target.weights):
            if i in self.taps:
                self.kept[index, shared:t, self.taps.index(i)] = x
            q, k, v = target.qkv(w, x, cos, sin)
            self.k[i, index, :, shared:t], self.v[i, index, :, shared:t] = k.transpose(1, 2), v.transpose(1, 2)
            mixed = F.scaled_dot_product_attention(
                q.reshape(len(prompts), t - shared, -1, target.width).transpose(1, 2),
                self.k[i, index, :, :t].repeat_interleave(target.groups, dim=1),
                self.v[i, index, :, :t].repeat_interleave(target.groups, dim=1),
                attn_mask=causal,
            )
            x = target.after_attention(w, x, mixed.transpose(1, 2).reshape(len(prompts), t - shared, -1))
        self.kept[index, shared:t, -1] = rms_norm(x, target.norm, target.eps)

    def reorder(self, order: Tensor) -> None:
        """Permute the slots."""
        top = int(self.length.max())
        for cache in (self.k, self.v):
            for layer in cache:
                layer[:, :, :top] = layer[order, :, :top]
        self.kept[:, :top] = self.kept[order, :top]
        self.length = self.length[order]

    def step(self, ids_B: Tensor, parts: int = 4) -> Tensor:
        """Feed one token to every slot; logits over the whole vocabulary."""
        target, b = self.target, ids_B.shape[0]
        at, rows = self.length, torch.arange(b)
        cos, sin = target.cos[at][:, None, None], target.sin[at][:, None, None]
        pieces = []
        for piece in rows.chunk(parts):
            first, last = int(piece[0]), int(piece[-1]) + 1
            top = int(at[first:last].max()) + 1
            mask = torch.zeros(last - first, 1, 1, top, dtype=target.embed.dtype)
            mask.masked_fill_((torch.arange(top) > at[first:last, None])[:, None, None], float("-inf"))
            pieces.append((first, last, top, mask))
        x = F.embedding(ids_B[:, None], target.embed)
        for i, w in enumerate(target.weights):
            if i in self.taps:
                self.kept[rows, at, self.taps.index(i)] = x[:, 0]
            q, k, v = target.qkv(w, x, cos, sin)
            keys, values = self.k[i], self.v[i]
            keys[rows, :, at], values[rows, :, at] = k[:, 0], v[:, 0]
            mixed = torch.cat(
                [
                    F.scaled_dot_product_attention(q[f:e, 0], keys[f:e, :, :top], values[f:e, :, :top], attn_mask=mask)
                    for f, e, top, mask in pieces
                ]
            )
            x = target.after_attention(w, x, mixed.reshape(b, 1, -1))
        self.length = at + 1
        final = rms_norm(x[:, 0], target.norm, target.eps)
        self.kept[rows, at, -1] = final
        return target.head(final)


def block_top(logits_BV: Tensor, k: int, block: int = 64) -> tuple[Tensor, Tensor]:
    """The k largest logits and their ids; they lie in the k blocks with the largest maxima, only those are sorted."""
    b, v = logits_BV.shape
    blocks = logits_BV.view(b, v // block, block)
    best = blocks.amax(-1).float().topk(k, dim=-1).indices.sort(-1).values
    inside = blocks.gather(1, best[..., None].expand(-1, -1, block)).reshape(b, -1).float()
    values, where = inside.topk(k, dim=-1)
    return values, best.gather(1, where // block) * block + where % block


def block_argmax(logits_BV: Tensor, block: int = 64) -> Tensor:
    """The first of the largest logits in each row, without argmax's slow walk over the whole vocabulary."""
    blocks = logits_BV.view(logits_BV.shape[0], -1, block)
    best = blocks.amax(-1).float().argmax(-1)
    inside = blocks[torch.arange(blocks.shape[0]), best].float().argmax(-1)
    return best * block + inside
