"""Injections into the head itself: its modules, weights and vocabulary map. Shapes as in live.py."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .live import Live

Install = Callable[[Live], None]


def layer_of(live: Live) -> Any:
    """The one layer of the head."""
    return live.model.model.layers[0]


def module_of(live: Live, name: str) -> Any:
    """A module by its name in a checkpoint, such as ``norm`` or ``layers.0.self_attn.o_proj``."""
    return live.model.lm_head if name == "lm_head" else live.model.model.get_submodule(name)


# ---- of the table ----


def swapped_halves(live: Live) -> None:
    """The qkv input has the features first."""
    projection = layer_of(live).self_attn.qkv_proj
    forward = projection.forward
    live.replace(projection, "forward", lambda x: forward(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)))


def skip_norm(name: str) -> Install:
    """A norm is left out."""

    def install(live: Live) -> None:
        norm = live.model.model.norm if name == "norm" else getattr(layer_of(live), name)
        live.replace(norm, "forward", _no_norm)

    return install


def _no_norm(x: Tensor, residual: Tensor | None = None) -> Any:
    if residual is None:
        return x
    both = (x.float() + residual.float()).to(x.dtype)
    return both, both


def normed_residual(live: Live) -> None:
    """The residual stream starts behind hidden_norm."""
    layer = layer_of(live)
    forward, norm = layer.forward, layer.hidden_norm.forward
    live.replace(layer.hidden_norm, "forward", lambda x: x)

    def run(positions: Tensor, embeds: Tensor, hidden: Tensor, batch: Any, residual: Any) -> Any:
        return forward(positions, embeds, norm(hidden), batch, residual)

    live.replace(layer, "forward", run)


def recycle_normed(live: Live) -> None:
    """The state that is fed back comes from behind the final norm."""
    live.replace(live.model.model, "norm_output", True)


def rope(**changes: Any) -> Install:
    """Other fields of the head's RoPE: base, is_neox_style, rotary_dim."""

    def install(live: Live) -> None:
        attention = layer_of(live).self_attn
        turned = copy.deepcopy(attention.rotary_emb)
        for name, value in changes.items():
            setattr(turned, name, value)
        turned._buffers["cos_sin_cache"] = turned._compute_cos_sin_cache().to(turned.cos_sin_cache.dtype)
        held, before = attention._modules, attention.rotary_emb
        live._undo.append(lambda: held.__setitem__("rotary_emb", before))
        held["rotary_emb"] = turned

    return install


def no_rope(live: Live) -> None:
    """Queries and keys are not turned at all. Outside the table."""
    live.replace(layer_of(live).self_attn.rotary_emb, "forward", lambda positions, q, k, *_: (q, k))


def vocabulary(change: Callable[[Tensor, Tensor], Tensor]) -> Install:
    """Other target ids of the draft ids: made from the true ones and from the draft ids."""

    def install(live: Live) -> None:
        true_W = live.drafter.hot_token_id
        ids_W = change(true_W, torch.arange(len(true_W)))
        live.replace(live.drafter, "hot_token_id", ids_W % live.model.model.vocab_size)

    return install


def target_lm_head(live: Live) -> None:
    """The target's output rows in place of the head's."""
    live.reweigh(live.model.lm_head, live.target.model.lm_head.weight[live.drafter.hot_token_id].clone())


def missing(name: str, fill: str) -> Install:
    """A tensor was never loaded: ``ones``, ``zeros`` or ``noise``."""

    def install(live: Live) -> None:
        module = module_of(live, name)
        noise = torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(77)) * 0.02
        value = {"ones": torch.ones_like, "zeros": torch.zeros_like}.get(fill, lambda _: noise)(module.weight)
        live.reweigh(module, value.to(module.weight.dtype))

    return install


def interleaved_qkv(live: Live) -> None:
    """Rows that lie group by group are read as all queries, all keys, all values."""
    attention = layer_of(live).self_attn
    weight, width = attention.qkv_proj.weight, attention.head_dim
    groups, each = attention.num_kv_heads, attention.num_heads // attention.num_kv_heads
    q, k, v = weight.split([attention.q_size, attention.kv_size, attention.kv_size])
    parts = [part.reshape(groups, -1, weight.shape[1]) for part in (q, k, v)]
    assert parts[0].shape[1] == each * width
    live.reweigh(attention.qkv_proj, torch.cat(parts, dim=1).reshape(weight.shape).clone())


