"""A stand-in for a recording SGLang server: the HTTP it speaks and the spool it writes, for a target of 16 tokens.

Its model is plain: after token t comes (7 t + 3) mod 16; the embedding is the identity, final is the next token's row,
times a number that tells what came before. So every row, logit and round can be written down here by hand.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.serving import serving

from replay.capture.asked import Asked, asked_of
from replay.capture.manifest import Manifest, write_manifest
from replay.capture.plugin.recorder import summarise_rows
from replay.capture.spool import Entry, launch_folder, write_row_file
from replay.traces.fp8 import quantise

VOCABULARY = 16
LAUNCH = "00112233445566aa"
PATTERN = (0, 2, 1)  # accepted of each round in turn, of STEPS drafted
STEPS = 2
TOPK = 4
TAPS = ("embed", "2", "final")


def next_token(token: int) -> int:
    """What the target chooses after ``token``."""
    return (7 * token + 3) % VOCABULARY


def make_target(folder: Path) -> Path:
    """Its checkpoint: config and tied identity embedding."""
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": VOCABULARY, "vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": torch.eye(VOCABULARY)}, folder / "model.safetensors")
    return folder


@dataclass
class FakeServer:
    """What it is to do wrong, and what it was asked. ``folder`` None: a server that does not record."""

    target: Path
    folder: Path | None
    api_key: str | None = None
    world: int = 1
    unavailable: int = 0  # the next so many generations answer 503
    aborted: int = 0  # the next so many end by abort, when they are under way
    refused: tuple[int, ...] = ()  # prompts that begin with one of these are answered 400
    cut: int = 0  # the next so many answers end in their middle
    router: bool = False  # it is none, but sends what it is asked to others
    redirect: str = ""  # a server that every page is moved to
    rowless: int = 0  # the next so many leave no rows
    caches: bool = False  # it keeps prefixes: rows by their token and the next one, under the extra_key
    evicts: tuple[int, ...] = ()  # generations (by number) before which it forgets all,
    drift: float = 0.0  # and whose own rows of R[2] it computes so much otherwise
    cache: dict[str, list[list[int]]] = field(default_factory=dict)
    choosing: bool = False  # it writes what the requests ask for, as a server of an older replay does not
    left_out_too: int = 0  # so many rows of prompts that were asked for it then leaves out
    tap_bytes: int = 0  # that it has written
    reported_state: str = "recording"
    reported_reason: str = "SGLang 0.4.0 was seen, recording works with 0.5.23"
    old_paths: bool = False  # of servers before these pages were renamed
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    numbers: int = 0
    passes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    forwards: threading.Lock = field(default_factory=threading.Lock)

    def manifest(self, **changes: Any) -> None:
        """(Re)write the one manifest of its one process."""
        assert self.folder is not None
        target = {
            "name": "tiny", "path": str(self.target), "architecture": "TinyForCausalLM", "model_type": "llama",
            "layers": 4, "hidden_size": VOCABULARY, "vocab_size": VOCABULARY, "dtype": "float32",
            "tie_word_embeddings": True, "max_position_embeddings": 128, "fingerprint": "f" * 64,
        }  # fmt: skip
        values: dict[str, Any] = {
            "launch": LAUNCH, "pid": 7, "host": "here", "state": "recording", "writer": True,
            "ranks": {"tp": 0}, "world": 1, "sglang": "0.5.23", "wiring": ["embed", "2"],
            "server_wiring": ["embed", "2"], "taps": list(TAPS), "dtype": "float32", "topk": TOPK, "target": target,
            "details": {"speculative_num_steps": str(STEPS)},
        }  # fmt: skip
        folder = launch_folder(self.folder, LAUNCH)
        folder.mkdir(parents=True, exist_ok=True)
        write_manifest(folder, Manifest(**(values | changes)))

    def state(self) -> dict[str, Any]:
        """What its scheduler says of itself."""
        state: dict[str, Any] = {"world_size": self.world, "context_length": 64}
        if self.folder is not None:
            state["replay"] = {
                "folder": str(self.folder), "launch": LAUNCH, "host": "here", "state": self.reported_state,
                "reason": self.reported_reason,
            }  # fmt: skip
        return state

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one generation."""
        if not self.caches:
            return self._answer(body)
        with self.forwards:  # a server's process hands rows over in the order of its forwards: the cached ones first
            return self._answer(body)

    def _answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.asked.append(body)
            if self.unavailable:
                self.unavailable -= 1
                return 503, {"error": "busy"}
            if body["input_ids"][0] in self.refused:
                return 400, {"error": {"message": "The input is longer than what the server takes."}}
            aborted = self.aborted > 0
            self.aborted -= aborted
            evicted = len(self.asked) in self.evicts
            if evicted:
                self.cache.clear()
            cached = self._cached(body) if self.caches else 0
            rows = not self.rowless
            self.rowless = max(0, self.rowless - 1)
        length = body["sampling_params"]["max_new_tokens"]
        tokens = [*body["input_ids"], next_token(body["input_ids"][-1])]
        prompt, histogram, anchor, rounds = len(body["input_ids"]), [0] * (STEPS + 1), len(body["input_ids"]), []
        while len(tokens) - prompt < length:
            accepted = PATTERN[len(rounds) % len(PATTERN)]
            rounds.append((anchor, accepted))
            histogram[accepted] += 1
            for _ in range(accepted + 1):
                tokens.append(next_token(tokens[-1]))
            anchor += accepted + 1
        if aborted:  # the forwards up to its second round were recorded
            rounds, length = rounds[:2], 3
        self._cache(body, tokens[:prompt])  # when it is computed, the answer when it has ended
        if self.folder is not None and rows:
            self._record(body["rid"], tokens, prompt, rounds, cached, self.drift if evicted else 0.0)
        if aborted:
            reason = {"type": "abort", "message": "Abort in decode"}
            return 200, {"output_ids": tokens[prompt : prompt + 3], "text": "", "meta_info": {"finish_reason": reason}}
        self._cache(body, tokens[: prompt + length])
        return 200, {
            "output_ids": tokens[prompt : prompt + length],
            "text": "",
            "meta_info": {
                "id": body["rid"],
                "finish_reason": {"type": "length", "length": length},
                "completion_tokens": length,
                "cached_tokens": cached,
                "spec_verify_ct": len(rounds),
                "spec_correct_drafts_histogram": histogram,
                "output_token_logprobs": [[-0.5, token, None] for token in tokens[prompt : prompt + length]],
            },
        }

    def _cache(self, body: dict[str, Any], tokens: list[int]) -> None:
        if self.caches:
            with self.lock:
                self.cache.setdefault(body["extra_key"], []).append(tokens)

    def _cached(self, body: dict[str, Any]) -> int:
        """How many rows of a prompt it has: as far as the token and the next one were there; the last is computed."""
        prompt = body["input_ids"]
        found = 0
        for tokens in self.cache.get(body["extra_key"], ()):
            equal = [one == other for one, other in zip(tokens, prompt, strict=False)]
            found = max(found, (equal.index(False) if False in equal else len(equal)) - 1)
        return found

    def _record(
        self, rid: str, tokens: list[int], prompt: int, rounds: list[tuple[int, int]], cached: int, drift: float
    ) -> None:
        """The prompt in two chunks, then every round, each forward a file; a foreign request's rows between them."""
        half = cached + (prompt - cached) // 2
        chunks = [(cached, half), (half, prompt)] if half > cached else [(cached, prompt)]
        sizes = [(start, stop - start) for start, stop in chunks]
        entries = [Entry(rid, "prefill", start, rows, 1, forward_rows=rows + 3) for start, rows in sizes]
        for anchor, accepted in rounds:
            right = tokens[anchor + 1 : anchor + 1 + accepted]
            wrong = [(tokens[anchor + 1 + accepted] + 1) % VOCABULARY] * (STEPS - accepted)
            entries.append(
                Entry(
                    rid,
                    "verify",
                    anchor,
                    accepted + 1,
                    accepted + 1,
                    drafted=[*right, *wrong],
                    accepted=accepted,
                    chosen=tokens[anchor + 1 : anchor + 2 + accepted],
                    batch=2,
                    batch_row=1,
                    verify_pass=self._next_pass(),
                )
            )
        self._write(entries[0], tokens, drift)
        if not cached:
            self._write_feed(rid, entries[0].rows, tokens)
        for entry in entries[1:]:
            self._write(entry, tokens, drift)

    def _next_pass(self) -> int:
        """Its verifies, counted; each time a foreign request stands in row 0 and ours in row 1."""
        with self.lock:
            self.passes += 1
            return self.passes - 1

    def _write(self, entry: Entry, tokens: list[int], drift: float) -> None:
        ids = tokens[entry.start : entry.start + entry.rows]
        before = torch.tensor(tokens).cumsum(0)[entry.start : entry.start + entry.rows]
        final = (10 + before[:, None] / 64) * torch.eye(VOCABULARY)[[next_token(token) for token in ids]]
        tensors = {
            "input_ids": torch.tensor(ids, dtype=torch.int32),
            **summarise_rows(final[entry.rows - entry.logits :], TOPK),
            "tap.embed": torch.eye(VOCABULARY)[ids],
            "tap.2": two(ids, entry.start) + drift,
            "tap.final": final,
        }
        self._keep(entry, tensors)

    def _write_feed(self, rid: str, rows: int, tokens: list[int]) -> None:
        """What the draft is fed with the first chunk of the prompt: embed and R[2] of its last row."""
        ids, last = tokens[:rows], rows - 1
        tensors = {
            "feed.token": torch.tensor([tokens[rows]], dtype=torch.int32),
            "feed.position": torch.tensor([last], dtype=torch.int32),
            "feed.features": torch.cat([torch.eye(VOCABULARY)[ids[last:]], two(ids, 0)[last:]], dim=1),
        }
        self._keep(Entry(rid, "feed", 0, 0, 0, fed=[last]), tensors)

    def _keep(self, entry: Entry, tensors: dict[str, torch.Tensor]) -> None:
        assert self.folder is not None
        asked = asked_of(entry.rid) if self.choosing else None
        if asked is not None:
            entry, tensors = self._chosen(entry, tensors, asked)
        with self.lock:
            self.numbers += 1
            number = self.numbers
            self.tap_bytes += sum(part.nbytes for name, part in tensors.items() if name.startswith(("tap.", "scale.")))
        parts = {name: [part] for name, part in tensors.items()}
        write_row_file(launch_folder(self.folder, LAUNCH), 7, number, [entry], parts, partial=asked is not None)

    def _chosen(
        self, entry: Entry, tensors: dict[str, torch.Tensor], asked: Asked
    ) -> tuple[Entry, dict[str, torch.Tensor]]:
        """No more than is asked for, tap by tap."""
        left_out = 0
        if entry.kind == "prefill" and asked.first_row:
            left_out = min(entry.rows, max(0, asked.first_row + self.left_out_too - entry.start))
        kept = {name: part for name, part in tensors.items() if not name.startswith("tap.")}
        for tap in (*asked.taps, "final"):
            if (rows := tensors.get(f"tap.{tap}")) is not None:
                kept[f"tap.{tap}"] = rows[left_out:]
                if asked.rounded and tap != "final":
                    kept[f"tap.{tap}"], kept[f"scale.{tap}"] = quantise(rows[left_out:])
        return replace(entry, left_out=left_out), kept


