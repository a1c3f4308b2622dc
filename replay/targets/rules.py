"""How the class of a target turns layer ids into captured places of its residual stream, and where it captures none.

SGLang keeps a rule for each class, and it differs by class and by release. The tables in ``tables/`` are derived from
SGLang's own source (models/*.py) by scripts/targets/derive.py, each from the wheel of its release; the tests derive
that of 0.5.23 again from the installed SGLang. A place is counted as an R index: R[0] is the embedding, R[N] what the
last of N layers gives.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

NEWEST = "0.5.23"
BEFORE_25454 = "0.5.12"  # the last table from before sgl-project/sglang#25454, which changed how DeepSeek reads ids
RELEASES = (
    "0.5.9", "0.5.12", "0.5.14", "0.5.15", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", NEWEST,
)  # fmt: skip
# Names that SGLang itself replaces before it looks for a class (0.5.23 utils/hf_transformers/config.py)
_RENAMED = {
    "LongcatCausalLM": "LongcatFlashForCausalLM",
    "LongcatFlashNgramForCausalLM": "LongcatFlashForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Captured:
    """What stated ids, or none, come to: ``asked`` as the class lists them, ``fed`` what fires, both as R indices.

    ``asked`` is in the order of the ids, ``fed`` in layer order and each once. ``stops`` says why the server does not
    serve, and is empty where it does. ``wrapped``: an index below 0 marks a layer counted from the end, as in Python.
    """

    asked: tuple[int, ...]
    fed: tuple[int, ...]
    stops: str
    wrapped: bool

    @property
    def lost(self) -> tuple[int, ...]:
        """What was asked for and never fires, rising."""
        return () if self.wrapped else tuple(sorted(set(self.asked) - set(self.fed)))


@dataclass(frozen=True, slots=True)
class CaptureRule:
    """The rule of one class.

    - ``ids``: how a stated id becomes an R index: ``plus one``, ``verbatim``, ``plus one if the first is 1`` (else
      verbatim), ``verbatim if the largest is N`` (else plus one).
    - ``default``: the same for the list [2, N // 2, N - 3] that stands in for ids that are not stated.
    - ``captures``: ``list`` where each layer's number is looked up among the indices, ``flag`` where the indexed
      layers are marked, ``nothing`` where the forward looks at neither.
    - ``flags``: whether layers are marked ``unchecked``, so that the server stops at an index that no layer has,
      ``checked``, or not at all (``none``).
    - ``last``: whether R[N] is captured too. Else R[N - 1] is the last that can be.
    - ``packed``: captured rows go into one buffer, and the server stops unless it is filled (SGLang 0.5.23
      layers/aux_hidden_states.py).

    ``where`` is the line of the setter and of the loop in ``models/``.
    """

    architecture: str
    release: str
    ids: str
    default: str
    captures: str
    flags: str
    last: bool
    packed: bool
    where: str

    @property
    def engine(self) -> str:
        return f"SGLang {self.release}"

    @property
    def first_decides(self) -> bool:
        """Whether the first id decides how all are read (sgl-project/sglang#25454)."""
        return self.ids == "plus one if the first is 1"

    @property
    def wraps(self) -> bool:
        """Whether an index below 0 marks a layer counted from the end."""
        return self.captures == "flag" and self.flags == "unchecked"

    def highest(self, layers: int) -> int:
        """The last R index that can be captured."""
        return layers if self.last else layers - 1

    def capture(self, ids: Sequence[int] | None, layers: int) -> Captured:
        """What the class captures for ``ids``, or for none stated, of a target of ``layers`` layers."""
        if ids is None:
            asked = self._read(self.default, (2, layers // 2, layers - 3), layers)
        else:
            asked = self._read(self.ids, ids, layers)
        fed = sorted(set(self._fired(asked, layers)))
        wrapped = self.wraps and min(asked, default=0) < 0
        return Captured(asked, tuple(fed), self._stops(asked, fed, layers), wrapped)

    def trouble(self, ids: Sequence[int] | None, layers: int) -> str:
        """Why a server does not feed what these ids ask for, in half a sentence; empty where it does.

        Default ids that no layer has are no trouble by themselves, the server feeds what is left of them.
        """
        captured = self.capture(ids, layers)
        if ids is not None and captured.lost and not self._beyond(captured.asked, layers):
            lost = ", ".join(f"R[{index}]" for index in captured.lost)
            never = "never fires" if len(captured.lost) == 1 else "never fire"
            return f"{lost} {never}, {self.architecture} captures R[0] to R[{self.highest(layers)}]"
        return f"it stops, {captured.stops}" if captured.stops else ""

    def _read(self, way: str, ids: Sequence[int], layers: int) -> tuple[int, ...]:
        verbatim = (
            way == "verbatim"
            or (way == "plus one if the first is 1" and not (ids and ids[0] == 1))
            or (way == "verbatim if the largest is N" and max(ids, default=0) == layers)
        )
        return tuple(index + (not verbatim) for index in ids)

    def _fired(self, asked: Sequence[int], layers: int) -> Iterator[int]:
        for index in asked:
            if self.wraps and -layers <= index < 0:
                yield index + layers
            elif 0 <= index < layers or (index == layers and self.last):
                yield index

    def _stops(self, asked: Sequence[int], fed: Sequence[int], layers: int) -> str:
        if self.captures == "nothing":
            return f"the forward of {self.architecture} captures nothing"
        if beyond := self._beyond(asked, layers):
            return f"{self.architecture} marks layer {beyond[0]}, its layers are 0 to {layers - 1}"
        if not fed:
            return "nothing is captured"
        if self.packed and len(fed) != len(asked):
            return f"{self.architecture} expects {len(asked)} captured layers and gets {len(fed)}"
        return ""

    def _beyond(self, asked: Sequence[int], layers: int) -> list[int]:
        """Indices at which the server stops, as no layer has them."""
        return [index for index in asked if self.flags == "unchecked" and not -layers <= index < layers]


@dataclass(frozen=True, slots=True)
class NoRule:
    """A class without a rule: it captures nothing and the server stops, or (``known`` false) nobody can tell here."""

    architecture: str
    release: str
    known: bool
    registered: bool  # whether SGLang has a class of this name

    @property
    def engine(self) -> str:
        return f"SGLang {self.release}"

    def __str__(self) -> str:
        """A sentence without its end."""
        if not self.known:
            return f"what {self.engine} captures of {self.architecture} cannot be told from its code"
        if self.registered:
            return f"{self.engine} cannot capture layers of {self.architecture}, and does not start with EAGLE3"
        return (
            f"{self.engine} has no class {self.architecture}, cannot capture layers of what it takes instead, and "
            "does not start with EAGLE3"
        )


def release_of(version: str | None) -> str:
    """The release whose table serves ``version``: its own where there is one, else the newest.

    A post release (``0.5.15.post1``) is read as what it mends.
    """
    return _base(version) if has_table(version) else NEWEST


def has_table(version: str | None) -> bool:
    """Whether ``version``, or what it is a post release of, has a table of its own."""
    return _base(version) in RELEASES


def _base(version: str | None) -> str:
    return re.sub(r"\.post\d+$", "", version or "", flags=re.ASCII)


def served_architecture(names: Sequence[str], release: str = NEWEST) -> str | None:
    """Which of a config's ``architectures`` SGLang takes: the first that it has a class of, else the first.

    SGLang 0.5.23 models/registry.py ``_normalize_archs``. None of an empty list.
    """
    renamed = [_RENAMED.get(name, name) for name in names]
    return next((name for name in renamed if name in _registered(release)), renamed[0] if renamed else None)


def capture_rule(architecture: str, release: str = NEWEST) -> CaptureRule | NoRule:
    """The rule of a class in a release that has a table."""
    found = _rules(release).get(architecture)
    if found is not None:
        return found
    known = architecture not in _table(release)["unknown"]
    return NoRule(architecture, release, known, architecture in _registered(release))


def default_graphs(release: str) -> bool:
    """Whether decode graphs are captured with the default layers, whatever the ids (0.5.9 cuda_graph_runner.py)."""
    return bool(_table(release)["graphs"] == "default")


def recorded_to(architecture: str, layers: int, release: str = NEWEST) -> int:
    """The last R index that a recording inside the server can hold; where the code does not tell, one layer less.

    Of ``set_dflash_layers_to_capture``, which the recording goes through.
    """
    return layers if architecture in _table(release)["recorded to"]["last layer"] else layers - 1


@cache
def _table(release: str) -> dict[str, Any]:
    text = files("replay.targets").joinpath("tables", f"{release}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


@cache
def _rules(release: str) -> dict[str, CaptureRule]:
    found = {}
    for entry in _table(release)["rules"]:
        for name, where in entry["targets"].items():
            words = {key: value for key, value in entry.items() if key != "targets"}
            found[name] = CaptureRule(architecture=name, release=release, where=where, **words)
    return found


@cache
def _registered(release: str) -> frozenset[str]:
    table = _table(release)
    return frozenset((*_rules(release), *table["none"], *table["unknown"]))
