"""How an engine runs a head: which rows it makes, what each may see, what stays behind after a round.

The default is what a healthy server does (SGLang 0.5.23 speculative/eagle_worker_v2.py, models/llama_eagle3.py). Faults
(faults/table.py) are other values of these fields. What drafts (the room drafting/), the head (head/model.py) and the
twin (tests/twins/rounds.py) read them; each says for itself what a field means there, so that tests can hold them
against each other.

Words: row i pairs the embedding of token x[i+1] with the features of position i. Anchor S drafts from row S-1, its
anchor row; the rows that its steps add are drafted rows, j = 1 .. K-1 embedding the j-th drafted token.
"""

from dataclasses import dataclass, fields
from typing import Literal

# What a committed row pairs: x[i+1] with its features; its own token x[i]; or the features of the position before.
PAIRINGS = ("next-token", "own-token", "earlier-features")
# Which drafted rows a drafted row sees beside itself: all earlier ones; none, its KV slot being the only one; and
# itself neither, where the length that attention reads was not advanced.
CHAINS = ("grow", "overwrite", "unseen")
# What becomes of the draft KV after verify: rows of true features replace the drafted ones; accepted drafted rows stay
# and only what is missing is made from true features; every drafted row stays and the true ones come behind them.
REWRITES = ("refresh", "stale", "accumulate")
# After which rounds the row of the last accepted drafted token leaves no KV: after none; after each that took one; or
# after those that took every drafted token, whose last one no drafting step ever ran.
HOLES = ("never", "accepted", "full")
# The row from which the next round drafts: the last accepted token's; the first or the one before the last of the rows
# that verify rewrote; the last drafted one, accepted or not; or two of them, the last accepted token's for the first
# drafted token and the first that verify rewrote for the state that the first drafting step is fed.
NEXT_ROWS = ("accepted", "first", "previous", "drafted", "hidden-only")
# Which rows that verify makes from true features get those of another: none; the last one, the next anchor's, those of
# the row before it; each one those of the row before it; or all those of the first, or of the last, among them. Rows of
# the prompt keep theirs.
STALE_ROWS = ("none", "anchor", "previous", "first", "last")
# Of which row of a server's batch the state is that a draft step hands to a row: its own; that of the row before it or
# behind it, the first and the last being neighbours; of the row as far from the other end; of the other row of its
# pair, the first with the second, the third with the fourth; or all of them that of the first row.
CROSSED = ("none", "previous", "next", "reversed", "pairs", "first")
# Which rows of its block a row sees: those before it and itself, or all of them.
BLOCK_ATTENTIONS = ("causal", "bidirectional")
# A prompt came in the pieces that the trace records, request by request, instead of in chunks of one size.
RECORDED: Literal["recorded"] = "recorded"
Chunk = int | Literal["recorded"]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What may differ while a head runs. Numbers are rows (tokens) unless said otherwise.

    Head: ``feedback`` ``pre`` or ``post`` the final norm (None: as the config says), ``skip_norms`` norm names that
    multiply nothing and normalise nothing, ``residual_normed`` whether the stream starts from the normed features,
    ``state_normed_twice`` the state passes the embedding's norm before its own, ``features_first`` order of the halves
    that enter layer 0, ``later_norm`` norm at the entry of layers >= 1 (None, as of ``residual_normed``: as the config
    says), ``later_residual`` whether these add to the stream before them, ``other_pairs`` RoPE pairs (2i, 2i+1) instead
    of (i, i + half), or the other way round where the head's are (2i, 2i+1), ``target_lm_head`` the target's output
    rows stand in for the head's, ``score_factor`` what attention scores are multiplied by beside head_dim**-0.5,
    ``dropped`` blocks whose outcome is not added to the stream, each ``attention`` or ``mlp`` with its layer (None:
    every layer).

    Rows: ``pairing``, ``zero_slots`` slots of the wiring that are fed zeros, ``unit_taps`` every tap divided by its
    root mean square, ``chunk`` the prompt came in chunks (of so many tokens, or RECORDED) whose last rows embed what
    the target would sample there, ``handoff`` the last prompt row has zero features, ``noise`` Gaussian noise on every
    tap of a row, as a part of that tap's root mean square: the same for the same position and token (drafting/rows.py).

    Positions: ``offset`` of all rows, ``drafted_offset`` of drafted rows beyond that, ``advance`` per step,
    ``max_position`` positions from there on are the last one below, ``dummy_from`` anchors whose row stands there or
    later draft token 0.

    Attention: ``window`` keys that a row sees, itself included, ``alone`` committed rows other than the anchor row are
    out of sight, ``blank_prefix`` so many prompt rows (never the last one) left no KV, ``blank_output`` rows of output
    tokens [start, stop) left none, ``blank_fill`` whether what was left is KV slots of ``zero`` or ``masked`` ones.

    Drafted rows: ``chain``, ``crossed`` whose state of the batch a draft step is handed (drafting/crossed.py),
    ``crossed_once`` only the first one of a round, from the anchor rows.

    After verify: ``rewrite``, ``hole`` where the last accepted drafted token's row leaves no KV, ``next_row``,
    ``stale_rows`` whose features the rows get that verify makes from true ones.

    Blocks, of a head that drafts them: ``block_size`` tokens of a block (None: one more than are drafted),
    ``mask_token`` and ``block_attention`` (None: as the config says), ``late_context`` so many of the newest committed
    rows are not there yet.
    """

    feedback: str | None = None
    skip_norms: tuple[str, ...] = ()
    residual_normed: bool | None = None
    state_normed_twice: bool = False
    features_first: bool = False
    later_norm: str | None = None
    later_residual: bool = True
    other_pairs: bool = False
    target_lm_head: bool = False
    score_factor: float = 1.0
    dropped: tuple[tuple[str, int | None], ...] = ()

    pairing: str = "next-token"
    zero_slots: tuple[int, ...] = ()
    unit_taps: bool = False
    chunk: Chunk | None = None
    handoff: bool = False
    noise: float = 0.0

    offset: int = 0
    drafted_offset: int = 0
    advance: int = 1
    max_position: int | None = None
    dummy_from: int | None = None

    window: int | None = None
    alone: bool = False
    blank_prefix: int = 0
    blank_output: tuple[int, int] = (0, 0)
    blank_fill: str = "zero"
    chain: str = "grow"
    crossed: str = "none"
    crossed_once: bool = False

    rewrite: str = "refresh"
    hole: str = "never"
    next_row: str = "accepted"
    stale_rows: str = "none"

    block_size: int | None = None
    mask_token: int | None = None
    block_attention: str | None = None
    late_context: int = 0

    @property
    def follows_walk(self) -> bool:
        """Whether the draft KV or the next draft depends on the rounds before, so that rounds must run in order."""
        return self._differs(_AFTER_VERIFY)

    @property
    def crosses(self) -> bool:
        """Whether requests are handed states of others, so that those of a batch must be drafted together."""
        return self.crossed != "none"

    @property
    def chains_only(self) -> bool:
        """Whether it says something of drafted rows or of what a row sees, which trees do in their own way."""
        return self._differs(_DRAFTED + _AFTER_VERIFY)

    @property
    def says_of_blocks(self) -> bool:
        """Whether it says something of the blocks that only some heads draft."""
        return self._differs(_BLOCKS)

    @property
    def fits_blocks(self) -> bool:
        """Whether all that it says has a meaning for a head that drafts blocks."""
        return not self._differs(_NOT_OF_BLOCKS) and self.pairing != "own-token"

    @property
    def fits_masks(self) -> bool:
        """Whether all that it says has a meaning for a head whose drafted rows are fed masks, all in one pass."""
        return not self._differs(_NOT_OF_MASKS) and self.next_row not in ("drafted", "hidden-only")

    def of_first_pass(self) -> "Behaviour":
        """The fields on which the committed rows of a round depend; drafted rows and what follows as if healthy."""
        return Behaviour(**{name: getattr(self, name) for name in _ALL if name not in _LATER})

    def _differs(self, names: tuple[str, ...]) -> bool:
        return any(getattr(self, field.name) != field.default for field in fields(self) if field.name in names)


_AFTER_VERIFY = ("rewrite", "hole", "next_row", "stale_rows")
_DRAFTED = (
    "drafted_offset",
    "advance",
    "max_position",
    "dummy_from",
    "window",
    "alone",
    "blank_prefix",
    "blank_output",
    "offset",
    "chain",
)
_BLOCKS = ("block_size", "mask_token", "block_attention", "late_context")
# What is said of rows that a head which drafts blocks does not make, or of a state that it does not hand on.
_NOT_OF_BLOCKS = (
    "feedback",
    "residual_normed",
    "state_normed_twice",
    "features_first",
    "later_norm",
    "later_residual",
    "target_lm_head",
    "chunk",
    "chain",
    "crossed",
    "crossed_once",
    *_AFTER_VERIFY,
)
# What is said of a state that drafted rows hand on, or of drafted rows that are made one after the other.
_NOT_OF_MASKS = ("feedback", "chain", "crossed", "crossed_once")
# Read only after the first pass over committed rows.
_LATER = ("drafted_offset", "advance", "dummy_from", "chain", "crossed", "crossed_once", *_AFTER_VERIFY, *_BLOCKS)
_ALL = tuple(field.name for field in fields(Behaviour))
HEALTHY = Behaviour()
