"""Charts become SVG in this process: vl-convert runs Vega-Lite, and nothing is fetched."""

import re
import zlib
from typing import Any

from replay.errors import UsageError

_NAMESPACE = re.compile(r' xmlns(:\w+)?="[^"]*"')  # needless within HTML
# What a mark stands for, which Vega writes where only a screen reader looks: ``>`` is written as ``&gt;`` in it.
_LABELLED = re.compile(r'<(line|path|rect|text) aria-label="([^"]*)" role="graphics-symbol"([^<>]*?)/>')
_FONT = re.compile(r""" font-family="[^"]*\"""")  # that of the page
_OWN_NAME = re.compile(r'(?<=id="|rl\(#)(?=(?:gradient|clip)_?\d)')  # of a part of a chart, the same in every chart
_NUMBER = re.compile(r"(\d\.\d{2})\d+")  # a hundredth of a pixel is enough


def check_drawing() -> None:
    """Raises UsageError where charts cannot be drawn."""
    try:
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "a web page needs vl-convert-python, which is not installed: type pip install 'eagle-replay[page]'"
        ) from error


def draw(spec: dict[str, Any]) -> str:
    """The chart as an SVG element, with a tooltip for each mark that says what it is. Raises UsageError as
    ``check_drawing``.
    """
    check_drawing()
    import vl_convert

    drawn = _NAMESPACE.sub("", vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]))
    drawn = _FONT.sub("", drawn[drawn.index("<svg") :])
    own = f"c{zlib.crc32(drawn.encode()):08x}-"
    return _LABELLED.sub(_tooltip, _OWN_NAME.sub(own, drawn))


def _tooltip(found: re.Match[str]) -> str:
    name, said, rest = found.groups()
    placed = _NUMBER.sub(r"\1", rest)
    return f'<{name} role="graphics-symbol"{placed}><title>{said}</title></{name}>'
