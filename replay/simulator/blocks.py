"""Refusals of what has no meaning for a head that drafts a whole round in one pass, or for one that does not."""

from replay.errors import UsageError
from replay.faults.change import Subject
from replay.simulator.fit import samples_drafts
from replay.simulator.variant import ResolvedVariant
from replay.traces.reader import Trace


def check_blocks(subject: Subject, variant: ResolvedVariant, trace: Trace) -> None:
    """Raises UsageError. ``subject`` has the variant's faults in it already."""
    block, faults = subject.config.block, "+".join(map(str, variant.all_faults))
    if block is None:
        if subject.behaviour.says_of_blocks:
            raise UsageError(
                f"fault {faults} is one of blocks, and draft head {variant.draft} drafts none; type another fault, or "
                "give a DFlash head"
            )
        if subject.config.mask_token is not None:
            _check_masks(subject, variant)
        return
    if variant.topk > 1:
        raise UsageError(
            f"topk {variant.topk} drafts trees, and draft head {variant.draft} drafts a block, which is a chain; type "
            "--topk 1"
        )
    if variant.engine.name != "sglang":
        raise UsageError(
            f"engine {variant.engine.name} runs no head that drafts blocks, as draft head {variant.draft} does; type "
            "--engine sglang"
        )
    if not subject.behaviour.fits_blocks:
        raise UsageError(
            f"fault {faults} is one of heads that draft token by token, and draft head {variant.draft} drafts blocks; "
            "type another fault, such as block.attention"
        )
    if samples_drafts(variant.verify, trace):
        raise UsageError(
            f"rule {variant.verify} asks for sampled drafts, and a block is drafted greedily; type --verify target-only"
        )
    _check_steps(subject, variant, block.size)


def _check_masks(subject: Subject, variant: ResolvedVariant) -> None:
    """Of a P-EAGLE head, whose drafted rows are fed masks."""
    if variant.topk > 1:
        raise UsageError(
            f"topk {variant.topk} drafts trees, and draft head {variant.draft} is a P-EAGLE head, which drafts all "
            "tokens of a chain in one pass; type --topk 1"
        )
    if not subject.behaviour.fits_masks:
        raise UsageError(
            f"fault {'+'.join(map(str, variant.all_faults))} is one of heads that draft token by token, and draft head "
            f"{variant.draft} is a P-EAGLE head, which drafts all tokens of a round in one pass; type another fault"
        )


def _check_steps(subject: Subject, variant: ResolvedVariant, trained: int) -> None:
    """A block has one token more than are drafted; a server that is told fewer makes it shorter (SGLang 0.5.23
    speculative/dflash_worker_v2.py: block_size = speculative_num_draft_tokens)."""
    size = subject.behaviour.block_size
    if size is None and variant.steps >= trained:
        raise UsageError(
            f"{variant.steps} steps were asked for, draft head {variant.draft} drafts blocks of {trained} tokens, the "
            f"known one included, possible are 1 to {trained - 1}; type --steps {trained - 1}, or --fault "
            f"block.size={variant.steps + 1} for longer blocks than it was trained on"
        )
    if size is not None and variant.steps >= size:
        raise UsageError(
            f"{variant.steps} steps were asked for, and blocks of {size} tokens, the known one included; type --steps "
            f"{size - 1}, or a larger block.size"
        )
