"""What SGLang makes of the arguments on speculation: algorithm, steps, branches and tokens, or why it stops.

Source: SGLang 0.5.23 arg_groups/speculative_hook.py (handle_speculative_decoding and what it calls),
speculative/adaptive_spec_params.py, speculative/spec_info.py.
"""

from dataclasses import dataclass, replace

from replay.check.server import Server
from replay.traces.fields import show_name

EAGLE3 = "EAGLE3"
ALGORITHMS = ("EAGLE", EAGLE3, "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP")
_EAGLES = ("EAGLE", EAGLE3)
_CANDIDATES = (0, 1, 3, 5, 7)  # steps among which an adaptive server moves
_WIDE = ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")  # targets for which it chooses a tree
_TREE_BACKENDS = ("flashinfer", "fa3", "triton")  # that verify trees on pages of more than one token
_PAGES = {"flashmla": 64, "trtllm_mla": 64, "cutedsl_mla": 64, "tokenspeed_mla": 64, "hpc_ops": 64}
_PARTS = ("", "prefill_", "decode_")
_STEPS, _TOPK, _TOKENS = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the server does not start, in the words of a finding."""

    what: str
    field: str
    expected: str
    fix: str


@dataclass(frozen=True, slots=True)
class Speculation:
    """``algorithm`` is None where nothing is drafted; the others are None where they cannot be known here.

    ``known`` is false where the line gives no algorithm and is a part of one.
    """

    algorithm: str | None
    steps: int | None = None
    topk: int | None = None
    tokens: int | None = None
    stop: Stop | None = None
    known: bool = True


def resolve(server: Server, architecture: str | None) -> Speculation:
    """Of SGLang's arguments; ``architecture`` is the target's, by which it chooses what is not given."""
    name = _algorithm(server)
    steps, topk, tokens = (server.integer(field) for field in (_STEPS, _TOPK, _TOKENS))
    drafting = Speculation(name, steps, topk, tokens, known=server.text("speculative_algorithm") is not None)
    if name is not None and name not in ALGORITHMS:
        what = f"SGLang stops: it knows no algorithm {show_name(server.text('speculative_algorithm') or '')}"
        return _stopped(drafting, what, "speculative_algorithm", EAGLE3, "--speculative-algorithm EAGLE3")
    if name not in _EAGLES or server.live:
        return drafting
    adaptive = _is_adaptive(server)
    drafting = _adapted(drafting, server) if adaptive else _chosen(drafting, architecture)
    return drafting if drafting.stop else _settled(drafting, server)


def drafts(server: Server) -> bool:
    """Whether the head is loaded at all; taken for granted of an engine that is not SGLang."""
    return server.engine != "sglang" or server.live or _algorithm(server) in _EAGLES


def _algorithm(server: Server) -> str | None:
    """In capitals; NEXTN is EAGLE. A part of a line is taken to belong to one with EAGLE3."""
    name = server.text("speculative_algorithm")
    if name is None:
        silent = server.whole or server.text("speculative_draft_model_path") is not None
        return None if silent else EAGLE3
    return {"NEXTN": "EAGLE", "NONE": None, "": None}.get(name.upper(), name.upper())


def _is_adaptive(server: Server) -> bool:
    """Whether --speculative-adaptive is kept: it is dropped with a warning beside what it does not support."""
    beside = ("enable_multi_layer_eagle", "enable_two_batch_overlap", "enable_pdmux")
    chain = server.integer(_TOPK) in (None, 1)
    return (
        server.flag("speculative_adaptive")
        and chain
        and attention_dp(server) == 1
        and not any(server.flag(name) for name in beside)
    )


def attention_dp(server: Server) -> int:
    """Groups of attention's data parallelism: --attn-dp-size, or --dp-size with the old --enable-dp-attention."""
    groups = server.integer("attn_dp_size") or 1
    old = server.integer("dp_size") if server.flag("enable_dp_attention") else None
    return old if groups == 1 and old is not None else groups


