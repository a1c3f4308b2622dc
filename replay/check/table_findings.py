"""Findings on the tensors of a head against the table that its config implies."""

from collections.abc import Iterator, Mapping

from replay.check.facts import Facts
from replay.check.finding import ERROR, Finding
from replay.checkpoint.config import HeadConfig
from replay.checkpoint.headers import TensorFact
from replay.checkpoint.tensor_table import expected_tensors, optional_tensors
from replay.traces.fields import some


def unread(facts: Facts, config: HeadConfig, tensors: Mapping[str, TensorFact]) -> Iterator[Finding]:
    """SGLang leaves a tensor as it was initialised that it does not find, and drops one that it does not know.

    At most one finding.
    """
    table, file = expected_tensors(config), facts.draft.weights.file
    missing = [name for name in table if name not in tensors]
    dropped = [name for name in tensors if name not in table and name not in optional_tensors(config)]
    if missing:
        yield Finding("weights.missing", ERROR, f"the head has no {some(missing)}, so it stays as initialised",
                      file, missing[0], "absent", str(list(table[missing[0]])),
                      "export the head again with all tensors")  # fmt: skip
    elif dropped:
        yield Finding("weights.missing", ERROR, f"SGLang drops {some(dropped)} without a word", file,
                      dropped[0], "present", "absent",
                      "state the matching field in config.json, or export the head without them")  # fmt: skip


def misshapen(config: HeadConfig, tensors: Mapping[str, TensorFact]) -> list[str]:
    """The tensors of another shape than the config calls for."""
    table = expected_tensors(config)
    return [name for name, shape in table.items() if name in tensors and tensors[name].shape != shape]


def of_shapes(facts: Facts, config: HeadConfig, tensors: Mapping[str, TensorFact]) -> Iterator[Finding]:
    """A tensor of another shape than the config calls for stops the server. At most one finding."""
    if wrong := misshapen(config, tensors):
        yield Finding("weights.layout", ERROR, f"{some(wrong)} {'has' if len(wrong) == 1 else 'have'} another shape "
                      "than the config calls for", facts.draft.weights.file, wrong[0],
                      str(list(tensors[wrong[0]].shape)), str(list(expected_tensors(config)[wrong[0]])),
                      "copy config.json from where the head was trained, or export the head again")  # fmt: skip
