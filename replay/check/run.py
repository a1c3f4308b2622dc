"""`replay check`: a draft head, a target and a server's arguments held against the fault table, without a trace.

To add a rule, write a function from Facts to findings beside its kind (rules_*.py) and put it into RULES.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from replay.analysis.json_document import JsonObject, object_json
from replay.check import (
    rules_acceptance,
    rules_block,
    rules_config,
    rules_depth,
    rules_final,
    rules_parallel,
    rules_positions,
    rules_precision,
    rules_quantization,
    rules_refused,
    rules_server,
    rules_target,
    rules_tensors,
    rules_values,
    rules_vocabulary,
    rules_wiring,
)
from replay.check.facts import Facts, count_emitted, read_facts
from replay.check.finding import ERROR, SEVERITIES, Finding
from replay.check.inspection import refuse_target
from replay.check.layer_ids import readings
from replay.check.server import check_engine, parse_server_arguments
from replay.checkpoint.hub import head_folder
from replay.engines.wiring import Wiring
from replay.printable import html_table
from replay.targets.rules import NEWEST
from replay.traces.fields import some
from replay.traces.given import check_given
from replay.traces.remote import as_source

if TYPE_CHECKING:
    from replay.traces.reader import Trace


@dataclass(frozen=True, slots=True)
class CheckRule:
    """``what`` it looks at, for the reader; ``needs`` says when it can: facts it must have, and their name."""

    what: str
    find: Callable[[Facts], Iterator[Finding]]
    needs: Callable[[Facts], bool] = lambda facts: True
    lacks: str = ""


def _stated(facts: Facts) -> bool:
    return facts.server.stated


_SERVER = "--server or --server-args"
_BY_REPLAY = "replay diagnose"  # of what no file says, and a trace decides
RULES: tuple[CheckRule, ...] = (
    CheckRule("model type", rules_config.model_type),
    CheckRule("types of config fields", rules_config.field_types),
    CheckRule("layers and heads in the config", rules_config.layers),
    CheckRule("names of dtypes", rules_config.dtypes),
    CheckRule("architecture", rules_tensors.architecture),
    CheckRule("sizes in the config", rules_tensors.sizes),
    CheckRule("class of the target", rules_target.target_class),
    CheckRule("layer ids", rules_wiring.layer_ids),
    CheckRule("layers of decode graphs", rules_target.decode_graphs),
    CheckRule("taps against fc", rules_wiring.taps),
    CheckRule("norms before fc and in the first layer", rules_wiring.norms),
    CheckRule("norm of the state fed back", rules_wiring.feedback),
    CheckRule("tensor names", rules_tensors.names),
    CheckRule("tensor shapes", rules_tensors.misshapen),
    CheckRule("origin of lm_head", rules_tensors.lm_head),
    CheckRule("origin of the embedding", rules_tensors.embedding),
    CheckRule("NaN and zeros in samples", rules_values.sampled),
    CheckRule("vocabulary sizes", rules_vocabulary.vocabulary_size),
    CheckRule("vocabulary map", rules_vocabulary.vocabulary_map),
    CheckRule("rope theta and scaling", rules_positions.rope),
    CheckRule("rope geometry", rules_positions.rope_geometry),
    CheckRule("attention window", rules_positions.window),
    CheckRule("longest position", rules_positions.max_length),
    CheckRule("positions of images", rules_positions.image_positions),
    CheckRule("dtype", rules_precision.dtype),
    CheckRule("inherited quantisation", rules_precision.draft_precision),
    CheckRule("quantisation of the head", rules_quantization.quantisation),
    CheckRule("quantisation of the target", rules_quantization.target_quantisation),
    CheckRule("launch line", rules_server.launch_line, _stated, _SERVER),
    CheckRule("algorithm", rules_server.algorithm, _stated, _SERVER),
    CheckRule("load format", rules_server.load_format, _stated, _SERVER),
    CheckRule("override of the configs", rules_server.override, _stated, _SERVER),
    CheckRule("context asked for", rules_server.context, _stated, _SERVER),
    CheckRule("drafting depth", rules_depth.depth, _stated, _SERVER),
    CheckRule("acceptance rule", rules_acceptance.acceptance, _stated, _SERVER),
    CheckRule("KV cache dtype", rules_precision.draft_kv, _stated, _SERVER),
    CheckRule("shares of each GPU", rules_parallel.shares, _stated, _SERVER),
    CheckRule("arguments that exclude each other", rules_refused.refused, _stated, _SERVER),
    CheckRule(
        "coverage of emitted tokens", rules_vocabulary.coverage, lambda facts: facts.emitted is not None, "--trace"
    ),
    CheckRule("whole weights", rules_values.whole, lambda facts: facts.draft.weights.extents is not None, "--weights"),
)

# Of a head that drafts blocks, in place of those above: what both kinds have, and what is its own.
BLOCK_RULES: tuple[CheckRule, ...] = (
    CheckRule("types of config fields", rules_config.field_types),
    CheckRule("names of dtypes", rules_config.dtypes),
    CheckRule("config of blocks", rules_block.config),
    CheckRule("target layer ids", rules_block.layer_ids),
    CheckRule("width and vocabulary of the target", rules_block.fits),
    CheckRule("tensor names of a DFlash head", rules_block.tensors),
    CheckRule("tensor shapes of a DFlash head", rules_block.shapes),
    CheckRule("NaN and zeros in samples", rules_values.sampled),
    CheckRule("launch line", rules_server.launch_line, _stated, _SERVER),
    CheckRule("algorithm of blocks", rules_block.algorithm, _stated, _SERVER),
    CheckRule("load format", rules_server.load_format, _stated, _SERVER),
    CheckRule("size of blocks", rules_block.block_size, _stated, _SERVER),
    CheckRule("whole weights", rules_values.whole, lambda facts: facts.draft.weights.extents is not None, "--weights"),
)

# Of a head that reads the target's final state alone: what all kinds have, and what is its own.
FINAL_RULES: tuple[CheckRule, ...] = (
    CheckRule("types of config fields", rules_config.field_types),
    CheckRule("names of dtypes", rules_config.dtypes),
    CheckRule("config of a head of the final state", rules_final.config),
    CheckRule("class of a head of the final state", rules_final.architecture),
    CheckRule("width and vocabulary of the target", rules_final.fits),
    CheckRule("state that is fed", rules_final.wiring),
    CheckRule("tensor names", rules_final.tensors),
    CheckRule("tensor shapes", rules_final.shapes),
    CheckRule("bias of fc", rules_final.bias_of_fc),
    CheckRule("NaN and zeros in samples", rules_values.sampled),
    CheckRule("longest position", rules_positions.max_length),
    CheckRule("dtype", rules_precision.dtype),
    CheckRule("launch line", rules_server.launch_line, _stated, _SERVER),
    CheckRule("algorithm", rules_final.algorithm, _stated, _SERVER),
    CheckRule("load format", rules_server.load_format, _stated, _SERVER),
    CheckRule("drafting depth", rules_depth.depth, _stated, _SERVER),
    CheckRule("one head for all steps", rules_final.one_for_all_steps, _stated, _SERVER),
    CheckRule("whole weights", rules_values.whole, lambda facts: facts.draft.weights.extents is not None, "--weights"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``findings``, the gravest first; what was ``checked``; what was not, by the option that it takes; and what each
    engine would feed the head, in words."""

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    unchecked: dict[str, tuple[str, ...]]
    fed: dict[str, str]

    @property
    def errors(self) -> int:
        return sum(finding.severity == ERROR for finding in self.findings)

    def __repr__(self) -> str:
        named = some([f"{one.severity} {one.fault}" for one in self.findings])
        return f"Outcome({named or 'nothing found'})"

    def _repr_html_(self) -> str:
        names = ("severity", "fault", "what", "seen", "expected", "fix")
        return html_table(repr(self), names, [[getattr(one, name) for name in names] for one in self.findings])

    def to_json(self) -> JsonObject:
        """The body of ``replay check --json``."""
        return {**object_json(self), "findings": [finding.to_json() for finding in self.findings]}


