"""A scheduler process's word on its own recording, kept on disk for the client (spool.Manifest). Imports no engine."""

import logging
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from replay.capture.manifest import Manifest, write_manifest
from replay.capture.plugin.recording import Recording
from replay.capture.spool import launch_folder

logger = logging.getLogger(__name__)


class Reporter:
    """This process's manifest, kept up to date on disk; where that fails, the log has it."""

    def __init__(self, recording: Recording, version: str) -> None:
        self.folder = launch_folder(Path(recording.folder), recording.launch)
        # two locks, so that a disk that hangs keeps nobody from what is said in /server_info
        self._changing, self._writing = threading.Lock(), threading.Lock()
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
        """Change the manifest; whether it is on disk. One that is not says ``failed``, to those who ask the server.

        Any thread may call it: changes are joined, and the file is the newest manifest.
        """
        with self._changing:
            self.manifest = replace(self.manifest, **changes)
        try:
            with self._writing:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_manifest(self.folder, self.manifest)
        except OSError as error:
            logger.error("replay: cannot write to %s (%s); the server goes on unrecorded", self.folder, error.strerror)
            reason = f"cannot write to {self.folder}: {error.strerror or error}"
            with self._changing:
                if self.manifest.state in ("loading", "recording"):
                    self.manifest = replace(self.manifest, state="failed", reason=reason)
            return False
        return True
