"""Rules on heads that draft a block of mask tokens (DFlash), which are judged by these in place of those of EAGLE-3.

Sources: SGLang 0.5.23 models/dflash.py, speculative/dflash_utils.py, speculative/dflash_worker_v2.py,
arg_groups/speculative_hook.py (``_handle_dflash``); dflash 0.1.0.
"""

from collections.abc import Iterator

from replay.check.facts import Draft, Facts
from replay.check.finding import ERROR, WARNING, Finding
from replay.check.layer_ids import indices_of, spell_taps
from replay.check.server_finding import at
from replay.check.table_findings import misshapen, of_shapes, unread
from replay.checkpoint.config import BLOCK_ARCHITECTURE, HeadConfig, parse_config
from replay.checkpoint.tensor_table import expected_tensors
from replay.engines.wiring import Wiring, dflash_wiring
from replay.errors import CheckpointError, WiringError

_IDS, _TOKENS = "dflash_config.target_layer_ids", "speculative_num_draft_tokens"


def drafts_blocks(draft: Draft) -> bool:
    """Whether its class is one that drafts blocks."""
    return draft.architecture == BLOCK_ARCHITECTURE


def fed_by_sglang(facts: Facts) -> str:
    """The taps, or why there are none."""
    config = _config(facts)
    try:
        return "unknown" if config is None else spell_taps(indices_of(_wiring(facts, config)))
    except WiringError as error:
        return str(error)


def _config(facts: Facts) -> HeadConfig | None:
    """None where the strict reader refuses it, which ``config`` says."""
    try:
        return parse_config(facts.draft.stated.values, name=facts.draft.stated.where)
    except CheckpointError:
        return None


def _wiring(facts: Facts, config: HeadConfig) -> Wiring:
    return dflash_wiring(config.layer_ids or (), layers=facts.target.layers)


def _found(facts: Facts, fault: str, what: str, field: str, seen: object, expected: object, fix: str) -> Finding:
    return Finding(fault, ERROR, what, facts.draft.stated.where, field, str(seen), str(expected), fix)


def config(facts: Facts) -> Iterator[Finding]:
    """What a replay refuses: a field that is missing, or a part that another kind of head has."""
    if facts.server.engine == "eagle":
        yield _found(facts, "config.field-drop", "EAGLE's own code runs no head that drafts blocks", "architectures",
                     BLOCK_ARCHITECTURE, "LlamaForCausalLM", "serve the head with SGLang")  # fmt: skip
    try:
        parse_config(facts.draft.stated.values, name=facts.draft.stated.where)
    except CheckpointError as error:
        yield Finding("config.field-drop", WARNING, f"this config cannot be judged further: {error}",
                      facts.draft.stated.where, "dflash_config", "another config", "one that replay reads",
                      "state what is missing as the trainer did; a head with more parts is not replayed")  # fmt: skip


def layer_ids(facts: Facts) -> Iterator[Finding]:
    """Ids are outputs of layers; those of the trained wiring where the user says it."""
    config = _config(facts)
    if config is None:
        return
    try:
        fed = _wiring(facts, config)
    except WiringError as error:
        yield _found(facts, "wiring.aux-layer-id", str(error), _IDS, list(config.layer_ids or ()),
                     f"rising ids from 0 to {facts.target.layers - 2}",
                     "write the ids that the head was trained with, or take the target that it was made "
                     "for")  # fmt: skip
        return
    stated = facts.draft.stated.count("num_target_layers")
    if facts.wiring is not None and fed != facts.wiring:
        yield _found(facts, "wiring.aux-layer-id", f"{fed} is fed, the head was trained on {facts.wiring}", _IDS,
                     list(config.layer_ids or ()), facts.wiring,
                     "write ids one below the R index of each tap")  # fmt: skip
    elif stated is not None and stated != facts.target.layers:
        yield Finding("wiring.aux-layer-id", WARNING, f"the head was made for a target of {stated} layers, this one "
                      f"has {facts.target.layers}", facts.draft.stated.where, "num_target_layers", str(stated),
                      str(facts.target.layers), "take the target that the head was made for")  # fmt: skip


def fits(facts: Facts) -> Iterator[Finding]:
    """The head lives in the target's width and vocabulary. At most one finding."""
    config, target = _config(facts), facts.target
    if config is None or config.block is None:
        return
    if config.hidden_size != target.hidden_size:
        yield _found(facts, "wiring.aux-missing", f"the head is {config.hidden_size} wide and borrows embedding and "
                     f"lm_head of a target of {target.hidden_size}", "hidden_size", config.hidden_size,
                     target.hidden_size, "take the target that the head was made for")  # fmt: skip
    elif config.block.mask_token >= target.vocab_size:
        yield _found(facts, "block.mask-token", f"SGLang stops: the mask token is none of the target's "
                     f"{target.vocab_size} tokens", "mask_token_id", config.block.mask_token,
                     f"below {target.vocab_size}", "write the mask_token_id that training used, or take the target "
                     "that the head was made for")  # fmt: skip


def tensors(facts: Facts) -> Iterator[Finding]:
    """SGLang leaves a tensor as it was initialised that it does not find, and drops one that it does not know."""
    config, draft = _config(facts), facts.draft
    if config is None or draft.quantisation is not None:
        return
    yield from unread(facts, config, draft.tensors)


def shapes(facts: Facts) -> Iterator[Finding]:
    """A tensor of another shape than the config calls for stops the server. At most one finding."""
    config, draft = _config(facts), facts.draft
    if config is None or draft.quantisation is not None:
        return
    if "fc.weight" in misshapen(config, draft.tensors):
        seen, wanted = draft.tensors["fc.weight"].shape, expected_tensors(config)["fc.weight"]
        yield _found(facts, "wiring.aux-missing", f"{config.num_taps} layer ids are stated, and fc has shape "
                     f"{list(seen)}", _IDS, list(config.layer_ids or ()), f"ids for fc of {list(wanted)}",
                     "write the ids that the head was trained with")  # fmt: skip
    else:
        yield from of_shapes(facts, config, draft.tensors)


def algorithm(facts: Facts) -> Iterator[Finding]:
    """SGLang runs such heads by an algorithm of their own, and not on a CPU. At most one finding."""
    server, name = facts.server, facts.server.text("speculative_algorithm")
    if server.engine != "sglang" or server.refused:
        return
    if (name or "").upper() != "DFLASH" and (name is not None or server.whole):
        yield at(facts, "config.argument", ERROR, "SGLang drafts blocks by the algorithm DFLASH alone",
                 "speculative_algorithm", "DFLASH", "--speculative-algorithm DFLASH")  # fmt: skip
    elif server.text("device") == "cpu":
        yield at(facts, "config.argument", ERROR, "SGLang stops: it runs DFLASH on GPUs alone", "device", "cuda",
                 "--device cuda")  # fmt: skip


def block_size(facts: Facts) -> Iterator[Finding]:
    """The tokens that are verified are the block's size, whatever the head was trained on. At most one finding."""
    config, server = _config(facts), facts.server
    if config is None or config.block is None or server.engine != "sglang" or server.refused:
        return
    field = "speculative_dflash_block_size" if server.integer(_TOKENS) is None else _TOKENS
    asked = server.integer(field)
    if asked is not None and asked != config.block.size:
        longer = "longer" if asked > config.block.size else "shorter"
        yield at(facts, "block.size", WARNING, f"blocks of {asked} tokens are {longer} than those of "
                 f"{config.block.size} that the head was trained on", field, config.block.size,
                 f"--speculative-num-draft-tokens {config.block.size}")  # fmt: skip
