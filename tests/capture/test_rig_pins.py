"""What an SGLang of another release gets beside it in `make test-sglang`."""

from importlib import metadata

import pytest
from rig.pins import pins

# Of METADATA of the wheel of SGLang 0.5.18, a few lines
ASKED = [
    "torch==2.13.0",
    "transformers==5.12.1",
    "sentencepiece",
    "flash-attn-4>=4.0.0b18",
    "xgrammar==0.2.1",
    "openai==2.6.1",
    "uvloop",
    'tomli; python_version < "3.0"',
    'diffusers==0.37.0; extra == "diffusion"',
]


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        (
            {"transformers": "5.24.0", "xgrammar": "0.2.7", "openai": "2.6.1"},
            ["transformers==5.12.1", "xgrammar==0.2.1", "torch==2.14.1+cpu"],
        ),
        ({"transformers": "5.12.1", "xgrammar": "0.2.1", "openai": "2.8.0"}, ["openai==2.6.1", "torch==2.14.1+cpu"]),
    ],
)
def test_what_is_there_in_another_version_is_named(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, str], wanted: list[str]
) -> None:
    """Not torch in another version, whose build one chooses and pip may not move, nor what no CPU needs."""
    have = {**there, "torch": "2.14.1+cpu", "uvloop": "0.23.0", "tomli": "1", "diffusers": "0"}

    def version(name: str) -> str:
        if name not in have:
            raise metadata.PackageNotFoundError(name)
        return have[name]

    monkeypatch.setattr("rig.pins.metadata.requires", lambda name: ASKED)
    monkeypatch.setattr("rig.pins.metadata.version", version)
    assert pins() == wanted