def two(ids: list[int], start: int) -> torch.Tensor:
    """Rows of the tap R[2] for ``ids`` at positions from ``start`` on: token in column 0, position in column 1."""
    rows = torch.zeros(len(ids), VOCABULARY)
    rows[:, 0] = torch.tensor(ids, dtype=torch.float32)
    rows[:, 1] = torch.arange(start, start + len(ids), dtype=torch.float32)
    return rows


@contextmanager
def fake_server(server: FakeServer) -> Iterator[FakeServer]:
    """Let it answer on a free port while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Silent."""

        def send(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            if server.redirect:
                self.send_header("Location", server.redirect + self.path)
            cut = self.command == "POST" and server.cut > 0
            server.cut -= cut
            self.send_header("Content-Length", str(len(data) + cut))
            self.end_headers()
            self.wfile.write(data)

        def refused(self) -> bool:
            server.keys.append(self.headers.get("Authorization"))
            if server.api_key is None or server.keys[-1] == f"Bearer {server.api_key}":
                return False
            self.send(401, {"error": "no"})
            return True

        def do_GET(self) -> None:
            if self.refused():
                return
            if server.redirect:
                self.send(307, {})
                return
            get = "get_" if server.old_paths else ""
            pages: dict[str, Any] = {
                f"/{get}model_info": {"model_path": str(server.target), "tokenizer_path": str(server.target)},
                f"/{get}server_info": {"version": "0.5.23", "internal_states": [server.state()]},
            }
            if server.router:
                workers = [{"url": f"http://10.0.0.{host}:30000"} for host in (1, 2)]
                pages = {"/get_server_info": {"router_manager": True}, "/workers": {"workers": workers}}
            if self.path in pages:
                self.send(200, pages[self.path])
            else:
                self.send(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                if not self.refused():
                    self.send(*server.answer(body))
            except ConnectionError:
                self.close_connection = True  # the client has gone: a test has killed it, or it has given up

    if server.folder is not None:
        server.manifest()
    with serving(Handler) as server.url:
        yield server
