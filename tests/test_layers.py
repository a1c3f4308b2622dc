"""Imports run downward only: errors ← traces ← capture, the simulator, analysis ← the command line."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"replay": "replay", "traces": "replay.traces", "capture": "replay.capture", "analysis": "replay.analysis"}
# these may import everything, as replay.cli and replay.cli_* may
TOP = {"replay.demo", "replay.diagnose", "replay.climb", "replay.feeding"}
MAY_IMPORT = {
    "replay.errors": (),
    "replay": (),
    "replay.traces": ("replay", "replay.errors", "replay.traces"),
    "replay.capture": ("replay", "replay.errors", "replay.traces", "replay.capture"),
    "replay.analysis": ("replay", "replay.errors", "replay.traces", "replay.analysis"),
    "simulator": ("replay", "replay.errors", "replay.traces", "simulator"),
}


@cache
def _modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).glob("*.py"):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


def _is_top(module: str) -> bool:
    return module in TOP or module == "replay.cli" or module.startswith("replay.cli_")


def _layer(module: str) -> str:
    """The layer's name in MAY_IMPORT, of a module that is not on top."""
    if module in ("replay", "replay.errors"):
        return module
    for package in ("replay.traces", "replay.capture", "replay.analysis"):
        if module == package or module.startswith(package + "."):
            return package
    return "simulator"


def _imports(module: str, *, inside_functions: bool = True) -> Iterator[str]:
    """Modules of ours that ``module`` imports, leaving out those that are for types only."""
    tree = ast.parse(_modules()[module].read_text(encoding="utf-8"))
    for node in _walk(tree) if inside_functions else tree.body:
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


@pytest.mark.parametrize("module", sorted(module for module in _modules() if not _is_top(module)))
def test_a_module_imports_only_from_below(module: str) -> None:
    allowed = MAY_IMPORT[_layer(module)]
    wrong = {name for name in _imports(module) if _is_top(name) or _layer(name) not in allowed}
    assert wrong == set()


def test_only_the_command_is_above_its_parts() -> None:
    """The commands lie in replay.cli_*; what puts them together is imported by nobody."""
    assert [module for module in sorted(_modules()) if "replay.cli" in set(_imports(module))] == []


def test_only_commands_use_what_commands_share() -> None:
    """replay.demo, replay.diagnose and replay.climb import everything below them, and no command line."""
    commands = {module for module in _modules() if module == "replay.cli" or module.startswith("replay.cli_")}
    assert len(commands) > 1
    assert {module: used for module in _modules().keys() - commands if (used := commands & set(_imports(module)))} == {}


def test_no_modules_load_each_other_in_a_circle() -> None:
    graph = {module: set(_imports(module, inside_functions=False)) - {"replay"} for module in _modules()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_analysis_needs_no_torch() -> None:
    """Neither when it is loaded nor later."""
    for path in (ROOT / "analysis").glob("*.py"):
        named = [one for one in _walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(one, ast.Import)]
        assert not {alias.name.split(".")[0] for one in named for alias in one.names} & {"torch", "safetensors"}
    modules = [module for module in sorted(_modules()) if _layer(module) == "replay.analysis"]
    modules += ["replay.traces.rounds"]
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(f"import {module}" for module in modules)
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
