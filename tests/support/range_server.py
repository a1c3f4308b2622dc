"""A web server of one folder that gives ranges of files and no lists; or whole files only, or no versions."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from support.serving import serving


@contextmanager
def range_server(
    folder: Path, *, ranges: bool = True, version: str = "ETag", on_get: Callable[[str], None] = lambda _: None
) -> Iterator[str]:
    """Its address, while the context lasts. ``on_get`` hears the path of each file before its bytes are sent.
    ``version`` is the header that changes with a file; with "" there is none."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Silent."""

        def do_HEAD(self) -> None:
            self._answer(send=False)

        def do_GET(self) -> None:
            on_get(self.path)
            self._answer(send=True)

        def _answer(self, *, send: bool) -> None:
            path = folder / self.path.strip("/")
            if not path.is_file():
                self.send_error(404)
                return
            data = path.read_bytes()
            told = self.headers.get("Range") if ranges else None
            if told:
                first, _, last = told.removeprefix("bytes=").partition("-")
                data = data[int(first) : int(last) + 1]
            self.send_response(206 if told else 200)
            self.send_header("Content-Length", str(len(data)))
            if version:
                self.send_header(version, f'"{os.stat(path).st_mtime_ns:x}"')
            self.end_headers()
            if send:
                self.wfile.write(data)

    with serving(Handler) as url:
        yield url
