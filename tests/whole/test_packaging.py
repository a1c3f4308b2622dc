"""What is installed is what lies in the folders: setuptools leaves out what pyproject.toml does not list, unasked."""

import importlib.resources
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = SETTINGS["tool"]["setuptools"]


FOLDERS = {package: folder for package, folder in SETUPTOOLS["package-dir"].items()}


def _package(folder: Path) -> str:
    """``replay.capture.local`` of ``capture/local``."""
    root = next(package for package, top in FOLDERS.items() if top == folder.relative_to(ROOT).parts[0])
    return ".".join([root, *folder.relative_to(ROOT).parts[1:]])


def test_every_folder_that_holds_python_is_listed() -> None:
    folders = {path.parent for top in FOLDERS.values() for path in (ROOT / top).rglob("*.py")}
    assert sorted(map(_package, folders)) == sorted(SETUPTOOLS["packages"])
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_no_python_lies_beside_the_folders_that_are_installed() -> None:
    """Beside them only tests and scripts, which are not installed."""
    tops = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[!.]*/**/*.py")} - {"build", "dist"}
    assert tops == {*FOLDERS.values(), "tests", "scripts"}


def test_every_data_file_pattern_finds_something() -> None:
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT / SETUPTOOLS["package-dir"][package]
        assert [pattern for pattern in patterns if not list(folder.glob(pattern))] == []


def test_data_files_are_found_in_the_installed_package() -> None:
    assert importlib.resources.files("replay").joinpath("py.typed").is_file()
    assert importlib.resources.files("replay.checkpoint").joinpath("config_classes.json").is_file()
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
