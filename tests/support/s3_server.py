"""A real S3 server on this machine: moto's, in a process of its own."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KEYS = {"AWS_ACCESS_KEY_ID": "an-id", "AWS_SECRET_ACCESS_KEY": "a-very-secret-key", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3_server() -> Iterator[str]:
    """Its endpoint, while the block runs."""
    line = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        assert server.stderr is not None
        said = next(found for said in server.stderr if (found := re.search(r"Running on (http://\S+)", said)))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield said[1]
        server.kill()


def open_store(endpoint: str) -> Any:
    """s3fs for it, with keys of its own."""
    from s3fs import S3FileSystem

    return S3FileSystem(
        key="another", secret="secret", endpoint_url=endpoint, use_listings_cache=False, skip_instance_cache=True
    )
