"""Features of committed rows: the taps of a row side by side in wiring order, and what behaviour makes of them.

A long request has gigabytes of them. So they are joined and changed for the rows that are asked for, a few thousand at
a time; what comes of a row never depends on which others are asked for with it.

Suffixes: R rows, T tokens of the request, K taps, D target width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from replay.engines.behaviour import Behaviour

_NOISE_STRIDE = 1 << 32  # more than any vocabulary has tokens


@dataclass(frozen=True, slots=True)
class JoinedTaps:
    """Taps of one request, each [rows, D], in wiring order; rows of it are these taps side by side [R, K*D]."""

    taps: tuple[Tensor, ...]

    def __getitem__(self, rows: slice | int) -> Tensor:
        return torch.cat([tap_RD[rows] for tap_RD in self.taps], dim=-1)

    @property
    def width(self) -> int:
        """K*D."""
        return sum(tap_RD.shape[-1] for tap_RD in self.taps)


def features_width(features_RKD: Tensor | JoinedTaps) -> int:
    """K*D."""
    return features_RKD.width if isinstance(features_RKD, JoinedTaps) else features_RKD.shape[-1]


def fed_features(
    features_RKD: Tensor | JoinedTaps,
    tokens_T: Tensor,
    prompt_tokens: int,
    behaviour: Behaviour,
    tap_width: int,
    rows: range,
) -> Tensor:
    """What some ``rows`` of a request are fed [R, K*D], where all is well the features at their positions."""
    taps = features_width(features_RKD) // tap_width
    fed_RKD = _paired(features_RKD, behaviour, rows)
    if behaviour.unit_taps:
        tap_RKD = fed_RKD.unflatten(-1, (taps, -1)).float()
        size = tap_RKD.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-6)
        fed_RKD = (tap_RKD / size).flatten(1).to(fed_RKD.dtype)
    if behaviour.noise:
        fed_RKD = _with_noise(fed_RKD, tokens_T, behaviour.noise, taps, rows)
    last = prompt_tokens - 1
    if behaviour.zero_slots or (behaviour.handoff and last in rows):
        fed_RKD = fed_RKD.clone()
        for slot in behaviour.zero_slots:
            fed_RKD.unflatten(-1, (taps, -1))[:, slot] = 0
        if behaviour.handoff and last in rows:
            fed_RKD[last - rows.start] = 0
    return fed_RKD


def _paired(features_RKD: Tensor | JoinedTaps, behaviour: Behaviour, rows: range) -> Tensor:
    """The features of these rows, or of those before them."""
    if behaviour.pairing != "earlier-features":
        return features_RKD[rows.start : rows.stop]
    if rows.start:
        return features_RKD[rows.start - 1 : rows.stop - 1]
    earlier_RKD = features_RKD[: max(0, rows.stop - 1)]
    return torch.cat([earlier_RKD.new_zeros((min(1, len(rows)), earlier_RKD.shape[-1])), earlier_RKD])


def _with_noise(features_RKD: Tensor, tokens_T: Tensor, size: float, taps: int, rows: range) -> Tensor:
    """Each tap of each row with noise of ``size`` times its root mean square.

    It is a function of the row's index and the token after it alone, whatever else is drawn and in which order.
    """
    noise_RKD = torch.empty(features_RKD.shape)
    generator = torch.Generator()
    for place, token in enumerate(tokens_T[rows.start + 1 : rows.stop + 1].tolist()):
        generator.manual_seed((rows.start + place) * _NOISE_STRIDE + token)
        noise_RKD[place] = torch.randn(features_RKD.shape[1], generator=generator)
    tap_RKD = features_RKD.unflatten(-1, (taps, -1)).float()
    rms_RKD = tap_RKD.pow(2).mean(-1, keepdim=True).sqrt()
    noisy_RKD: Tensor = tap_RKD + size * rms_RKD * noise_RKD.unflatten(-1, (taps, -1))
    return noisy_RKD.flatten(1).to(features_RKD.dtype)
