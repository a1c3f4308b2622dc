"""A stand-in for an SGLang server whose rounds take a known time, which passes only as it is told.

Its clock is a number. The server moves it before it sends what a round brought, and waits until the client has read the
clock for that; so the client sees each round at exactly the time that the cost model of this file says. Requests of one
question are prefilled one after another while those before them decode, as under chunked prefill.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.serving import serving

PASS, ROW, CONTEXT, REST, DRAFT = 20.0, 0.5, 0.002, 3.0, 2.0  # milliseconds
PREFILL = 70.0
ACCEPTED = (0, 2, 1, 3)  # of each round in turn, at most the steps
_WAIT = 10.0  # seconds until a test gives up


def cost_ms(batch: int, steps: int, context: int) -> float:
    """Milliseconds of a round of this server."""
    drafting = REST + steps * DRAFT if steps else 0.0
    return PASS + ROW * batch * (steps + 1) + CONTEXT * batch * context + drafting


@dataclass
class TimedServer:
    """What it is, what it does wrong, and what it was asked."""

    steps: int = 0
    model: str = "tiny"
    state: dict[str, Any] = field(default_factory=dict)  # over what it says of itself
    running: int = 0  # requests of others
    joining: list[int] = field(default_factory=list)  # the same, each time that it is asked
    loads_page: bool = True
    joined: int = 1  # rounds that one chunk brings
    refuse: str = ""  # an error for every question
    cut: bool = False  # a stream that ends in its middle
    recording: dict[str, Any] | None = None
    paced: bool = False  # by the real clock
    url: str = ""
    now: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    seen: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def clock(self) -> float:
        """The time, for the client; what was sent has arrived."""
        at = self.now
        self.seen.release()
        return at

    def info(self) -> dict[str, Any]:
        """Its /server_info."""
        state: dict[str, Any] = {"dp_size": 1, "effective_max_running_requests_per_dp": 8, "context_length": 4096}
        if self.steps:
            state |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "head"}
            state |= {"speculative_num_steps": self.steps, "speculative_eagle_topk": 1}
            state |= {"speculative_num_draft_tokens": self.steps + 1}
        if self.recording is not None:
            state["replay"] = self.recording
        return {"version": "0.5.23", "internal_states": [state | self.state]}

    def chunks(self, prompts: Sequence[Sequence[int]], most: int) -> Iterator[tuple[float, list[dict[str, Any]]]]:
        """Milliseconds that pass, and what is sent then."""
        made = [0] * len(prompts)
        rounds = [0] * len(prompts)
        begun = 0
        while any(count < most for count in made):
            if begun < len(prompts):
                yield PREFILL, [self.chunk(begun, 1, most, 0)]
                made[begun], begun = 1, begun + 1
            live = [place for place in range(begun) if made[place] < most]
            sent = []
            for place in live:
                accepted = min(ACCEPTED[rounds[place] % len(ACCEPTED)], self.steps)
                made[place], rounds[place] = min(most, made[place] + accepted + 1), rounds[place] + 1
                if rounds[place] % self.joined == 0 or made[place] == most:
                    sent.append(self.chunk(place, made[place], most, rounds[place]))
            if live:
                yield cost_ms(len(live), self.steps, len(prompts[0])), sent

    def chunk(self, place: int, tokens: int, most: int, rounds: int) -> dict[str, Any]:
        """As SGLang 0.5.23 sends it: how often it verified comes with the last."""
        last = tokens == most
        meta: dict[str, Any] = {"finish_reason": {"type": "length", "length": most} if last else None}
        meta["completion_tokens"] = tokens
        if last and self.steps:
            meta["spec_verify_ct"] = rounds
        return {"text": "", "output_ids": [7] * tokens, "meta_info": meta, "index": place}


@contextmanager
def timed_server(server: TimedServer) -> Iterator[TimedServer]:
    """Let it answer on a free port while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # an answer ends with its connection

        def log_message(self, *args: Any) -> None:
            """Silent."""

        def send(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            asked = self.path == "/v1/loads" and server.joining
            loads = {
                "loads": [
                    {"num_running_reqs": server.joining.pop(0) if asked else server.running, "num_waiting_reqs": 0}
                ]
            }
            pages: dict[str, Any] = {
                "/model_info": {"model_path": server.model, "tokenizer_path": server.model},
                "/server_info": server.info(),
            }
            if server.loads_page:
                pages["/v1/loads"] = loads
            self.send(200 if self.path in pages else 404, pages.get(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(body)
            if server.refuse:
                self.send(400, {"error": {"message": server.refuse}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                self.stream(body)
            except ConnectionError:
                self.close_connection = True

        def stream(self, body: dict[str, Any]) -> None:
            most = body["sampling_params"]["max_new_tokens"]
            server.seen = threading.Semaphore(0)  # the end of the stream before was seen too
            for number, (ms, sent) in enumerate(server.chunks(body["input_ids"], most)):
                server.now += ms / 1000
                if server.paced:
                    time.sleep(0.001)
                data = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in sent)
                if server.cut and number == 5:
                    return
                if data:
                    self.wfile.write(data)
                    self.wfile.flush()
                    assert server.paced or server.seen.acquire(timeout=_WAIT), "nobody read the clock"
            self.wfile.write(b"data: [DONE]\n\n")

    with serving(Handler) as server.url:
        yield server
