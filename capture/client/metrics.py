"""A server's /metrics page, asked for again and again."""

import time
from functools import partial

from replay.capture.client.api import NobodyThereError, ServerApi, open_api
from replay.errors import CaptureError, UsageError


def poll_pages(url: str, seconds: int, api_key: str | None = None) -> list[str]:
    """The pages at ``url``, an address with its path, one a second for ``seconds`` seconds.

    Raises UsageError for what is no address, CaptureError where no page comes.
    """
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if not host:
        raise UsageError(f"--bench {url!r} is no address: type for example http://127.0.0.1:30000/metrics")
    address = f"{scheme.lower()}://{host}"
    api = open_api(address, api_key, retries=2, again="type the same command again", option="--bench")
    page = partial(_page, api, f"{slash}{path}")
    pages = [api.patiently(page)]
    for _ in range(seconds):
        time.sleep(1.0)
        pages.append(api.patiently(page))
    return pages


def _page(api: ServerApi, path: str, _: int) -> str:
    try:
        return api.page(path)
    except NobodyThereError as error:
        raise CaptureError(f"{api.url}{error}: see to the server and its address") from error
