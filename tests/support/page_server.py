"""A server that gives one text after another at /metrics, and the last of them from then on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.serving import serving


@contextmanager
def page_server(texts: Sequence[str]) -> Iterator[str]:
    """Its address, while the context lasts."""
    left = list(texts)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Silent."""

        def do_GET(self) -> None:
            data = (left.pop(0) if len(left) > 1 else left[0]).encode() if self.path == "/metrics" else b""
            self.send_response(200 if data else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with serving(Handler) as url:
        yield url
