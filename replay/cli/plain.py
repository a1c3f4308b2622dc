"""Text for a terminal or a pipe that takes ASCII only: our own signs in ASCII, everything else in escapes."""

import os
import sys

# Bars keep their order: 1 to 7 eighths of the largest, then # for the largest itself.
_SIGNS = str.maketrans({
    "▁": "1", "▂": "2", "▃": "3", "▄": "4", "▅": "5", "▆": "6", "▇": "7", "█": "#", "░": ".", "·": ".",
    "─": "-", "━": "-", "│": "|", "•": "*", "≈": "~", "±": "+/-", "…": "...", "≤": "<=", "≥": ">=", "→": "->",
})  # fmt: skip


def ascii_only(stream: object = None) -> bool:
    """Whether ``stream`` (None: stdout) takes ASCII only: its encoding is none of Unicode's, or the locale is C.

    Python writes UTF-8 in the locale C all the same; PYTHONUTF8 or PYTHONIOENCODING say that this is meant.
    """
    encoding = str(getattr(sys.stdout if stream is None else stream, "encoding", None) or "utf-8")
    if not encoding.lower().startswith("utf"):
        return True
    if os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8"):
        return False
    chosen = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    return chosen in ("C", "POSIX")


def plain(text: str) -> str:
    """``text`` in ASCII.

    >>> plain("≈ 2.0 █▄· 中")
    '~ 2.0 #4. \\\\u4e2d'
    """
    return text.translate(_SIGNS).encode("ascii", "backslashreplace").decode()
