"""What a server may answer: JSON that is none, and more than anybody asked for, end in a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest
from support.serving import serving

from replay.capture.client import api
from replay.errors import CaptureError


@contextmanager
def _answering(body: bytes, *, chunked: bool = False) -> Iterator[api.ServerApi]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(body)))))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body)

        def log_message(self, *arguments: object) -> None:
            pass

    with serving(Handler) as url:
        yield api.open_api(url.removeprefix("http://"), timeout=10.0, retries=0)


@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_is_read(chunked: bool) -> None:
    with _answering(b'{"a": [1, null]}', chunked=chunked) as server:
        assert server.get("/server_info") == {"a": [1, None]}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "Expecting value.*it says <html>"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": 1, "a": 2}', "the key 'a' stands twice"),
        (b"[" * 100_000, "nests deeper than 64 levels"),
        (b'{"a": "\xff"}', "is not UTF-8"),
    ],
)
def test_an_answer_that_is_no_json_is_refused_with_advice(body: bytes, said: str) -> None:
    with (
        _answering(body) as server,
        pytest.raises(CaptureError, match=f"^the answer of /x is not valid JSON: .*{said}.*--server takes that of an"),
    ):
        server.get("/x")


@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_that_is_too_large_is_not_held(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_MOST_PAGE", 10)
    with (
        _answering(b"[1, 2, 3, 4]", chunked=chunked) as server,
        pytest.raises(CaptureError, match="more than 10 bytes"),
    ):
        server.get("/x")
