"""A draft head: one readable forward, in a server's rounding order.

Shape suffixes: R rows (token positions, of one or many requests), E head width, D target width, K taps,
N attention heads, M key-value heads, H features per attention head, F MLP width, W draft vocabulary, V target
vocabulary. A row pairs the embedding of the next token with the features of this position.

What differs by family lies in files of its own (families.py), and so does attention (grouped.py, latent.py, block.py).
Everything is differentiable, so training can use the same forward.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.config import MASK_HIDDEN, HeadConfig
from replay.engines.behaviour import HEALTHY, Behaviour
from replay.engines.precision import PLAIN, Precision
from replay.engines.profiles import ENGINES, NUMERICS, EngineProfile
from replay.errors import CheckpointError
from replay.head.attention import KeyValues
from replay.head.block import BlockAttention
from replay.head.departures import departures, reads_qkv_bias
from replay.head.emulation import Emulation, RoundedProducts
from replay.head.families import FAMILIES
from replay.head.grouped import CachedWidths, GroupedAttention, Rotation
from replay.head.held import Held, address_of
from replay.head.latent import LatentAttention, LatentWeights
from replay.head.parts import Parts, stack, stack_gate_up, stack_once
from replay.head.products import FP32_ON_CPU, Execution, ProductSizes, to_device
from replay.head.rope import inverse_frequencies


class Attend(Protocol):
    """Attention of one layer: rotated queries and the same rows' keys and values in, mixed values [R', N*H] out.

    Owning it means owning the draft KV: what is remembered, and which rows each query may see.
    """

    def __call__(self, layer: int, q_RNH: Tensor, k_RMH: Tensor, v_RMH: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """``normed_RE`` goes into ``logits``; ``feedback_RE`` is the next step's state."""

    normed_RE: Tensor
    feedback_RE: Tensor


@dataclass(frozen=True, slots=True)
class TargetTables:
    """What a head may borrow of its target; used as they are, and copied only where a precision rounds them.

    ``embed_VE`` is None where the head needs none, ``lm_head_VE`` where it is tied to the embedding.
    """

    embed_VE: Tensor | None
    lm_head_VE: Tensor | None = None


def _as_made(kv_RMH: Tensor) -> Tensor:
    return kv_RMH


