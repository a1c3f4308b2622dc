"""Rooms: who may import whom. CONTRIBUTING.md shows the same order for people."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"replay": "replay", "traces": "replay.traces", "capture": "replay.capture", "analysis": "replay.analysis"}
# A module imports from its own room and from the floors before its own, function-level imports included.
FLOORS = (
    {"replay.printable", "replay.narrow_products"},
    {"replay.errors"},
    {"replay.traces", "replay.targets"},
    {"replay.checkpoint", "replay.engines", "replay.verify", "replay.capture", "replay.analysis"},
    {"replay.faults", "replay.head", "replay.check"},
    {"replay.drafting"},
    {"replay.simulator"},
    {"replay.diagnosis", "replay.training"},
    {"replay.cli"},
    {"replay.__main__"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Inside these, rooms of their own; what lies beside the rooms is their common ground and imports none of them.
DIVIDED = ("replay.capture", "replay.analysis")
MAY_SEE = {
    ("replay.analysis.diagnosis", "replay.analysis.ladder"),
    *(
        ("replay.analysis.page", f"replay.analysis.{room}")
        for room in ("compare", "diagnosis", "ladder", "plan", "report", "tokens")
    ),
}


@cache
def _modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in inside if part != "__init__")])] = path
    return found


def _room(module: str) -> str:
    """``replay.head`` of ``replay.head.model``; the package's own ``__init__`` is ``replay``."""
    return ".".join(module.split(".")[:2])


def _inner_room(module: str) -> str:
    """``replay.capture.local`` of ``replay.capture.local.record``; of a module beside the rooms the outer one."""
    package = module if _modules()[module].name == "__init__.py" else module.rpartition(".")[0]
    return package


def _parsed(module: str) -> ast.Module:
    return ast.parse(_modules()[module].read_text(encoding="utf-8"))


@cache
def _imports(module: str) -> frozenset[str]:
    """Modules of ours that ``module`` imports anywhere, leaving out those that are for types only."""
    return frozenset(_imported(module))


def _imported(module: str) -> Iterator[str]:
    for node in _walk(_parsed(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "replay")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "replay":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in _modules() else node.module


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from _walk(child)


def test_every_module_lies_in_a_room() -> None:
    assert {_room(module) for module in _modules()} - {"replay"} == FLOOR.keys()


@pytest.mark.parametrize("module", sorted(_modules()))
def test_a_module_imports_only_from_below(module: str) -> None:
    if module == "replay":  # loads its public names on first use
        assert not _imports(module)
        return
    room = _room(module)
    others = {name for name in _imports(module) if _room(name) not in ("replay", room)}
    assert {name for name in others if FLOOR[_room(name)] >= FLOOR[room]} == set()


@pytest.mark.parametrize("module", sorted(name for name in _modules() if _room(name) in DIVIDED))
def test_rooms_within_a_room_do_not_see_each_other(module: str) -> None:
    outer, inner = _room(module), _inner_room(module)
    seen = {_inner_room(name) for name in _imports(module) if _room(name) == outer} - {outer, inner}
    assert {name for name in seen if (inner, name) not in MAY_SEE} == set()


def test_only_the_command_is_above_its_parts() -> None:
    """What puts the commands together is imported where the command begins, what they share by commands alone."""
    above = [module for module in sorted(_modules()) if "replay.cli.app" in _imports(module)]
    assert above == ["replay.cli.start"]


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: _imports(module) - {"replay", module} for module in _modules()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_only_the_plugin_imports_sglang() -> None:
    foreign = {
        module
        for module in _modules()
        for node in ast.walk(_parsed(module))
        if isinstance(node, ast.ImportFrom | ast.Import)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        if name.split(".")[0] == "sglang"
    }
    assert {_inner_room(module) for module in foreign} == {"replay.capture.plugin"}


def test_analysis_needs_no_torch() -> None:
    """Neither when it is loaded nor later."""
    modules = [module for module in sorted(_modules()) if _room(module) == "replay.analysis"]
    for module in modules:
        named = [one for one in _walk(_parsed(module)) if isinstance(one, ast.Import)]
        assert not {alias.name.split(".")[0] for one in named for alias in one.names} & {"torch", "safetensors"}
    modules += ["replay.traces.rounds_file"]
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(f"import {module}" for module in modules)
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
