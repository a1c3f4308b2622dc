"""Draft heads of other projects, built from our checkpoints and driven by their own forward.

Where their conventions part from SGLang's, the translation stands here and nowhere else.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from support.speculators_peer import importable
from torch import Tensor

from replay.checkpoint.checkpoint import Checkpoint

# Target ids [R] to go on with after step 0, 1, ..., given the logits [R, W] of that step.
NextIds: TypeAlias = Callable[[int, Tensor], Tensor]


def llama_config(checkpoint: Checkpoint, rope: dict[str, Any], **more: Any) -> Any:
    """The transformers config of the head's layers. ``rope``: transformers 5's ``rope_parameters``."""
    from transformers import LlamaConfig

    config = checkpoint.config
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_hidden_layers=config.num_layers,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        pad_token_id=None,
        **more,
    )


def _tensors(checkpoint: Checkpoint, embed_VE: Tensor, lm_head_WE: Tensor) -> dict[str, Tensor]:
    """What a peer's own checkpoint would hold: embedding and lm_head included, both vocabulary maps."""
    tensors = {"embed_tokens.weight": embed_VE, "lm_head.weight": lm_head_WE} | dict(checkpoint.tensors)
    if "d2t" in tensors:
        t2d_V = torch.zeros(checkpoint.config.vocab_size, dtype=torch.bool)
        t2d_V[torch.arange(checkpoint.config.draft_vocab_size) + tensors["d2t"]] = True
        tensors["t2d"] = t2d_V
    return tensors


class SpecForge:
    """SpecForge 0.2.0 ``LlamaForCausalLMEagle3``, its eager attention and its cache of TTT steps.

    - Three taps always, one layer, no biases.
    - ``norm_output`` true (its default) means that the lm_head sees norm(out); the feedback is never normed. That is
      SGLang's ``norm_output`` false, so only such heads can be compared.
    - Positions are those of the features: 0, 1, ...
    """

    def __init__(self, checkpoint: Checkpoint, embed_VE: Tensor, lm_head_WE: Tensor, rope: dict[str, Any]) -> None:
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

        config = checkpoint.config
        assert config.num_taps == 3 and config.num_layers == 1 and not config.norm_output
        self._model = LlamaForCausalLMEagle3(
            llama_config(
                checkpoint,
                rope,
                pretraining_tp=1,
                draft_vocab_size=config.draft_vocab_size,
                target_hidden_size=config.target_hidden_size,
                fc_norm=config.fc_norm,
            ),
            attention_backend="sdpa",
        ).float()
        tensors = _tensors(checkpoint, embed_VE, lm_head_WE)
        tensors.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        tensors.setdefault("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        self._model.load_state_dict({key.replace("layers.0.", "midlayer."): value for key, value in tensors.items()})

    @torch.no_grad()
    def logits(self, ids_R: Tensor, features_RKD: Tensor, steps: int, next_ids: NextIds) -> list[Tensor]:
        """Logits [R, W] of each step. Calls what ``OnlineEagle3Model.forward`` calls, in its order, but lets the
        caller choose the tokens (that class itself needs triton)."""
        model = self._model
        ids_BR, features_BRKD = ids_R[None], features_RKD[None]
        state = model.project_hidden_states(features_BRKD)
        rows = len(ids_R)
        mask = model.prepare_decoder_attention_mask(torch.ones(1, rows, dtype=torch.bool), state, 1, rows, 0)
        cache: list[list[Tensor]] = [[], []]
        out: list[Tensor] = []
        for step in range(steps):
            state = model.backbone(
                input_embeds=model.embed_input_ids(ids_BR),
                hidden_states=state,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(rows)[None],
            )
            out.append(model.compute_logits(state)[0])
            ids_BR = next_ids(step, out[-1])[None]
        return out


class Speculators:
    """speculators 0.9.0 ``Eagle3DraftModel``: its whole training forward, which feeds it the text's own tokens.

    - ``norm_before_residual`` must be false: its trainer's default is true, which SGLang cannot serve.
    - Its positions start at 1. A constant offset is invisible to rope.
    - Layers after the first are plain Llama layers that norm their input with ``input_layernorm``, where SGLang uses
      ``hidden_norm`` and leaves ``input_layernorm`` alone.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        embed_VE: Tensor,
        lm_head_WE: Tensor,
        rope: dict[str, Any],
        *,
        norm_before_residual: bool = False,
    ) -> None:
        with importable():
            from speculators.models.eagle3 import Eagle3SpeculatorConfig
            from speculators.models.eagle3.core import Eagle3DraftModel
        config = checkpoint.config
        layers = llama_config(checkpoint, rope)
        layers._attn_implementation = "eager"
        self._model = Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                transformer_layer_config=layers,
                draft_vocab_size=config.draft_vocab_size,
                norm_before_residual=norm_before_residual,
                norm_before_fc=config.norm_before_fc,
                fc_norm=config.fc_norm,
                norm_output=config.norm_output,
                eagle_aux_hidden_state_layer_ids=list(range(config.num_taps)),
            )
        ).float()
        tensors = _tensors(checkpoint, embed_VE, lm_head_WE)
        for layer in range(1, config.num_layers):
            tensors[f"layers.{layer}.input_layernorm.weight"] = tensors.pop(f"layers.{layer}.hidden_norm.weight")
        missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        assert not unexpected and sorted(missing) == ["verifier_lm_head.weight", "verifier_norm.weight"]

    @torch.no_grad()
    def logits(self, ids_R: Tensor, features_RKD: Tensor, steps: int) -> list[Tensor]:
        """Logits [R, W] of each step, read where its own loop computes them."""
        seen: list[Tensor] = []
        hook = self._model.lm_head.register_forward_hook(lambda _module, _args, out: seen.append(out[0].clone()))
        self._model(features_RKD[None], ids_R[None], torch.zeros_like(ids_R)[None], ttt_steps=steps)
        hook.remove()
        return seen


def teacher_forced(ids_R: Tensor, steps: int) -> Sequence[Tensor]:
    """Ids [R] of the rows at steps 1, 2, ...: the text one token on at each, zeros beyond its end."""
    return [torch.cat([ids_R[step:], ids_R.new_zeros(step)]) for step in range(1, steps + 1)]
