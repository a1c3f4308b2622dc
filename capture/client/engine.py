"""Capture from an ``sgl.Engine`` in this process: the same client as of a server, which asks the engine itself.

Imports no engine: what is called is the engine's own ``async_generate`` and its tokenizer manager, as read in SGLang
0.5.20 to 0.5.23 (entrypoints/engine.py).
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.capture.client.api import RefusedError, ServerApi, TransientError
from replay.capture.client.capture import capture_server
from replay.capture.client.facts import ask_facts
from replay.capture.events import CaptureResult, Event
from replay.capture.options import OWN, ServerOptions, check_options
from replay.errors import CaptureError, UsageError
from replay.printable import one_line
from replay.traces.fields import show
from replay.traces.files import as_path
from replay.traces.given import check_callable

_NAME = "sgl.Engine"  # in place of an address, in messages
_SHOWN = 300  # characters of a reason
_FIRST_SECONDS = 60.0  # that a new engine gets to say what it is


def capture_engine(
    engine: Any,
    prompts: str | Path,
    out: str | Path,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    taps: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    raw: bool = False,
    concurrency: int = 16,
    weights: bool = True,
    resume: bool = False,
    force: bool = False,
    recording: str | Path | None = None,
    taps_for: int | None = None,
    then_taps: str | None = None,
    rows: str = "exact",
    prompt_rows: int | None = None,
    server_cache: str = OWN,
) -> CaptureResult:
    """Capture every row of the file ``prompts`` from an ``sgl.Engine`` that records, into the folder ``out``.

    The engine records where REPLAY_RECORD named a folder before it was made. Options are those of ``replay capture
    --server``, by the same names; ``taps`` are of those that the engine records, None for all; ``prompt_rows`` W is its
    ``last:W``. Other requests to the engine are neither recorded nor disturbed; its event loop is busy meanwhile.

    Raises UsageError where its event loop runs in this very thread, as in a notebook; CaptureError where it does not
    record; what a capture from a server raises, with options as the command line calls them.
    """
    options = ServerOptions(
        _NAME, as_path(prompts), as_path(out), taps=taps, max_new_tokens=max_new_tokens, temperature=temperature,
        top_p=top_p, top_k=top_k, raw=raw, concurrency=concurrency, weights=weights, resume=resume, force=force,
        recording=None if recording is None else as_path(recording), taps_for=taps_for, then_taps=then_taps,
        rows=rows, prompt_rows=prompt_rows, server_cache=server_cache,
    )  # fmt: skip
    check_options(options)
    check_callable("on_event", on_event, "a function that takes an event was expected; leave it out")
    _check_engine(engine)
    with _running(engine):
        api = EngineApi(_NAME, engine=engine)
        if not ask_facts(api, options.recording).recording:
            raise CaptureError(
                "this engine does not record: set REPLAY_RECORD to a folder, in os.environ or in the shell, before "
                "sgl.Engine(...) is called"
            )
        return capture_server(options, on_event, api)


@dataclass(frozen=True, slots=True)
class EngineApi(ServerApi):
    """An engine asked as a server is, by the same paths."""

    engine: Any = None

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One try. Raises TransientError, or CaptureError where another try would end the same."""
        if path == "/model_info":
            return _model_info(self.engine.tokenizer_manager)
        if path == "/server_info":
            return {"internal_states": self._wait(path, self.engine.tokenizer_manager.get_internal_state())}
        given = dict(body or {})
        given["cache_salt"] = given.pop("extra_key")  # whose radix tree it takes, by the name that engines give it
        return self._wait(path, self.engine.async_generate(**given))

    def _wait(self, path: str, asked: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(asked, self.engine.loop)
        try:
            return future.result(self.timeout)
        except TimeoutError as error:
            future.cancel()
            raise TransientError(f"{path} gave no answer in {self.timeout:.0f} s") from error
        except _unavailable() as error:
            raise TransientError(f"{path} answered {getattr(error, 'detail', '')}") from error
        except ValueError as error:  # of a prompt that it does not take; over HTTP this is status 400
            reason = one_line(str(error), _SHOWN)
            raise RefusedError(f"{_NAME} refuses: {reason}", reason) from error
        except (RuntimeError, CancelledError) as error:
            raise TransientError(f"{path} failed ({one_line(str(error), _SHOWN)})") from error


def _unavailable() -> tuple[type[Exception], ...]:
    """What an engine raises for a request that it gave up (SGLang 0.5.23 managers/tokenizer_manager.py)."""
    try:
        from fastapi import HTTPException
    except ImportError:
        return ()
    return (HTTPException,)


def _model_info(manager: Any) -> dict[str, Any]:
    return {
        "model_path": manager.model_path,
        "tokenizer_path": getattr(manager.server_args, "tokenizer_path", None) or manager.model_path,
        "is_generation": manager.is_generation,
    }


def _check_engine(engine: Any) -> None:
    if not all(hasattr(engine, name) for name in ("async_generate", "tokenizer_manager", "loop")):
        raise UsageError(f"{show(type(engine).__name__)} is no sgl.Engine: pass what sgl.Engine(...) returned")
    if engine.tokenizer_manager is None or engine.loop.is_closed():
        raise UsageError("this engine has been shut down: make another with sgl.Engine(...)")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(
        "an event loop runs in this thread, as in a notebook, and the engine's may be the same: type await "
        "asyncio.to_thread(replay.capture_engine, ...)"
    )


@contextmanager
def _running(engine: Any) -> Iterator[None]:
    """Let the engine's event loop run in a thread meanwhile, unless somebody else runs it."""
    loop: asyncio.AbstractEventLoop = engine.loop
    if loop.is_running():
        yield
        return
    # first here: it lets the engine hear signals, which only the main thread may ask for
    try:
        loop.run_until_complete(asyncio.wait_for(engine.tokenizer_manager.get_internal_state(), _FIRST_SECONDS))
    except TimeoutError as error:
        raise CaptureError(f"the engine gave no answer in {_FIRST_SECONDS:.0f} s: has it been shut down?") from error
    thread = threading.Thread(target=loop.run_forever, name="replay-engine", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