def check(facts: Facts) -> Outcome:
    """Run every rule that ``facts`` suffice for. Raises CheckpointError for a config field of an impossible type."""
    findings: list[Finding] = []
    checked: list[str] = []
    unchecked: dict[str, tuple[str, ...]] = {}
    blocks, final = rules_block.drafts_blocks(facts.draft), rules_final.reads_final(facts.draft)
    for rule in BLOCK_RULES if blocks else FINAL_RULES if final else RULES:
        if rule.needs(facts):
            checked.append(rule.what)
            findings += rule.find(facts)
        else:
            unchecked[rule.lacks] = (*unchecked.get(rule.lacks, ()), rule.what)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))  # stable: in the order of rules within
    if not blocks and not final and rules_positions.undecided_theta(facts):
        unchecked[_BY_REPLAY] = ("whether the head was trained at its rope theta or at 10000",)
    fed = {}
    if blocks:
        fed = {f"SGLang {NEWEST}": rules_block.fed_by_sglang(facts)}
    elif final:
        fed = {f"SGLang {NEWEST}": rules_final.fed_by_sglang()}
    elif facts.draft.uses_aux:
        fed = {engine: str(reading) for engine, reading in readings(facts.draft, facts.target, facts.server).items()}
    return Outcome(tuple(findings), tuple(checked), unchecked, fed)


def check_head(
    draft: Path | str,
    target: Path | str,
    *,
    server_args: str | None = None,
    engine: str | None = None,
    wiring: Wiring | None = None,
    trace: "Trace | None" = None,
    weights: bool = False,
) -> Outcome:
    """What `replay check` finds in a head's folder or hub id and a target's folder; options as those of the command.

    Raises CheckpointError for what cannot be read, UsageError for a target's folder as ``draft``, an engine that is not
    known or a launch line that cannot be taken apart.

    >>> replay.check_head(DRAFT, TARGET).errors > 0
    True
    """
    check_given("server_args", server_args, (str, type(None)), "a launch line was expected, in one text")
    check_given("engine", engine, (str, type(None)), "the name of an engine was expected")
    check_given("wiring", wiring, (Wiring, type(None)), "a wiring was expected; make one by replay.parse_wiring")
    check_given("weights", weights, bool, "True or False was expected")
    check_engine(engine)
    folder = head_folder(as_source(draft))
    refuse_target(folder)
    server = None if server_args is None else parse_server_arguments(server_args, engine)
    emitted = None if trace is None else _emitted(trace)
    facts = read_facts(
        folder, as_source(target), server, engine=engine, wiring=wiring, emitted=emitted, weights=weights
    )
    return check(facts)


def _emitted(trace: object) -> Counter[int]:
    from replay.traces.reader import Trace

    check_given("trace", trace, Trace, "a trace was expected; open one by replay.Trace.open")
    assert isinstance(trace, Trace)
    return count_emitted(trace)
