"""Installing beside an SGLang changes no version of what is there: every requirement holds for what SGLang pins."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# What METADATA of the wheels 0.5.15 to 0.5.22 pins and this project may need too
PINNED = {
    "0.5.15": {"torch": "2.11.0", "transformers": "5.12.1"},
    "0.5.18": {"torch": "2.13.0", "transformers": "5.12.1"},
    "0.5.22": {"torch": "2.14.1", "transformers": "5.19.0"},
}


def required(extra: str) -> list[Requirement]:
    """What an installation with this extra asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"][extra])]


def pinned_by_the_installed() -> dict[str, str]:
    """Versions that the installed SGLang asks for and no other."""
    found = {}
    for text in metadata.requires("sglang") or ():
        one = Requirement(text)
        exact = [spec.version for spec in one.specifier if spec.operator == "=="]
        if exact and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found[canonicalize_name(one.name)] = exact[0]
    return found


@pytest.mark.parametrize("release", [*PINNED, "installed"])
@pytest.mark.parametrize("extra", ["sglang", "local"])
def test_what_sglang_pins_may_stay(release: str, extra: str) -> None:
    pins = pinned_by_the_installed() if release == "installed" else PINNED[release]
    assert "torch" in pins
    named = {canonicalize_name(one.name): one.specifier for one in required(extra)}
    moved = {name: pin for name, pin in pins.items() if name in named and not named[name].contains(pin)}
    assert moved == {}


def test_the_extra_names_no_version_of_sglang() -> None:
    (asked,) = [one for one in required("sglang") if one.name == "sglang"]
    assert not asked.specifier
