"""Asking an SGLang server over HTTP: one call, its refusals told apart, and retries where trying again can help."""

import http.client
import json
import random
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from replay.capture.client.transport import Body, LargeError, Limits, SlowError, ask, ask_lines
from replay.errors import CaptureError, UsageError
from replay.printable import one_line
from replay.traces.fields import parse_json, show_name

_Result = TypeVar("_Result")

_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # statuses that another try may not meet
_REFUSED = (400, 413, 422)  # statuses that say something of what was asked, not of the server
_LONGEST_PAUSE = 30.0  # seconds
# Seconds from the first byte of an answer to its last, and those that a page of the server's own facts may take.
_ANSWER_SECONDS, _PAGE_SECONDS, _PAGE_WAIT = 60.0, 3.0, 30.0
_MOST, _MOST_PAGE = 1 << 26, 1 << 24  # bytes of these; an answer of a hundred thousand tokens has some 10 million
_MOST_STREAM = 1 << 30  # bytes of an answer that comes bit by bit
_PAGE_RETRIES = 2
START_RECORDING = "start the server (replay serve starts one that records)"
_READ, _SHOWN = 4096, 300  # bytes of an answer that are looked at for a message, and the characters it shows


class TransientError(Exception):
    """No answer, or one that another try may not meet; ``pause`` is how long the server asks to wait, if it does."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class NobodyThereError(TransientError):
    """Nothing listens there, or there is no such host: a server that answered before may come back, another not."""


class NoSuchPathError(CaptureError):
    """The server has nothing there."""


class RefusedError(CaptureError):
    """The server answers, and does not do what was asked (a prompt that is too long); ``reason`` in its words."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ServerApi:
    """A server's address, and how it is asked. ``api_key`` goes into the Authorization header and nowhere else."""

    url: str
    api_key: str | None = None
    timeout: float = 600.0  # seconds until the whole answer is there; a page of the server's facts has fewer
    retries: int = 5
    again: str = "type the same command with --resume"  # what is said to do when the last try has failed
    sleep: Callable[[float], None] = time.sleep
    option: str = "--server"  # in which the address was typed
    start: str = START_RECORDING  # what is said to do where nobody listens

    @property
    def _advice(self) -> str:
        return f"see to the server and its address, {self.option} takes that of {self._whose}"

    @property
    def _whose(self) -> str:
        return "an SGLang server" if self.option == "--server" else "a /metrics page"

    def get(self, *paths: str) -> Any:
        """The JSON at the first of ``paths`` that the server has. Raises CaptureError.

        A busy server is asked again; where nobody listens that is said at once.
        """
        for path in paths[:-1]:
            try:
                return self.patiently(partial(self._get, path), _PAGE_RETRIES)
            except NoSuchPathError:
                continue
        return self.patiently(partial(self._get, paths[-1]), _PAGE_RETRIES)

    def _get(self, path: str, _: int) -> Any:
        try:
            return self.call(path)
        except NobodyThereError as error:
            raise CaptureError(f"{self.url}{error}: {self.start}, or mend {self.option}") from error

    def patiently(self, attempt: Callable[[int], _Result], retries: int | None = None) -> _Result:
        """The result of ``attempt(number)``, tried again with growing pauses while it raises TransientError.

        That often at most: ``retries``, and never more than the server's. Raises CaptureError when the last try has
        failed as well.
        """
        most = self.retries if retries is None else min(retries, self.retries)
        for number in range(most + 1):
            try:
                return attempt(number)
            except TransientError as error:
                if number == most:
                    raise CaptureError(
                        f"{self.url} failed {number + 1} times, last: {error}; see to the server and {self.again}"
                    ) from error
                pause = min(_LONGEST_PAUSE, 0.5 * 2**number)
                self.sleep(max(error.pause, pause * random.uniform(0.75, 1.25)))
        raise AssertionError("retries is 0 or more")

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One try. Raises TransientError, or CaptureError where another try would end the same."""
        answer = self._call(path, body)
        kind = CaptureError if answer.framed else TransientError  # what has no end of its own may have lost it
        return parse_json(
            answer.data,
            f"the answer of {path}",
            lambda said: kind(f"{said}; it says {_show(answer.data)}; {self._advice}"),
        )

    def stream(self, path: str, body: Mapping[str, Any], clock: Callable[[], float]) -> list[tuple[float, bytes]]:
        """One try: the lines of an answer that comes bit by bit, each with when it came. Raises as ``call``."""
        limits = Limits(self.timeout, self.timeout, _MOST_STREAM)
        with self._failing(path, True, limits):
            return ask_lines(self._request(path, body), limits, clock)

    def page(self, path: str) -> str:
        """One try: the text of a page. Raises as ``call``."""
        return self._call(path, None).data.decode(errors="replace")

    def _call(self, path: str, body: Mapping[str, Any] | None) -> Body:
        limits = Limits(self.timeout, _ANSWER_SECONDS, _MOST)
        if body is None:
            limits = Limits(min(self.timeout, _PAGE_WAIT), _PAGE_SECONDS, _MOST_PAGE)
        with self._failing(path, body is not None, limits):
            return ask(self._request(path, body), limits)

    def _request(self, path: str, body: Mapping[str, Any] | None) -> urllib.request.Request:
        request = urllib.request.Request(self.url + path)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        if self.api_key:
            # not passed on where the server redirects to: that may be another's
            request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
        return request

    @contextmanager
    def _failing(self, path: str, posts: bool, limits: Limits) -> Iterator[None]:
        """Whatever fails in an exchange, as TransientError or CaptureError."""
        try:
            yield
        except SlowError as error:
            said = f"{path} {error}"
            raise TransientError(said) if posts else CaptureError(f"{self.url}{said}; {self._advice}") from error
        except LargeError as error:
            raise CaptureError(
                f"{self.url}{path} answers with more than {limits.size} bytes; {self._advice}"
            ) from error
        except urllib.error.HTTPError as error:
            raise self._refusal(path, error) from error
        except http.client.InvalidURL as error:
            raise CaptureError(f"{self.url}{path} is no address ({error}): see to {self.option}") from error
        except (OSError, http.client.IncompleteRead) as error:  # no connection, cut off
            nobody = isinstance(getattr(error, "reason", error), ConnectionRefusedError | socket.gaierror)
            kind = NobodyThereError if nobody else TransientError
            raise kind(f"{path} gave no answer ({_reason(error)})") from error
        except (ValueError, http.client.HTTPException) as error:
            raise CaptureError(
                f"{self.url}{path} gives no answer of HTTP ({_reason(error)}); {self._advice}"
            ) from error

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> Exception:
        said = _show(error.msg.encode())
        if 300 <= error.code < 400:
            place = error.headers.get("Location")
            where = f" and sends to {show_name(place)}" if place else ""
            return CaptureError(f"{self.url}{path} answered {error.code}{where}; {self._advice}")
        if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return CaptureError(f"{self.url}{path} refuses ({error.code}): give the server's key with --api-key")
        if error.code == HTTPStatus.NOT_FOUND:
            return NoSuchPathError(f"{self.url} has no {path}: {self.option} takes the address of {self._whose}")
        if error.code in _AGAIN:
            return TransientError(f"{path} answered {error.code} {said}", _pause(error.headers.get("Retry-After")))
        message = f"{self.url}{path} answered {error.code}: {said}"
        return (
            RefusedError(message, one_line(_said(error.msg), _SHOWN))
            if error.code in _REFUSED
            else CaptureError(message)
        )


def open_api(
    url: str,
    api_key: str | None = None,
    *,
    timeout: float = 600.0,
    retries: int = 5,
    again: str = "type the same command with --resume",
    option: str = "--server",
    start: str = START_RECORDING,
) -> ServerApi:
    """For an address as typed in ``option``: ``http://host:port``, a bare ``host:port`` too. Raises UsageError."""
    address = url.strip().rstrip("/")
    if "://" not in address:
        address = f"http://{address}"
    scheme, _, rest = address.partition("://")
    if scheme not in ("http", "https") or not rest or any(character.isspace() for character in rest):
        raise UsageError(f"{option} {url!r} is no address: type for example http://127.0.0.1:30000")
    _check_host(address, f"{option} {url!r}")
    return ServerApi(address, _clean_key(api_key), timeout, retries, again, option=option, start=start)


