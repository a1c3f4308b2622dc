"""The one reader of foreign JSON: what RFC 8259 does not have is refused in one sentence, and no file can hang it."""

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from replay.errors import CaptureError, CheckpointError, ReplayError, TraceCorruptError
from replay.traces.fields import MOST_DEPTH, Fields, parse_json, read_json, show, show_name, some

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\xef\xbb\xbf{}", "begins with a byte order mark; save it as UTF-8 without one"),
        ("\ufeff{}", "begins with a byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "it is UTF-16; save it as UTF-8"),
        ('{"a": 1}'.encode("utf-16-le"), "it holds a zero byte, first at byte 1"),
        (b'"\xff"', "is not UTF-8 (invalid start byte at byte 1)"),
        ('{"a": 1, "b": 2, "b": 3}', "the key 'b' stands twice"),
        ('{"a": {"\\u202e": 1, "\\u202e": 1}}', r"the key '\u202e' stands twice"),
        ("[NaN]", "NaN is no JSON number"),
        ("-Infinity", "-Infinity is no JSON number"),
        ("1e999", "the number 1e999 is too large"),
        ("-" + "1" * 400 + ".0", "is too large"),
        ("1" * 5000, "a number has 5000 digits"),
        ("-" + "1" * 309, "a number has 309 digits"),
        ('"\\ud800"', "half a surrogate pair"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), f"nests deeper than {MOST_DEPTH} levels"),
        ('{"a":' * 600 + "1" + "}" * 600, f"nests deeper than {MOST_DEPTH} levels"),
        ("[" * 100_000, f"nests deeper than {MOST_DEPTH} levels"),
        ('{"a":' * 100_000, f"nests deeper than {MOST_DEPTH} levels"),
        ("", "Expecting value"),
        ("{} {}", "Extra data"),
        ('"\x01"', "Invalid control character"),
    ],
)
def test_what_is_no_json_is_refused_in_one_sentence(text: str | bytes, said: str) -> None:
    with pytest.raises(TraceCorruptError) as caught:
        parse_json(text, "the file")
    message = str(caught.value)
    assert message.startswith("the file is not valid JSON: ") and said in message
    assert message.isprintable() and len(message) < 200


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[" * MOST_DEPTH + "]" * MOST_DEPTH, None),
        ('"\\ud83d\\ude00"', "😀"),
        ('{"ä": [1, -0.5, 1e300, true, null]}'.encode(), {"ä": [1, -0.5, 1e300, True, None]}),
        (str(10**300), 10**300),
    ],
)
def test_what_is_json_is_read(text: str | bytes, value: object) -> None:
    found = parse_json(text, "the file")
    assert value is None or found == value


def test_each_reader_raises_its_own_kind() -> None:
    def refusal(said: str) -> CaptureError:
        return CaptureError(f"{said}; ask another server")

    with pytest.raises(CaptureError, match=r"^the answer is not valid JSON: .*; ask another server$"):
        parse_json("{", "the answer", refusal)
    fields = Fields("the answer", {"a": {"b": "x"}}, refusal)
    with pytest.raises(CaptureError, match=r"^the answer: a: b is 'x', must be an integer from 0 to 9; ask another"):
        fields.object("a").integer("b", 0, 9)
    with pytest.raises(CaptureError, match=r"^the answer lacks the field c; ask"):
        fields.get("c")


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda fields: fields.text("n"), "n is 1, must be a string"),
        (lambda fields: fields.integer("flag", 0, 9), "flag is True, must be an integer from 0 to 9"),
        (lambda fields: fields.integer("n", 2, 9), "n is 1, must be an integer from 2 to 9"),
        (lambda fields: fields.number("flag", 0, 9), "flag is True, must be a number from 0 to 9"),
        (lambda fields: fields.number("n", 2, 9), "n is 1, must be a number from 2 to 9"),
        (lambda fields: fields.integers("list", 0, 9), "list is [1, '2'], must be a list of integers from 0 to 9"),
        (lambda fields: fields.objects("list"), "list[0] holds 1 where a JSON object must stand"),
        (lambda fields: fields.objects("n"), "n is 1, must be a list of objects"),
        (lambda fields: fields.only(("n", "flag", "list")), r"has the field 'od\nd', possible are n, flag, list"),
        (lambda fields: fields.text("od\nd"), r"'od\nd' is None, must be a string"),
    ],
)
def test_a_field_is_refused_with_its_value_and_what_is_possible(read: Callable[[Fields], object], said: str) -> None:
    fields = Fields("here", {"n": 1, "flag": True, "list": [1, "2"], "od\nd": None})
    with pytest.raises(TraceCorruptError) as caught:
        read(fields)
    assert str(caught.value).startswith("here") and str(caught.value).endswith(said)


def test_foreign_values_are_shown_short_and_harmless() -> None:
    assert show("x" * 1000) == "'" + "x" * 56 + "..."
    assert show("\x1b[31m\u202e") == r"'\x1b[31m\u202e'"
    assert show_name("fc.weight") == "fc.weight"
    assert show_name("a\nb") == r"'a\nb'" and len(show_name("x" * 1000)) == 60
    assert some(["a", "b\n", "c", "d"]) == r"a, 'b\n', c, d"
    assert some(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d and 2 more"


# ---- files ----


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.with_name("other").write_text("{}")
    path.symlink_to(path.with_name("other"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_pipe, "is not a plain file"),
        (lambda path: path.mkdir(), "is not a plain file"),
        (lambda path: path.write_text('"' + "x" * 100 + '"'), "holds 102 bytes, at most 100 are possible"),
        (lambda path: None, "cannot open"),
        (_link, "is a symbolic link"),
    ],
)
def test_a_file_is_read_only_where_it_is_plain_and_small(
    make: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    make(tmp_path / "file.json")
    with pytest.raises(CheckpointError, match=said):
        read_json(tmp_path / "file.json", 100, CheckpointError)


def test_links_are_followed_where_that_is_asked_for(tmp_path: Path) -> None:
    _link(tmp_path / "file.json")
    assert read_json(tmp_path / "file.json", 100, follow=True) == {}
    (tmp_path / "device.json").symlink_to("/dev/zero")
    with pytest.raises(TraceCorruptError, match=r"device\.json is not a plain file"):
        read_json(tmp_path / "device.json", 100, follow=True)


# Where JSON is not foreign, or is read as an engine reads it.
OTHERS = {
    "replay/targets/rules.py": "a table of the package",
    "replay/check/options.py": "a table of the package",
    "replay/checkpoint/config_classes.py": "a table of the package",
    "replay/check/override.py": "asks whether SGLang takes it; what is used of it is parsed here",
}


def test_nobody_else_parses_json() -> None:
    """A second reader would be lenient where this one is strict."""
    found = set()
    for top in ("replay", "traces", "capture", "analysis"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.load", "json.loads"):
                    found.add(str(path.relative_to(ROOT)))
    assert found == {"traces/fields.py", *OTHERS}
    assert issubclass(TraceCorruptError, ReplayError)