def _adapted(drafting: Speculation, server: Server) -> Speculation:
    steps = drafting.steps
    if server.text("speculative_adaptive_config") is not None:  # its candidates lie in a file of the server's
        return replace(drafting, topk=1, tokens=None if steps is None else steps + 1)
    if steps is None:
        steps = _CANDIDATES[len(_CANDIDATES) // 2]
    if steps not in _CANDIDATES:
        possible = ", ".join(map(str, _CANDIDATES))
        what = f"SGLang stops: an adaptive server starts with {possible} steps, not {steps}"
        return _stopped(drafting, what, _STEPS, f"one of {possible}", "--speculative-num-steps 3")
    return replace(drafting, steps=steps, topk=1, tokens=steps + 1)


def _chosen(drafting: Speculation, architecture: str | None) -> Speculation:
    """_auto_choose_speculative_params: only where none of the three is given."""
    if drafting.steps is not None:
        return drafting
    if drafting.topk is not None or drafting.tokens is not None:
        return _stopped(drafting, "SGLang stops: eagle-topk or num-draft-tokens is given without num-steps", _STEPS,
                        "given as well", "give --speculative-num-steps, --speculative-eagle-topk and "
                        "--speculative-num-draft-tokens, or none of them")  # fmt: skip
    if architecture is None:
        return drafting
    steps, topk, tokens = (5, 4, 8) if architecture in _WIDE else (3, 1, 4)
    return replace(drafting, steps=steps, topk=topk, tokens=tokens)


def _settled(drafting: Speculation, server: Server) -> Speculation:
    steps, topk, tokens = drafting.steps, drafting.topk, drafting.tokens
    if steps is None:
        return drafting
    if topk is None:
        also = "" if tokens is not None else f" --speculative-num-draft-tokens {steps + 1}"
        return _stopped(drafting, "SGLang stops: num-steps is given without eagle-topk", _TOPK, "given as well",
                        f"add --speculative-eagle-topk 1{also}")  # fmt: skip
    if topk == 1:
        return replace(drafting, tokens=steps + 1)
    return replace(drafting, stop=_tree_stop(server, steps, topk, tokens) if topk > 1 else None)


def _tree_stop(server: Server, steps: int, topk: int, tokens: int | None) -> Stop | None:
    backends = [server.text(f"{part}attention_backend") for part in _PARTS]
    backend = backends[1] if backends[1] is not None and backends[1] == backends[2] else backends[0]
    page = page_size(server)
    flags = f"--attention-backend {_TREE_BACKENDS[1]}, or --speculative-eagle-topk 1"
    if "trtllm_mha" in backends:
        field = f"{_PARTS[backends.index('trtllm_mha')]}attention_backend"
        return Stop("SGLang stops: trtllm_mha verifies no trees", field, " or ".join(_TREE_BACKENDS), flags)
    if page > 1 and backend is not None and backend not in _TREE_BACKENDS:
        return Stop(f"SGLang stops: {backend} verifies no trees with page size {page}", "attention_backend",
                    " or ".join(_TREE_BACKENDS), flags)  # fmt: skip
    if tokens is None:
        return Stop(f"SGLang stops: eagle-topk {topk} is given without num-draft-tokens", _TOKENS, "given as well",
                    f"add --speculative-num-draft-tokens {min(4 * steps, tree_size(steps, topk))}")  # fmt: skip
    return None


def page_size(server: Server) -> int:
    """Tokens of a KV page: as given, or as an attention backend needs them; 1 where nothing is said."""
    backends = (server.text(f"{part}attention_backend") or "" for part in _PARTS)
    return max(server.integer("page_size") or 1, *(_PAGES.get(name, 1) for name in backends))


def _stopped(drafting: Speculation, what: str, field: str, expected: str, fix: str) -> Speculation:
    return replace(drafting, stop=Stop(what, field, expected, fix))


def tree_size(steps: int, topk: int) -> int:
    """Tokens that a tree can have, the last committed one with them (speculative/eagle_worker_v2.py, draft_forward)."""
    return 1 + topk + (steps - 1) * topk * topk
