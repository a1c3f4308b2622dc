"""Whether a server still records, asked while its rows are waited for."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from replay.capture.client.api import ServerApi, TransientError
from replay.capture.manifest import read_manifests
from replay.errors import CaptureError
from replay.printable import one_line

_ASK_SECONDS = 5.0  # between two questions to the server itself
_PATIENCE = 30.0  # seconds for its answer


class RecordingStoppedError(CaptureError):
    """The server goes on and records no more; ``reason`` in half a sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the server goes on but has stopped recording ({reason}): mend this, restart it and type "
            "the same command with --resume"
        )
        self.reason = reason


class RecordingWatch:
    """Looks at the manifests in the launch folder, and now and then asks the server: a disk that is full holds none.

    ``no_feed``: why what a draft is fed is not recorded, as the manifests last said it.
    """

    def __init__(self, api: ServerApi, folder: Path, no_feed: str = "") -> None:
        self._api, self._folder, self.no_feed = api, folder, no_feed
        self._asked = time.monotonic()

    def check(self) -> None:
        """Raises RecordingStoppedError, or CaptureError where the launch folder is gone."""
        manifests = read_manifests(self._folder)
        if not manifests:
            raise CaptureError(f"{self._folder} is gone: the server was restarted; type the same command with --resume")
        for one in manifests:
            if one.state != "recording":
                raise RecordingStoppedError(one.reason)
            self.no_feed = self.no_feed or one.no_feed
        if time.monotonic() - self._asked > _ASK_SECONDS:
            self._ask()
            self._asked = time.monotonic()

    def _ask(self) -> None:
        try:
            info = replace(self._api, timeout=_PATIENCE).call("/server_info")
        except (TransientError, CaptureError):
            return  # busy, or of an older name for it: the manifests must do
        for state, reason in recording_states(info):
            if state != "recording":
                raise RecordingStoppedError(reason)


def recording_states(info: Any) -> list[tuple[str, str]]:
    """State and reason of each scheduler that says in ``/server_info`` whether it records."""
    states = info.get("internal_states") if isinstance(info, dict) else None
    told = [state.get("replay") for state in (states if isinstance(states, list) else ()) if isinstance(state, dict)]
    return [(_word(one.get("state")), _word(one.get("reason"))) for one in told if isinstance(one, dict)]


def _word(value: object) -> str:
    return one_line(str(value), 300)
