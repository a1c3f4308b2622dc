"""A stand-in for a recording ``sgl.Engine``: the stand-in server's target and spool, asked in this process."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from support.fake_server import FakeServer


class FakeEngine:
    """What ``capture_engine`` needs of an engine, by the names that SGLang 0.5.23 entrypoints/engine.py gives it."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.loop = asyncio.new_event_loop()
        self.salts: list[str] = []
        self.tokenizer_manager: Any = SimpleNamespace(
            model_path=str(server.target),
            server_args=SimpleNamespace(tokenizer_path=None),
            is_generation=True,
            get_internal_state=self._states,
        )

    async def _states(self) -> list[dict[str, Any]]:
        return [self.server.state()]

    async def async_generate(
        self, *, rid: str, input_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> dict[str, Any]:
        """An answer; ValueError for a prompt that it does not take, as SGLang raises it."""
        self.salts.append(cache_salt)
        status, answer = self.server.answer({"rid": rid, "input_ids": input_ids, "sampling_params": sampling_params})
        if status == 400:
            raise ValueError(answer["error"]["message"])
        if status != 200:
            raise RuntimeError(answer["error"])
        return answer


@contextmanager
def fake_engine(server: FakeServer) -> Iterator[FakeEngine]:
    """An engine that records where ``server`` would; its loop is closed after the context."""
    if server.folder is not None:
        server.manifest()
    engine = FakeEngine(server)
    try:
        yield engine
    finally:
        engine.loop.close()
