"""The documents say what the program does: every command, option and public name; every example runs, every link leads.

A ```python block in README.md or docs/ runs as written, in order, one namespace a file, in an empty folder. It may use

    TRACE    a finished trace of a 30-layer target with taps embed, 3, 16 and final
    DRAFT    the folder of a head wired embed,3,16 that fits it
    TARGET   SmolLM2-135M-Instruct, and PROMPTS, a prompt file of one row: for capture
    ENGINE   a stand-in for an sgl.Engine that records, for a target of 16 tokens

A docstring example (>>>) may use these as well, and what they open to: trace, head, config, tensors, rounds.
"""

import dataclasses
import doctest
import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from support.fake_engine import FakeEngine, fake_engine
from support.fake_server import FakeServer, make_target
from support.heads import random_tensors, tiny_config, write_head
from support.trace_maker import H, V, changed, make_header, make_request, write_trace

import replay
from replay.checkpoint.config import parse_config
from replay.cli.app import cli
from replay.traces.header import TapInfo

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
README_LINES = 200
PROSE = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
COMMANDS = sorted(cli.commands)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
WIRED_EMBED_3_16 = tiny_config(
    hidden_size=H, vocab_size=V, eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 2, 15]}
)


def _blocks(document: Path, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(document.read_text(encoding="utf-8")) if language in languages]


def _tests_of(name: str, names: dict[str, Any] | None = None) -> list[doctest.DocTest]:
    thing = getattr(replay, name)
    return doctest.DocTestFinder().find(thing, name, inspect.getmodule(thing), globs=names or {})


# ---- what examples run on ----


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    folder = tmp_path_factory.mktemp("engine")
    with fake_engine(FakeServer(make_target(folder / "target"), folder / "recording")) as running:
        yield running


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory, target_dir: Path, engine: FakeEngine) -> dict[str, Any]:
    """The variables that examples may use."""
    folder = tmp_path_factory.mktemp("docs")
    tensors = random_tensors(parse_config(WIRED_EMBED_3_16))
    draft = write_head(folder / "draft", WIRED_EMBED_3_16, tensors)
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "greeting", "prompt": "Say hello."}) + "\n")
    trace = replay.Trace.open(_write_trace(folder / "trace"))
    head = replay.load_head(draft)
    return {
        "TRACE": str(trace.path),
        "DRAFT": str(draft),
        "TARGET": str(target_dir),
        "PROMPTS": str(prompts),
        "ENGINE": engine,
        "replay": replay,
        "trace": trace,
        "head": head,
        "config": WIRED_EMBED_3_16,
        "tensors": tensors,
        "rounds": replay.simulate(trace, {"head": head}, [replay.Variant("head", steps=3)]),
    }


def _write_trace(path: Path) -> Path:
    header = make_header()
    taps = {name: TapInfo("bfloat16", H) for name in ("3", "16", "final")}
    header = dataclasses.replace(header, taps=taps, target=dataclasses.replace(header.target, layers=30))
    requests = []
    for seed in range(4):
        request = make_request(f"r{seed}", seed, output=12)
        final = request.taps["final"]
        generator = torch.Generator().manual_seed(100 + seed)
        rows = {name: torch.randn(final.shape, generator=generator).to(final.dtype) for name in ("3", "16")}
        requests.append(changed(request, taps={**rows, "final": final}))
    return write_trace(path, [requests], header=header)


# ---- commands ----


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme_and_has_help(name: str) -> None:
    assert re.search(rf"\breplay {name}\b", DOCUMENTS[0].read_text(encoding="utf-8"))
    command = cli.commands[name]
    assert command.help
    silent = [option.name for option in command.params if isinstance(option, click.Option) and not option.help]
    assert silent == []


def _command_lines() -> Iterator[str]:
    """Every line of a shell block that runs replay, continued lines joined."""
    for document in DOCUMENTS:
        for code in _blocks(document, "sh", "bash", "console"):
            for line in code.replace("\\\n", " ").splitlines():
                if match := re.match(r"(?:\$ )?(replay .*)", line.strip()):
                    yield match[1]


@pytest.mark.parametrize("line", list(_command_lines()))
def test_every_command_line_is_one_that_the_program_takes(line: str) -> None:
    """Only the parser runs: the command has to exist and take these options and arguments."""
    words = shlex.split(re.split(r"\s[>|]\s|\s2>", line)[0], comments=True)[1:]
    if words[0].startswith("-"):
        cli.make_context("replay", words, resilient_parsing=True)
        return
    assert words[0] in cli.commands
    cli.commands[words[0]].make_context(words[0], words[1:])


