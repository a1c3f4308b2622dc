"""What is installed is what lies in the folders: setuptools leaves out what pyproject.toml does not list, unasked."""

import importlib.resources
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = SETTINGS["tool"]["setuptools"]


def test_every_folder_with_an_init_is_listed() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("[!.]*/**/__init__.py")}
    folders = {folder for folder in folders if folder.split("/")[0] not in ("build", "dist", "tests")}
    assert folders == set(SETUPTOOLS["package-dir"].values())
    assert set(SETUPTOOLS["packages"]) == set(SETUPTOOLS["package-dir"])


def test_no_python_file_lies_where_it_is_not_installed() -> None:
    nested = [
        path.relative_to(ROOT).as_posix()
        for folder in SETUPTOOLS["package-dir"].values()
        for path in (ROOT / folder).glob("*/**/*.py")
    ]
    assert nested == []


def test_every_data_file_pattern_finds_something() -> None:
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT / SETUPTOOLS["package-dir"][package]
        assert [pattern for pattern in patterns if not list(folder.glob(pattern))] == []


def test_data_files_are_found_in_the_installed_package() -> None:
    assert importlib.resources.files("replay").joinpath("py.typed").is_file()
    assert importlib.resources.files("replay.traces").joinpath("samples", "prompts.jsonl").is_file()


def test_the_version_is_said_once_in_each_place() -> None:
    import replay

    assert SETTINGS["project"]["version"] == replay.__version__
    assert f"## [{replay.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_command_is_the_one_that_is_installed() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="replay")
    assert script.value == SETTINGS["project"]["scripts"]["replay"]
    assert callable(script.load())