class Head:
    """A draft head ready to run: weights cast to one dtype on one device, in one rounding order."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetTables,
        *,
        profile: EngineProfile = ENGINES["sglang"],
        execution: Execution = FP32_ON_CPU,
        behaviour: Behaviour = HEALTHY,
        precision: Precision = PLAIN,
        held: Held | None = None,
    ) -> None:
        """Bind a checkpoint to its target.

        ``profile`` says which of its tensors an engine reads and in which order it rounds; ``behaviour`` how it runs
        the head where that differs from a healthy server. ``precision`` says which tensors are rounded further than to
        the dtype of ``execution`` (emulation.py); what it says of the dtype itself has no effect here. ``held`` has
        the weights of other heads of a sweep: those that run alike here are shared.
        Raises CheckpointError where head and target do not fit.
        """
        self.name = checkpoint.name
        self.config = checkpoint.config
        self.execution = execution
        self.behaviour = behaviour
        self.numerics = NUMERICS[profile.numerics]
        self.notes = list(checkpoint.notes)
        self.emulation = Emulation(precision, self.config, profile, self.dtype)
        self._product = RoundedProducts(self.emulation, execution)
        held = held or Held()
        self._weights = self.emulation.weights(checkpoint.tensors, self.device, held)
        embed_VE = self._choose_embedding(checkpoint, target.embed_VE, profile)
        self._embed_VE = held.ready(embed_VE, self.device, lambda: embed_VE.to(self.device))
        self.target_ids_W = self._target_ids(checkpoint)
        self._lm_head_WE = self._choose_lm_head(target, held)
        self._biased = reads_qkv_bias(self.config, profile)
        self.notes += departures(self.config, profile)
        self._family = FAMILIES[self.config.family]
        self._parts = Parts(
            self.config,
            behaviour,
            self.numerics,
            self.dtype,
            self._weights,
            self._product,
            stack_gate_up(self._weights, held),
        )
        self._attention: GroupedAttention | LatentAttention | BlockAttention = self._build_attention(held)
        self._set_run()

    @property
    def dtype(self) -> torch.dtype:
        """What the head runs in."""
        return self.execution.dtype

    @property
    def device(self) -> torch.device:
        """What it runs on."""
        return self.execution.device

    @property
    def storages(self) -> set[int]:
        """Where in memory its weights lie, as ``Held.keep`` takes it."""
        return set(map(address_of, (*self._weights.values(), self._embed_VE, self._lm_head_WE)))

    def variation(self, behaviour: Behaviour, config: HeadConfig) -> "Head":
        """This head with the same weights under another behaviour, or a config that differs in RoPE or epsilon only."""
        other = copy(self)
        other.behaviour, other.config = behaviour, config
        other._set_run()
        return other

    def of_whole_prompts(self) -> "Head | None":
        """This head in the order in which a server prefills a whole prompt; None where it is the same order.

        SGLang 0.5.23 runs the rows of a forward in which no request has earlier rows unabsorbed, where all others are
        absorbed (models/deepseek_common/attention_backend_handler.py ``handle_attention_triton``, which the CPU's
        backend takes; those of GPUs prefill such rows unabsorbed too). They see keys and values as they were made, not
        as the draft KV stores them (attention_forward_methods/forward_mha.py ``forward_normal_prepare``).
        """
        if not isinstance(self._attention, LatentAttention) or not self._attention.absorbed:
            return None
        other = copy(self)
        other._attention = replace(self._attention, absorbed=False, stored=_as_made)
        other._set_run()
        return other

    def _set_run(self) -> None:
        """What follows from config and behaviour without new weights."""
        config, behaviour = self.config, self.behaviour
        self._inv_freq = inverse_frequencies(config.rope, config.rotary_dim).to(self.device)
        self._attention = replace(self._attention, config=config, other_pairs=behaviour.other_pairs)
        # Keys that are wider or narrower than an attention head keep the scale of its width.
        width = (self.cached.key / config.head_dim) ** 0.5
        factor = behaviour.score_factor * config.rope.score_factor * width
        self.numerics = replace(self.numerics, score_factor=factor)
        self._parts = replace(self._parts, config=config, behaviour=behaviour, numerics=self.numerics)

    @property
    def cached(self) -> CachedWidths:
        """What the draft KV holds of a row and layer."""
        return self._attention.cached

    def _choose_embedding(self, checkpoint: Checkpoint, target_VE: Tensor | None, profile: EngineProfile) -> Tensor:
        own_VE = checkpoint.tensors.get("embed_tokens.weight")
        same_width = self.config.hidden_size == self.config.target_hidden_size
        if own_VE is not None and (profile.own_embedding or self.config.vllms or not same_width):
            return own_VE
        if own_VE is not None:
            self.notes.append(f"{profile.name} replaces the head's own embed_tokens by the target's")
        if target_VE is None:
            raise CheckpointError(f"draft head {self.name} uses the target's embedding, and none was given")
        if target_VE.shape[1] != self.config.hidden_size:
            raise CheckpointError(
                f"draft head {self.name} is {self.config.hidden_size} wide, the target's embedding "
                f"{target_VE.shape[1]}; this head was not made for this target"
            )
        return target_VE

    def _choose_lm_head(self, target: TargetTables, held: Held) -> Tensor:
        own = self.config.lm_head == "own"
        if own and not self.behaviour.target_lm_head:
            return self._weights["lm_head.weight"]
        target_VE = target.embed_VE if target.lm_head_VE is None else target.lm_head_VE
        table_VE = self._embed_VE if self.config.lm_head == "embed" else target_VE
        if table_VE is None:
            raise CheckpointError(f"draft head {self.name} uses the target's lm_head, and none was given")
        if table_VE.shape != (self.config.vocab_size, self.config.hidden_size):
            raise CheckpointError(
                f"draft head {self.name} borrows an lm_head of {self.config.vocab_size} x {self.config.hidden_size}, "
                f"the target's is {table_VE.shape[0]} x {table_VE.shape[1]}; this head was not made for this target"
            )
        if not own:
            return self.emulation.weight("lm_head.weight", table_VE, self.device, held)
        rows_WE = table_VE.to(self.device)[self.target_ids_W]
        return self.emulation.weight("lm_head.weight", rows_WE, self.device, Held())  # rows of this head alone

    def _target_ids(self, checkpoint: Checkpoint) -> Tensor:
        ids_W = torch.arange(self.config.draft_vocab_size)
        d2t_W = checkpoint.tensors.get("d2t")
        if d2t_W is not None:
            ids_W = ids_W + d2t_W.to(ids_W.device).long()
        if int(ids_W.max()) >= self._embed_VE.shape[0]:
            raise CheckpointError(
                f"draft head {self.name} drafts token {int(ids_W.max())}, the embedding has "
                f"{self._embed_VE.shape[0]} rows; this head was not made for this target"
            )
        return ids_W.to(self.device)

    def _build_attention(self, held: Held) -> GroupedAttention | LatentAttention | BlockAttention:
        emulation, config = self.emulation, self.config
        if config.latent is not None:
            weights, absorbed = LatentWeights.of(self._weights, held), self.numerics.latent_absorbed
            return LatentAttention(
                config, config.latent, False, absorbed, weights, self.execution, self._product, emulation.stored
            )
        prefixes = [f"layers.{layer}.self_attn." for layer in range(config.num_layers)]
        biases = [stack(self._weights, prefix, "q_k_v", "bias") if self._biased else None for prefix in prefixes]
        stacked = [stack_once(self._weights, prefix, "q_k_v", held) for prefix in prefixes]
        kind = GroupedAttention if config.block is None else BlockAttention
        return kind(config, False, tuple(stacked), tuple(biases), self._product, emulation.stored)

    # ---- the forward, in the order of the paper ----

    def fuse(self, features_RKD: Tensor, sizes: ProductSizes | None = None) -> Tensor:
        """The head's state [R, E] for rows of target features [R, K*D].

        Where the config skips fc (``HeadConfig.skips_fc``), they are that state: no fc, no norm before it.
        """
        x = self.emulation.features(to_device(features_RKD, self.device))
        assert x.shape[-1] == self.config.features_width  # what does not fit was refused before (simulator/fit.py)
        return self._family.fuse(self._parts, x, sizes)

    def context(self, fused_RE: Tensor, positions_R: Tensor) -> list[KeyValues]:
        """Of a head that drafts blocks: keys and values [R, M, H] of context rows, layer by layer."""
        attention, rotation, norm = self._attention, self._rotation(positions_R), self._parts.norm
        assert isinstance(attention, BlockAttention)
        return [attention.context(layer, fused_RE, rotation, norm) for layer in range(self.config.num_layers)]

    def embed(self, ids_R: Tensor) -> Tensor:
        """Embeddings [R, E] of target token ids."""
        return self.emulation.embedding(functional.embedding(to_device(ids_R, self.device), self._embed_VE))

    def masks(self, rows: int) -> tuple[Tensor, Tensor] | None:
        """Embeddings and states [R, E] of drafted rows that are fed nothing of what was drafted before; None where they
        are: of all heads but P-EAGLE ones.

        speculators 0.9.0 models/peagle/core.py: the mask token, and ``mask_hidden`` through the norms and fc that
        features go through. vLLM's proposer does so too (v1/spec_decode, ``combine_hidden_states(mask_hidden)``).
        """
        if self.config.mask_token is None:
            return None
        embed_1E = self.embed(torch.tensor([self.config.mask_token]))
        state_1E = self._family.fuse(self._parts, self._weights[MASK_HIDDEN][0], None)
        return embed_1E.expand(rows, -1), state_1E.expand(rows, -1)

    def forward(
        self,
        embeds_RE: Tensor,
        state_RE: Tensor,
        positions_R: Tensor,
        attend: Attend,
        keep_Q: Tensor | None = None,
        sizes: ProductSizes | None = None,
    ) -> HeadOutput:
        """One pass over rows.

        ``keep_Q`` names the rows whose output is wanted: the last layer's queries, and all that follows them, run on
        these only, while keys and values are made for every row. ``sizes`` are those of the products that made each
        row, here and in ``fuse`` and ``logits``; None where these do not matter.
        """
        rotation = self._rotation(positions_R)
        hidden, residual = state_RE, state_RE
        for layer in range(self.config.num_layers):
            inputs, residual = self._family.enter(self._parts, layer, embeds_RE, hidden, residual, sizes)
            q_RNH, k_RMH, v_RMH = self._attention.project(layer, inputs, rotation, sizes, self._parts.norm)
            if keep_Q is not None and layer == self.config.num_layers - 1:
                q_RNH, residual = q_RNH[keep_Q], residual[keep_Q]
                sizes = None if sizes is None else sizes.keep(keep_Q)
            mixed = attend(layer, q_RNH, k_RMH, v_RMH)
            if not len(mixed):  # rows of a long prompt that nobody drafts from: they leave keys and values alone
                return HeadOutput(residual, residual)
            mixed = self._attention.leave(mixed, sizes)
            mixed = self._parts.linear(mixed, f"layers.{layer}.self_attn.o_proj", sizes)
            mixed = self._kept(mixed, "attention", layer)
            hidden, residual = self._parts.add_norm(mixed, residual, f"layers.{layer}.post_attention_layernorm")
            hidden = self._kept(self._family.mlp(self._parts, layer, hidden, sizes), "mlp", layer)
        normed_RE, stream_RE = self._family.leave(self._parts, hidden, residual)
        stated = "post" if self.config.norm_output else "pre"
        return HeadOutput(normed_RE, normed_RE if (self.behaviour.feedback or stated) == "post" else stream_RE)

    def logits(self, normed_RE: Tensor, sizes: ProductSizes | None = None) -> Tensor:
        """Draft logits [R, W], rounded to the head's dtype as a server's lm_head leaves them."""
        return self._product("lm_head", normed_RE, self._lm_head_WE, None, sizes)

    # ---- parts ----

    def _kept(self, outcome_RE: Tensor, block: str, layer: int) -> Tensor:
        """What a block adds to the stream: zeros where it is dropped."""
        dropped = {(block, layer), (block, None)} & set(self.behaviour.dropped)
        return torch.zeros_like(outcome_RE) if dropped else outcome_RE

    def _rotation(self, positions_R: Tensor) -> Rotation:
        angles = positions_R.to(self.device).float()[:, None] * self._inv_freq
        factor = self.config.rope.attention_factor
        return (angles.cos() * factor).to(self.dtype), (angles.sin() * factor).to(self.dtype)
