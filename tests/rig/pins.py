"""What the installed SGLang names one version of, and this environment has in another: lines for pip.

    python tests/rig/pins.py > pins.txt && python -m pip install --requirement pins.txt

Read from what the wheel says of itself, so that every release gets its own Transformers. Only of packages that
requirements.txt brings or the project has: what is not there serves a GPU. The installed torch is named last, so that
pip does not move it for what these require.
"""

from importlib import metadata

from packaging.requirements import Requirement

# torch is the CPU build that the Makefile chooses. sentencepiece: see requirements.txt.
KEPT = ("torch", "sentencepiece")


def pins() -> list[str]:
    """Requirements that name a version, where another one is installed."""
    asked = [Requirement(text) for text in metadata.requires("sglang") or ()]
    found = [f"{one.name}{one.specifier}" for one in asked if one.name not in KEPT and _other_is_there(one)]
    return [*found, f"torch=={metadata.version('torch')}"]


def _other_is_there(one: Requirement) -> bool:
    if one.marker is not None and not one.marker.evaluate({"extra": ""}):
        return False
    try:
        return not one.specifier.contains(metadata.version(one.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    print("\n".join(pins()))
