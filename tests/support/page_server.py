"""A server that gives one text after another at /metrics, and the last of them from then on."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


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

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