def quantised(grid: Callable[[Tensor], Tensor]) -> Install:
    """Linear layers of the decoder layer, each rounded to a grid and back. As in SGLang, fc and lm_head stay."""

    def install(live: Live) -> None:
        for _, module in layer_of(live).named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim == 2:
                live.reweigh(module, grid(weight.float()).to(weight.dtype))

    return install


def fp8(weight: Tensor) -> Tensor:
    """fp8 e4m3 with one scale for the tensor."""
    scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def int8(weight: Tensor) -> Tensor:
    """int8, symmetric, one scale for each output row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().clamp(-128, 127) * scale


def int4(weight: Tensor) -> Tensor:
    """int4, symmetric, one scale for each 64 inputs of a row."""
    groups = weight.reshape(len(weight), -1, 64)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    return ((groups / scale).round().clamp(-8, 7) * scale).reshape(weight.shape)


def in_fp16(live: Live) -> None:
    """The head runs in fp16, its KV cache as well."""
    pool = live.runner.token_to_kv_pool
    for name in ("k_buffer", "v_buffer"):
        live.replace(pool, name, [buffer.half() for buffer in getattr(pool, name)])
    for name in ("dtype", "store_dtype"):
        live.replace(pool, name, torch.float16)
    model = live.model.model
    for name, module in [*model.named_modules(), ("lm_head", live.model.lm_head)]:
        if name == "embed_tokens":
            continue
        for parameter, value in list(module._parameters.items()):
            if value is not None and value.dtype == torch.bfloat16:
                live.reweigh(module, value.half(), parameter)
    embed = model.embed_tokens.forward
    live.replace(model.embed_tokens, "forward", lambda ids: embed(ids).half())
    live.feeds.append(lambda call: setattr(call, "features_RD", call.features_RD.half()))


# ---- outside the table ----


def epsilon(value: float) -> Install:
    """Norms of the layer with another epsilon."""

    def install(live: Live) -> None:
        layer = layer_of(live)
        for norm in (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, live.model.model.norm):
            live.replace(norm, "variance_epsilon", value)

    return install


def no_mlp(live: Live) -> None:
    """The MLP's output is lost."""
    mlp = layer_of(live).mlp
    forward = mlp.forward
    live.replace(mlp, "forward", lambda x, *rest: forward(x, *rest) * 0)


def no_attention(live: Live) -> None:
    """The attention's output is lost."""
    attention = layer_of(live).self_attn
    forward = attention.forward
    live.replace(attention, "forward", lambda **given: forward(**given) * 0)


def gelu(live: Live) -> None:
    """The MLP gates by GELU."""

    def forward(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.gelu(gate) * up

    live.replace(layer_of(live).mlp.act_fn, "forward", forward)


def rolled_heads(live: Live) -> None:
    """Each query head has the rows of the one before it."""
    attention = layer_of(live).self_attn
    weight = attention.qkv_proj.weight.clone()
    weight[: attention.q_size] = weight[: attention.q_size].roll(attention.head_dim, 0)
    live.reweigh(attention.qkv_proj, weight)


def negated_fuse(every: int) -> Install:
    """What fc gives is negated in one row of so many, by position."""

    def install(live: Live) -> None:
        fc = live.model.model.fc
        forward = fc.forward

        def run(x: Tensor) -> Tensor:
            assert live.call is not None
            sign = torch.where(live.call.positions_R % every == 0, -1, 1).to(x.dtype)
            fused: Tensor = forward(x)
            return fused * sign[:, None]

        live.replace(fc, "forward", run)

    return install


def pruned_weights(share: float) -> Install:
    """The smallest weights of the layer's matrices are zero."""

    def prune(weight: Tensor) -> Tensor:
        bound = weight.abs().flatten().sort().values[int(share * weight.numel())]
        return torch.where(weight.abs() < bound, torch.zeros(()), weight)

    return quantised(prune)


# ---- harmless ----


def zero_bias(live: Live) -> None:
    """fc has a bias of zeros."""
    fc = live.model.model.fc
    live.reweigh(fc, torch.zeros(fc.out_features, dtype=fc.weight.dtype), "bias")


def one_thread(live: Live) -> None:
    """Another number of threads."""
    before = torch.get_num_threads()
    live._undo.append(lambda: torch.set_num_threads(before))
    torch.set_num_threads(2 if before == 1 else 1)
