"""An independent speculative sampler: the decoder of decoder.py with coins, rule by rule as the papers have them.

``target-only`` (a drafted argmax is taken with probability p, else another token is drawn from what p leaves) and
``rejection`` (arXiv 2211.17192, algorithm 1). Temperature, top-k and top-p are those of Transformers. It shares no code
with replay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature

import torch
from support.decoder import PlainHead
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

Warp = Callable[[Tensor], Tensor]


def warper(temperature: float, top_k: int = 0, top_p: float = 1.0) -> Warp:
    """Logits [R, V] to probabilities [R, V]."""
    steps = [TemperatureLogitsWarper(temperature)]
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []

    def probabilities(logits: Tensor) -> Tensor:
        for step in steps:
            logits = step(torch.empty(0), logits)
        return logits.softmax(-1)

    return probabilities


@dataclass
class SampledRound:
    """``accepted`` stops at the end of the output. ``drafted_p`` is p of each drafted token after those before it;
    ``p`` and ``q`` those of the emitted tokens, as many as the round has steps."""

    anchor: int
    drafted: list[int]
    accepted: int
    drafted_p: list[float]
    p: list[float]
    q: list[float]


@torch.inference_mode()
def sample(
    target: PreTrainedModel, head: PlainHead, prompt: Sequence[int], *, rule: str, warp: Warp, temperature: float,
    taps: Sequence[int], steps: int, new_tokens: int, eos: int, seed: int,
) -> tuple[list[int], list[SampledRound]]:  # fmt: skip
    """Speculative sampling of one prompt; the text, and its rounds."""
    coin = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=target.config)
    cache_name = "cache" if "cache" in signature(target.forward).parameters else "past_key_values"
    head.forget(0)
    ids = torch.tensor(head.target_id)

    def run(tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        out = target(torch.tensor([list(tokens)]), **{cache_name: cache}, output_hidden_states=True)
        return warp(out.logits[0]), torch.cat([out.hidden_states[tap][0] for tap in taps], dim=-1)

    def draw(weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=coin))

    def propose(logits: Tensor) -> tuple[int, Tensor]:
        """A drafted token, and the distribution over target ids that it came from."""
        if rule == "target-only":
            token = int(ids[logits.argmax()])
            return token, torch.zeros(target.config.vocab_size).index_fill(0, torch.tensor([token]), 1.0)
        q = torch.zeros(target.config.vocab_size).index_put((ids,), (logits / temperature).softmax(-1))
        return draw(q), q

    text = list(prompt)
    p, features = run(text)
    text.append(draw(p[-1]))
    rounds: list[SampledRound] = []
    limit = len(prompt) + new_tokens
    while len(text) < limit and text[-1] != eos:
        anchor = len(text) - 1
        for row in range(len(head.keys), anchor):  # rows of true features that the head has not seen
            logits, state = head.row(text[row + 1], head.fuse(features[row - (anchor - len(features))]), row)
        drafted = [propose(logits)]
        for position in range(anchor, anchor + steps - 1):
            logits, state = head.row(drafted[-1][0], state, position)
            drafted.append(propose(logits))
        head.forget(anchor)
        p, features = run([text[-1], *(token for token, _ in drafted)])
        accepted = 0
        while accepted < steps:
            token, q = drafted[accepted]
            if torch.rand(1, generator=coin) * q[token] >= p[accepted][token]:
                break
            accepted += 1
        left = p[accepted] if accepted == steps else (p[accepted] - drafted[accepted][1]).clamp(min=0)
        emitted = [*(token for token, _ in drafted[:accepted]), draw(left)]
        if eos in emitted:
            emitted = emitted[: emitted.index(eos) + 1]
        emitted = emitted[: limit - len(text)]
        text += emitted
        places = list(enumerate(emitted[:steps]))
        rounds.append(
            SampledRound(
                anchor,
                [token for token, _ in drafted],
                min(accepted, len(emitted)),
                [float(p[place][token]) for place, (token, _) in enumerate(drafted)],
                [float(p[place][token]) for place, token in places],
                [float(drafted[place][1][token]) for place, token in places],
            )
        )
        if accepted < steps:
            cache.crop(accepted - steps)  # a negative number takes that many rows off the end
        features = features[: accepted + 1]
    return text[len(prompt) :], rounds