def _check_host(address: str, typed: str) -> None:
    try:
        parts = urllib.parse.urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{typed} is no address ({error}): type for example http://127.0.0.1:30000") from None
    if not host or port == 0:
        raise UsageError(f"{typed} names no host or no port: type for example http://127.0.0.1:30000")


def _clean_key(api_key: str | None) -> str | None:
    """The key as it goes into a header, never shown. Raises UsageError where a header cannot hold it."""
    key = (api_key or "").strip()
    if any(not (" " <= character <= "~" or "\xa0" <= character <= "\xff") for character in key):
        raise UsageError("--api-key holds a character that no HTTP header can hold: type the key alone, in one line")
    return key or None


def _reason(error: Exception) -> str:
    return one_line(str(getattr(error, "reason", "") or error) or type(error).__name__, _SHOWN)


def _pause(value: str | None) -> float:
    """Seconds of a Retry-After header; its form as a date is left alone."""
    return min(_LONGEST_PAUSE, float(value)) if value is not None and value.isdecimal() else 0.0


def _said(text: str) -> str:
    """The sentence in an error's JSON, as SGLang words it; else all of it."""
    try:
        document: Any = parse_json(text, "the error", ValueError)
        error = document["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text


def _show(data: bytes) -> str:
    return one_line(" ".join(data[:_READ].decode("utf-8", "replace").split()), _SHOWN)
