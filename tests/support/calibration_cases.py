"""What a calibration of `replay diagnose` records and judges: names of faults, and what is true of each.

Names of injections are those of rig/injections/faults.py; a recording lies in a folder of the case's name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HEALTHY, TABLE, OUTSIDE_THE_TABLE = "healthy", "table", "outside"
CASE_FILE = "case.json"


@dataclass(frozen=True, slots=True)
class Case:
    """One recording: the injection that is active, which prompts, and how the server is started for it."""

    name: str
    group: str
    injection: str = "none"
    first_prompt: int = 1  # of every sixth sample prompt
    concurrency: int = 4
    arguments: tuple[str, ...] = ()
    wiring: str | None = None

    @property
    def kind(self) -> str | None:
        """The kind that is true; None where the table has none."""
        return self.name.partition("=")[0] if self.group == TABLE else None

    @property
    def value(self) -> str:
        """The value that is true, of a case of the table."""
        return self.name.partition("=")[2]

    @property
    def folder(self) -> str:
        """A folder name that says the case and that a shell takes unquoted."""
        return self.name.replace("=", "--").replace(":", "_").replace(",", "_")


def write_case(folder: Path, case: Case, how: str) -> None:
    """Say beside a recording what is true of it."""
    said = {"name": case.name, "group": case.group, "how": how}
    (folder / case.folder / CASE_FILE).write_text(json.dumps(said))


def read_cases(folder: Path) -> list[tuple[Case, Path]]:
    """The recordings below ``folder``, each with its trace, by group and name."""
    found = []
    for path in folder.rglob(CASE_FILE):
        said = json.loads(path.read_text())
        found.append((Case(said["name"], said["group"]), path.parent / "trace"))
    return sorted(found, key=lambda pair: (pair[0].group, pair[0].name, str(pair[1])))


# Two names of one effect, with the reason. A name is right for the other only if the pair stands here.
SAME_IN_EFFECT: Mapping[frozenset[str], str] = {
    frozenset({"x.attention-lost", "weights.missing=layers.0.self_attn.o_proj"}): (
        "an output projection that holds zeros gives no attention output"
    ),
    frozenset({"x.mlp-lost", "weights.missing=layers.0.mlp.down_proj"}): (
        "a down projection that holds zeros gives no MLP output"
    ),
    frozenset({"x.mlp-lost", "state.dropped=mlp"}): "the table has this fault by now",
    frozenset({"x.attention-lost", "state.dropped=attention"}): "the table has this fault by now",
    frozenset({"x.attention-scaled", "attn.scale=2"}): "the table has this fault by now",
    frozenset({"x.norm-epsilon", "wiring.norm-eps=0.1"}): "the table has this fault by now",
}


def healthy_cases() -> list[Case]:
    """Servers with nothing wrong: other prompts, other concurrency, changes that change nothing."""
    return [
        Case("healthy.a", HEALTHY),
        Case("healthy.b", HEALTHY, first_prompt=2, concurrency=1),
        Case("healthy.c", HEALTHY, first_prompt=3, concurrency=8),
        Case("healthy.d", HEALTHY, first_prompt=4),
        Case("healthy.e", HEALTHY, first_prompt=5, concurrency=2),
        Case("ok.zero-bias", HEALTHY, injection="ok.zero-bias"),
    ]


def harmless_cases() -> list[Case]:
    """Healthy servers that run otherwise, slowly on a machine that is busy."""
    return [
        Case("ok.threads", HEALTHY, injection="ok.threads", first_prompt=2),
        Case("ok.chunked", HEALTHY, arguments=("--chunked-prefill-size", "32")),
    ]


def wired_cases() -> list[Case]:
    """Servers that were told another wiring when they were started, and say so in the trace."""
    return [Case(f"wiring.aux-layer-id={wiring}", TABLE, wiring=wiring) for wiring in ("3,16,28", "embed,16,28")]


def injected_cases() -> list[Case]:
    """A case for each injection: outside the table, then the first of each kind of the table, then the others."""
    from rig.injections.faults import OF_THE_TABLE, OUTSIDE

    outside = [Case(name, OUTSIDE_THE_TABLE, injection=name) for name in OUTSIDE]
    table = [Case(name, TABLE, injection=name) for name in OF_THE_TABLE]
    first = list({case.kind: case for case in reversed(table)}.values())[::-1]
    return [*outside, *first, *(case for case in table if case not in first)]


def every_case() -> list[Case]:
    """In the order in which they are recorded."""
    return [*healthy_cases(), *injected_cases(), *harmless_cases(), *wired_cases()]


# In a tree the rows of a verify are put together anew, and rows see each other in the tree's own way.
_OF_CHAINS = ("wiring.aux-layer-id", "position.offset", "position.max-len", "attn.", "kv.", "state.hidden-row",
              "x.every-other", "x.drafted-token", "x.values", "x.prefix")  # fmt: skip


def tree_cases() -> list[Case]:
    """Those of ``every_case`` that say the same of a server that drafts trees."""
    return [case for case in every_case() if case.wiring is not None or not case.name.startswith(_OF_CHAINS)]
