"""Which layers each target of an SGLang captures for an EAGLE-3 head, derived from the source of its model classes.

    python scripts/targets/derive.py --wheel sglang-0.5.23-....whl > replay/targets/tables/0.5.23.json

Without --wheel it reads the SGLang that is installed beside this Python. Nothing of SGLang is imported. What it prints
is the table that `replay check`, `simulate` and `serve` go by; replay/targets/rules.py says what its words mean. A
class whose code it cannot read with certainty stands under `unknown`, with the line that it does not know.
"""

import argparse
import ast
import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path

from capture_loop import handed_over, read_loop
from capture_setter import Setter, Symbol
from class_source import Class, Unreadable
from model_files import Package

EAGLE3, RECORDING = "set_eagle3_layers_to_capture", "set_dflash_layers_to_capture"
_PLUS: Symbol = ("plus", "ids")
IDS: dict[Symbol, str] = {
    _PLUS: "plus one",
    "ids": "verbatim",
    ("if", "first id is 1", _PLUS, "ids"): "plus one if the first is 1",
    ("if", "largest id is N", "ids", _PLUS): "verbatim if the largest is N",
}
DEFAULTS: dict[Symbol, str] = {"default": "verbatim", ("plus", "default"): "plus one"}
Rule = dict[str, str | bool]


def rule_of(one: Class, name: str) -> tuple[Rule, str] | None:
    """The rule of a class, and where its setter and its loop stand; None where it has no setter. Raises Unreadable."""
    method = one.method(name)
    if method is None:
        return None
    given = Setter(name).call(one, "ids")
    if given.raised:
        return None
    if len(given.lists) != 1 or len(given.flags) > 1 or len(given.switched) != 1:
        raise Unreadable(f"{method.where} sets {len(given.lists)} lists and {len(given.switched)} switches")
    (core, ids), flags = given.lists[0], given.flags[0][1] if given.flags else "none"
    if ids not in IDS:
        raise Unreadable(f"{method.where} makes {ids} of ids")
    loop = read_loop(core)
    tests = [kind for kind in sorted(loop.tests) if kind == "list" or flags != "none"]
    if len(tests) > 1:
        raise Unreadable(f"{loop.where} captures by list and by flag")
    if not handed_over(given.switched[0]):
        raise Unreadable(f"{given.switched[0].file}: {given.switched[0].name} hands no captured states on")
    rule: Rule = {"ids": IDS[ids], "default": default_of(one, core), "captures": tests[0] if tests else "nothing",
                  "flags": flags, "last": loop.last, "packed": loop.packed}  # fmt: skip
    return rule, f"{method.where} {loop.where}"


def default_of(one: Class, core: Class) -> str:
    """How the list [2, N // 2, N - 3] is read that stands in for ids. Raises Unreadable."""
    without = Setter(EAGLE3).call(one, "none").lists if one.method(EAGLE3) else []
    if not without:
        return "none"
    if len(without) != 1 or without[0][0] != core or without[0][1] not in DEFAULTS:
        raise Unreadable(f"{one.file}: {one.name} makes {without[0][1]} of no ids")
    return DEFAULTS[without[0][1]]


def captures(package: Package) -> dict[str, object]:
    """Rules with their targets, targets that cannot capture, and those whose code this script cannot read."""
    rules: dict[str, dict[str, str]] = defaultdict(dict)
    none, unknown = [], {}
    for one in package.entries():
        try:
            found = rule_of(one, EAGLE3)
        except Unreadable as error:
            unknown[one.name] = str(error)
            continue
        if found is None:
            none.append(one.name)
        else:
            rules[json.dumps(found[0])][one.name] = found[1]
    listed = [json.loads(rule) | {"targets": dict(sorted(targets.items()))} for rule, targets in sorted(rules.items())]
    return {"rules": listed, "none": sorted(none), "unknown": dict(sorted(unknown.items()))}


def recorded_to(package: Package) -> dict[str, list[str]]:
    """By whether a recording can hold R[N], the stream after the last layer: the targets whose code can be read."""
    listed: dict[str, list[str]] = {"last layer": [], "one layer less": []}
    for one in package.entries():
        try:
            found = rule_of(one, RECORDING)
        except Unreadable:
            continue
        if found is not None and found[0]["captures"] != "nothing":
            listed["last layer" if found[0]["last"] else "one layer less"].append(one.name)
    return {name: sorted(targets) for name, targets in listed.items()}


def graphs(package: Package) -> str:
    """Whether decode graphs are captured with the stated layers, or with the default ones that no argument means."""
    for file, text in package.runners.items():
        if "graph" not in file or EAGLE3 not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(f".{EAGLE3}") and not node.args:
                return "default"
    return "as stated"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="a wheel of SGLang, or the folder that it is installed in")
    package = Package(parser.parse_args().wheel or _installed())
    table = {"version": package.version, "graphs": graphs(package), **captures(package),
             "recorded to": recorded_to(package)}  # fmt: skip
    json.dump(table, sys.stdout, indent=1)
    print()


def _installed() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no SGLang is installed beside this Python; give --wheel PATH")
    return Path(spec.submodule_search_locations[0]).parent


if __name__ == "__main__":
    main()
