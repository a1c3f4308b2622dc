"""Faults of heads that draft a block of mask tokens in one pass."""

from replay.engines.behaviour import BLOCK_ATTENTIONS
from replay.errors import CheckpointError
from replay.faults.change import Change, FaultValueError, Subject, behave, choice, number_of

_MOST = 65  # tokens of a block: one more than the longest draft (verify/rules.py)


def mask_token(value: str) -> Change:
    token = number_of("block.mask-token", value, "a token id, which takes the mask token's place", least=0)

    def change(subject: Subject) -> Subject:
        if token >= subject.config.vocab_size:
            raise CheckpointError(
                f"draft head {subject.checkpoint.name} has tokens 0 to {subject.config.vocab_size - 1}; type another "
                f"than {token}"
            )
        block = subject.config.block
        if block is not None and token == block.mask_token:
            raise CheckpointError(
                f"draft head {subject.checkpoint.name} has token {token} where the masks are already; type "
                f"another than {token}"
            )
        return subject.with_behaviour(mask_token=token)

    return change


def size(value: str) -> Change:
    possible = f"how many tokens a block has, the known one included, 2 to {_MOST}"
    number = number_of("block.size", value, possible, least=2)
    if number > _MOST:
        raise FaultValueError("block.size", value, possible)
    return behave(block_size=number)


def attention(value: str) -> Change:
    def change(subject: Subject) -> Subject:
        block = subject.config.block
        if block is not None and set(block.causal) == {value == "causal"}:
            other = next(kind for kind in BLOCK_ATTENTIONS if kind != value)
            raise CheckpointError(
                f"draft head {subject.checkpoint.name} has blocks that are {value} already; type "
                f"block.attention={other}"
            )
        return subject.with_behaviour(block_attention=value)

    return choice("block.attention", value, dict.fromkeys(BLOCK_ATTENTIONS, change))


def late_context(value: str) -> Change:
    return behave(late_context=number_of("block.late-context", value, "a number of the newest rows", least=1))
