"""The files that were typed: which form they are of, and their texts one by one."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from replay.capture.dumps.sample import Dump, Sample
from replay.capture.dumps.saved import MODELOPT, SPECFORGE, read_saved
from replay.capture.dumps.stacked import read_stacked
from replay.capture.dumps.target_cache import DEEPSPEC, INDEX, MANIFEST, open_cache
from replay.errors import CaptureError

SPECULATORS, VLLM = "speculators", "vllm"
FORMATS = ("auto", SPECFORGE, SPECULATORS, VLLM, MODELOPT, DEEPSPEC)

_ENDINGS = {".ckpt": SPECFORGE, ".ckpt.gz": SPECFORGE, ".pt": MODELOPT, ".safetensors": VLLM}
_STACKED_NAME = re.compile(r"hs_\d+\.safetensors", re.ASCII)
_DIGITS = re.compile(r"(\d+)")


def open_dump(paths: Sequence[Path], form: str) -> Dump:
    """The texts of ``paths``: dump files, folders of them, or one target cache.

    ``form`` is one of FORMATS; ``auto`` tells it by the names of the files. Raises CaptureError where there is nothing,
    where two forms are mixed, or where the form is one that replay does not read.
    """
    for path in paths:
        if not path.exists():
            raise CaptureError(f"{path} is not there: name a dump's file or folder")
    cache = next((path for path in paths if (path / INDEX).is_file()), None)
    if cache is not None or form == DEEPSPEC:
        return _cache(paths, form)
    found = {name: file for path in paths for name, file in _files(path, paths)}
    if not found:
        raise CaptureError(f"{paths[0]} holds no dump that replay reads, {_endings()} are possible{_foreign(paths[0])}")
    form = _form(list(found.values())) if form == "auto" else form
    return Dump(form, _samples(found, form), len(found))


def _cache(paths: Sequence[Path], form: str) -> Dump:
    if len(paths) > 1 or form not in ("auto", DEEPSPEC) or not (paths[0] / INDEX).is_file():
        raise CaptureError(f"a target cache of {DEEPSPEC} is one folder with {MANIFEST} and {INDEX}: name it alone")
    return open_cache(paths[0])


def _files(path: Path, paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Dump files with the names of their texts, 2 before 10."""
    if not path.is_dir():
        if _ending(path) is None:
            raise CaptureError(f"{path} ends in none of {_endings()}: name a dump's file or folder")
        yield _name(path, path.parent if len(paths) == 1 else Path()), path
        return
    files = [file for file in path.rglob("*") if _ending(file) is not None and file.is_file()]
    for file in sorted(files, key=lambda file: [_number(part) for part in _DIGITS.split(str(file))]):
        yield _name(file, path if len(paths) == 1 else Path()), file


def _number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (-1, part)


def _ending(path: Path) -> str | None:
    """The longest ending that a dump has."""
    return next((one for one in sorted(_ENDINGS, key=len, reverse=True) if path.name.endswith(one)), None)


def _endings() -> str:
    return ", ".join(_ENDINGS)


def _name(file: Path, root: Path) -> str:
    ending = _ending(file) or ""
    return str(file.relative_to(root) if root != Path() else file).removesuffix(ending)


def _foreign(path: Path) -> str:
    """What is known of a folder of a form that is not read."""
    if (path / MANIFEST).is_file():
        return f" ({MANIFEST} without {INDEX} is as NeMo Automodel dumps, which replay does not read)"
    return ""


def _form(files: Sequence[Path]) -> str:
    forms = {_form_of(file): file for file in files}
    if len(forms) > 1:
        named = " and ".join(f"{file} of {form}" for form, file in list(forms.items())[:2])
        raise CaptureError(f"the files are of several forms ({named}): import each form by itself, or type --format")
    return next(iter(forms))


def _form_of(file: Path) -> str:
    return SPECULATORS if _STACKED_NAME.fullmatch(file.name) else _ENDINGS[_ending(file) or ""]


def _samples(found: dict[str, Path], form: str) -> Iterator[Sample]:
    for name, file in found.items():
        yield read_stacked(file, name, form) if form in (SPECULATORS, VLLM) else read_saved(file, name, form)
