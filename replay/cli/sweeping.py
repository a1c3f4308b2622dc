"""What `replay simulate` was asked to replay: its traces by name, its variants, and what cannot be."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.cli.terminal import say
from replay.errors import UsageError

if TYPE_CHECKING:
    from replay.capture.observed_number import Observed
    from replay.checkpoint.checkpoint import Checkpoint
    from replay.simulator.variant import Variant
    from replay.traces.reader import Trace


def name_folders(paths: tuple[Path, ...]) -> dict[str, Path]:
    """Folder names, or whole paths where two folders are called alike."""
    from replay.checkpoint.hub import spoken_name

    resolved = list(dict.fromkeys(path.resolve() for path in paths))
    names = [spoken_name(path) for path in resolved]
    return {name if names.count(name) == 1 else str(path): path for name, path in zip(names, resolved, strict=True)}


def check_temperature(wanted: float | None, recorded: float) -> None:
    if wanted is not None and wanted != recorded:
        raise UsageError(
            f"temperature {wanted:g} was asked for, the trace was recorded at {recorded:g} and is replayed so; "
            f"capture one with --temperature {wanted:g}"
        )


def every_variant(
    checkpoints: "Mapping[str, Checkpoint]",
    steps: Sequence[int],
    topk: Sequence[int],
    num_draft_tokens: Sequence[int],
    choices: Mapping[str, list[Any]],
) -> "list[Variant]":
    """The product of all that was typed, head by head; ``choices`` by field of a variant."""
    from replay.simulator.variant import default_steps, sweep

    return [
        variant
        for name, checkpoint in checkpoints.items()
        for variant in sweep(
            draft=[name],
            steps=list(steps or (default_steps(checkpoint),)),
            topk=list(topk or (1,)),
            num_draft_tokens=list(num_draft_tokens) or [None],
            **choices,
        )
    ]


def check_every_trace(
    traces: "Iterable[Trace]", variants: "Sequence[Variant]", checkpoints: "Mapping[str, Checkpoint]"
) -> None:
    """So that no trace is refused after another was replayed. Raises as ``check_variants``."""
    from replay.simulator.binding import resolve
    from replay.simulator.groups import check_variants

    for one in traces:
        check_variants([resolve(variant, checkpoints[variant.draft], one) for variant in variants], checkpoints, one)


def check_reach(seen: "Observed | None", variants: "Sequence[Variant]") -> None:
    """Raises UsageError for an observed accept length that none of ``variants`` can have."""
    from replay.capture.observed_number import refuse_beyond

    if seen is not None:
        refuse_beyond(seen, max(variant.steps for variant in variants))


def note_chains(num_draft_tokens: tuple[int, ...], steps: set[int]) -> None:
    for wanted in num_draft_tokens:
        for chain_steps in sorted(steps):
            if wanted != chain_steps + 1:
                say(f"note: topk 1 with {chain_steps} steps verifies {chain_steps + 1} tokens a round, not "
                    f"{wanted}; SGLang sets it so as well")  # fmt: skip
