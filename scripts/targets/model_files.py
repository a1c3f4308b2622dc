"""The model files of one SGLang, from a wheel or from where it is installed. Read as text, never imported."""

import ast
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from class_source import Class, Module, Unreadable

PACKAGE = "sglang/srt/models/"
RUNNERS = "sglang/srt/model_executor/"
_METADATA = re.compile(r"sglang-[^/]*\.dist-info/METADATA")


class Package:
    """All model files of one SGLang, from a wheel or from a folder that holds ``sglang``; ``runners`` is what calls
    them."""

    def __init__(self, path: Path) -> None:
        sources = dict(_read_wheel(path) if path.is_file() else _read_folder(path))
        self.version = sources.pop("version", "")
        self.runners = {name: text for name, text in sources.items() if name.startswith(RUNNERS)}
        self._sources = {name: text for name, text in sources.items() if name.startswith(PACKAGE)}
        self._modules: dict[str, Module | None] = {}
        if not self._sources:
            raise SystemExit(f"{path} holds no {PACKAGE}; give a wheel of SGLang or the folder it is installed in")

    def module(self, name: str) -> Module | None:
        """``sglang.srt.models.llama``; None of one outside the package."""
        if name not in self._modules:
            stem = name.replace(".", "/")
            file = next((one for one in (f"{stem}.py", f"{stem}/__init__.py") if one in self._sources), None)
            self._modules[name] = None if file is None else self._read(name, file)
        return self._modules[name]

    def _read(self, name: str, file: str) -> Module:
        return Module(name, file.removeprefix(PACKAGE), ast.parse(self._sources[file]), self)

    def entries(self) -> Iterator[Class]:
        """Every class that the registry knows (models/registry.py: the package's own modules, not its folders')."""
        for file in sorted(self._sources):
            stem = file.removeprefix(PACKAGE).removesuffix(".py")
            if "/" in stem or stem == "__init__":
                continue
            module = self.module("sglang.srt.models." + stem)
            for name in module.entries if module else ():
                found = module.class_named(name) if module else None
                if found is None:
                    raise Unreadable(f"{file} enters {name}, whose class is nowhere")
                yield found


def _read_wheel(path: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if _METADATA.fullmatch(name):
                yield "version", _version(wheel.read(name).decode("utf-8"))
            elif name.startswith((PACKAGE, RUNNERS)) and name.endswith(".py"):
                yield name, wheel.read(name).decode("utf-8-sig")


def _read_folder(path: Path) -> Iterator[tuple[str, str]]:
    for file in path.glob("sglang-*.dist-info/METADATA"):
        yield "version", _version(file.read_text("utf-8"))
    for folder in (PACKAGE, RUNNERS):
        for file in sorted((path / folder).rglob("*.py")):
            yield file.relative_to(path).as_posix(), file.read_text("utf-8-sig")


def _version(metadata: str) -> str:
    return next(line.removeprefix("Version: ") for line in metadata.splitlines() if line.startswith("Version: "))