# ---- pages ----


def test_the_readme_is_short() -> None:
    assert len(DOCUMENTS[0].read_text(encoding="utf-8").splitlines()) <= README_LINES


def _links() -> Iterator[tuple[Path, str]]:
    """Every relative link, with the document that holds it."""
    for document in LINKING:
        for link in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
            if not re.match(r"\w+:", link):
                yield document, link


def _anchors(document: Path) -> set[str]:
    """What GitHub makes of the headings: lower case, no punctuation, hyphens for spaces, -1 at the second of a name."""
    found: list[str] = []
    for heading in HEADING.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        found.append(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-"))
    return {f"{name}-{n}" if (n := found[:place].count(name)) else name for place, name in enumerate(found)}


@pytest.mark.parametrize(
    ("document", "link"), [pytest.param(*pair, id=f"{pair[0].name}:{pair[1]}") for pair in dict.fromkeys(_links())]
)
def test_every_link_leads_to_a_file_and_a_heading(document: Path, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = document.parent / path if path else document
    assert target.exists()
    assert not anchor or anchor in _anchors(target)


def test_every_test_that_the_guide_names_is_there() -> None:
    """CONTRIBUTING.md says which test fails for what one forgets."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    written = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name in named if f"def {name}(" not in written} == set()


# ---- Python ----


@pytest.mark.parametrize("name", replay.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(replay, name))
    assert re.search(rf"replay\.{name}\b|`{name}\b", PROSE)


def test_no_module_hides_a_public_name() -> None:
    """Importing ``replay.x`` binds ``x`` in the package, over the function of that name."""
    assert [name for name in replay.__all__ if importlib.util.find_spec(f"replay.{name}")] == []


@pytest.mark.parametrize("name", replay.__all__)
def test_every_public_name_is_in_an_example_that_runs(name: str) -> None:
    examples = [code for document in DOCUMENTS for code in _blocks(document, "python")]
    examples += [example.source for public in replay.__all__ for test in _tests_of(public) for example in test.examples]
    assert any(re.search(rf"\b{name}\b", example) for example in examples)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_python_blocks_run(
    document: Path, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {name: names[name] for name in ("TRACE", "DRAFT", "TARGET", "PROMPTS", "ENGINE")}
    for number, code in enumerate(_blocks(document, "python"), start=1):
        if code.lstrip().startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(code, given, f"{document.name} block {number}", None, None)
            _run(test)
            given = test.globs
        else:
            exec(compile(code, f"{document.name} block {number}", "exec"), given)


@pytest.mark.parametrize("name", replay.__all__)
def test_docstring_examples_run(
    name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for test in _tests_of(name, names):
        _run(test)


def _run(test: doctest.DocTest) -> None:
    skipped = [example.source for example in test.examples if doctest.SKIP in example.options]
    assert skipped == [], "an example that does not run is not an example"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=said.append, clear_globs=False)
    assert runner.failures == 0, "".join(said)


# ---- the rooms ----

ROOMS = ("replay", "traces", "capture", "analysis", "tests", "scripts")


def _every_document() -> list[Path]:
    """Every page of the repository; what is built or installed beside it is none."""
    rooms = [path for folder in (*ROOMS, "docs") for path in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *rooms])


def _paths(document: Path) -> list[str]:
    """Paths stand in backticks; those of a room begin with its folder."""
    return re.findall(rf"`((?:{'|'.join(ROOMS)}|docs)/[\w./-]*)`", document.read_text(encoding="utf-8"))


WITH_PATHS = [document for document in _every_document() if _paths(document)]


def test_the_pages_of_rooms_name_paths() -> None:
    assert {ROOT / "docs" / "structure.md", ROOT / "CONTRIBUTING.md", ROOT / "tests/rig/README.md"} <= set(WITH_PATHS)


@pytest.mark.parametrize("document", WITH_PATHS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_path_in_the_text_exists(document: Path) -> None:
    assert [path for path in _paths(document) if not (ROOT / path).exists()] == []


def test_the_page_of_rooms_has_every_room() -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    rooms = {
        path.parent.relative_to(ROOT).as_posix() + "/"
        for top in ("replay", "traces", "capture", "analysis")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert {room for room in rooms if f"| `{room}` |" not in text} == {"replay/"}
