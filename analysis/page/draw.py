"""Charts become SVG in this process: vl-convert runs Vega-Lite, and nothing is fetched."""

import re
from typing import Any

from replay.errors import UsageError

_NAMESPACE = re.compile(r' xmlns(:\w+)?="[^"]*"')  # needless within HTML


def check_drawing() -> None:
    """Raises UsageError where charts cannot be drawn."""
    try:
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "a web page needs vl-convert-python, which is not installed: type pip install 'eagle-replay[page]'"
        ) from error


def draw(spec: dict[str, Any]) -> str:
    """The chart as an SVG element. Raises UsageError as ``check_drawing``."""
    check_drawing()
    import vl_convert

    drawn = _NAMESPACE.sub("", vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]))
    return drawn[drawn.index("<svg") :]
