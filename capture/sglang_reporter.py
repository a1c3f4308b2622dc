"""A scheduler process's word on its own recording, kept on disk for the client (spool.Manifest). Imports no engine."""

import logging
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from replay.capture.recording import Recording
from replay.capture.spool import Manifest, launch_folder, write_manifest

logger = logging.getLogger(__name__)


class Reporter:
    """This process's manifest, kept up to date on disk; where that fails, the log has it."""

    def __init__(self, recording: Recording, version: str) -> None:
        self.folder = launch_folder(Path(recording.folder), recording.launch)
        self.manifest = Manifest(
            launch=recording.launch,
            pid=os.getpid(),
            host=socket.gethostname(),
            state="loading",
            writer=False,
            sglang=version,
            topk=recording.topk,
        )

    def tell(self, **changes: Any) -> bool:
        """Change the manifest; whether it is on disk. One that is not says ``failed``, to those who ask the server."""
        self.manifest = replace(self.manifest, **changes)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_manifest(self.folder, self.manifest)
        except OSError as error:
            logger.error("replay: cannot write to %s (%s); the server goes on unrecorded", self.folder, error.strerror)
            if self.manifest.state in ("loading", "recording"):
                reason = f"cannot write to {self.folder}: {error.strerror or error}"
                self.manifest = replace(self.manifest, state="failed", reason=reason)
            return False
        return True
