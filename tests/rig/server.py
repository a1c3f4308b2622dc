"""Starts a real SGLang server on the CPU, and asks it for tokens.

The server is a process of its own, in a process group of its own, run by the interpreter that runs the tests. This
folder goes on its PYTHONPATH: see README.md beside this file for what it brings.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

RIG = Path(__file__).resolve().parent
LOWEST_PORT, HIGHEST_PORT = 20000, 32000  # the kernel hands out higher ones by itself
LOG_TAIL = 4000  # characters of the log that an error shows


class ServerError(Exception):
    """The server did not start, died, or refused a request; the message ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer: token ids of the output, their text, and what the server says about the request."""

    output_ids: list[int]
    text: str
    meta_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its address, the log it writes, and its process."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rids: Sequence[str] | None = None,
        max_new_tokens: int = 16,
        concurrency: int = 1,
        sampling: Mapping[str, Any] | None = None,
        timeout: float = 300,
    ) -> list[Generated]:
        """Greedy answers to ``prompts`` (token ids) in their order, ``concurrency`` of them in flight at a time.

        ``sampling`` adds to or replaces SGLang's sampling parameters; ``rids`` names the requests; ``timeout`` in
        seconds holds for each. Raises ServerError.
        """
        sampling_params = {"temperature": 0, "max_new_tokens": max_new_tokens} | dict(sampling or {})
        requests = [
            {"input_ids": list(prompt), "sampling_params": sampling_params} | ({"rid": rids[row]} if rids else {})
            for row, prompt in enumerate(prompts)
        ]
        with ThreadPoolExecutor(concurrency) as pool:
            answers = list(pool.map(lambda request: self.post("/generate", request, timeout=timeout), requests))
        return [Generated(answer["output_ids"], answer["text"], answer["meta_info"]) for answer in answers]

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 60) -> Any:
        """The JSON that the server answers to ``body``. Raises ServerError."""
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path} answered {error.code}: {error.read().decode()[:LOG_TAIL]}") from error
        except OSError as error:
            raise ServerError(f"{path} gave no answer ({error}); {self.log} ends:\n{log_tail(self.log)}") from error


@contextmanager
def start_server(
    target_dir: Path,
    draft_dir: Path | None = None,
    *,
    log: Path,
    steps: int = 3,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    extra_args: Sequence[str] = (),
    launcher: Sequence[str] = (sys.executable, "-m", "sglang.launch_server"),
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    cwd: Path | None = None,
    ready_timeout: float = 300,
    radix_cache: bool = False,
) -> Iterator[Server]:
    """Runs ``sglang.launch_server`` on the CPU while the context lasts, and ends its whole process group after it.

    With ``draft_dir`` it drafts by EAGLE-3: ``steps`` steps, ``topk`` branches, ``num_draft_tokens`` verified rows
    (steps + 1 when None). With ``radix_cache`` it keeps prefixes. ``launcher`` is what takes SGLang's arguments.
    ``threads`` sets OMP_NUM_THREADS, otherwise the environment does. ``env`` is added to this process's environment; a
    PYTHONPATH in it goes before this folder. The server runs in ``cwd`` (the log's folder when None). Raises
    ServerError when it is not ready after ``ready_timeout`` seconds.
    """
    port = free_port()
    command = [
        *(*launcher, "--model-path", str(target_dir)),
        *("--device", "cpu", "--attention-backend", "intel_amx", "--host", "127.0.0.1", "--port", str(port)),
        *("--mem-fraction-static", "0.2", "--max-total-tokens", "16384", "--max-running-requests", "8"),
        *([] if radix_cache else ["--disable-radix-cache"]),
        "--skip-server-warmup",
        "--sleep-on-idle",  # a scheduler that waits would take a whole core from the one that works
    ]
    if draft_dir is not None:
        command += [
            *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft_dir)),
            *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk)),
            *("--speculative-num-draft-tokens", str(num_draft_tokens or steps + 1)),
        ]
    command += extra_args
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=cwd or log.parent,
            env=server_environment(env or {}, threads),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its process group is its own, so that all of it can be ended
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        wait_until_ready(server, ready_timeout)
        yield server
    finally:
        end_group(process)


def server_environment(env: Mapping[str, str], threads: int | None = None) -> dict[str, str]:
    """This process's environment with what the rig needs, then ``env`` over it."""
    merged = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        **env,
    }
    # Plain kernels are for the process that tests: for them torch's compiler, which the server uses, has no code.
    merged.pop("ATEN_CPU_CAPABILITY", None)
    merged["PYTHONPATH"] = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), str(RIG)])
    return merged


def wait_until_ready(server: Server, timeout: float) -> None:
    """Returns once /health answers. Raises ServerError when the process ends first or ``timeout`` seconds pass."""
    deadline = time.monotonic() + timeout
    while not healthy(server.url):
        if (code := server.process.poll()) is not None:
            raise ServerError(f"the server ended with exit code {code}; {server.log} ends:\n{log_tail(server.log)}")
        if time.monotonic() > deadline:
            raise ServerError(f"not ready after {timeout:.0f} s; {server.log} ends:\n{log_tail(server.log)}")
        time.sleep(0.3)


def healthy(url: str) -> bool:
    """Whether /health answers 200. It generates a token, so a busy machine gets time rather than more questions."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as response:
            return bool(response.status == HTTPStatus.OK)
    except OSError:
        return False


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and every process of its group, and waits until the first is gone."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def log_tail(log: Path) -> str:
    """The last part of a log."""
    return log.read_text(errors="replace")[-LOG_TAIL:]


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago.

    SGLang takes the port 10000 above it as well (0.5.20 arg_groups/serving_hook.py), which must be below 65536.
    """
    with socket.socket() as probe:
        while True:
            try:
                probe.bind(("127.0.0.1", random.randrange(LOWEST_PORT, HIGHEST_PORT)))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
            return port
