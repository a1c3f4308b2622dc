"""What a server says of itself before anything is asked of it: /model_info, /server_info, its manifests."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from replay.capture.client.api import NoSuchPathError, ServerApi
from replay.capture.manifest import Manifest, read_manifests
from replay.capture.spool import launch_folder
from replay.errors import CaptureError, TraceCorruptError, TraceError
from replay.printable import counted, one_line
from replay.traces.fields import Fields, show
from replay.traces.files import as_path
from replay.traces.header import MAX_COUNT, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, EngineInfo, TargetInfo
from replay.traces.taps import FINAL

_MOST_PATH, _MOST_VERSION = 4096, 60  # characters
_LARGEST = {"layers": MAX_LAYERS, "hidden_size": MAX_WIDTH, "vocab_size": MAX_VOCAB}
# details that decide rows or rounds: those of one trace come from servers that agree in them and in all speculative_*
_DECISIVE = ("wiring", "server_wiring", "dtype", "quantization", "kv_cache_dtype", "draft_fingerprint")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """``spool`` is where its rows can be read here, ``manifests`` one of each of its processes.

    Without the plugin there is no spool and no manifest.
    """

    version: str
    model_path: str
    tokenizer_path: str
    vocab_size: int | None
    context: int | None
    arguments: Mapping[str, Any]
    spool: Path | None
    manifests: tuple[Manifest, ...]

    @property
    def recording(self) -> bool:
        """Whether it records."""
        return self.spool is not None

    @property
    def taps(self) -> tuple[str, ...]:
        """What it records."""
        return tuple(self.manifests[0].taps) if self.manifests else ()

    @property
    def drafts(self) -> bool:
        """Whether it feeds a draft."""
        return any(one.wiring for one in self.manifests)

    @property
    def keeps_prefixes(self) -> bool:
        """Whether it has a prefix cache, as far as it says."""
        return not any(one.details.get("disable_radix_cache") == "true" for one in self.manifests)

    @property
    def no_feed(self) -> str:
        """Why it does not record what the draft is fed; empty where it does, or has no draft."""
        return next((one.no_feed for one in self.manifests if one.no_feed), "")

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not recorded of this version of SGLang, and whether it was never tried."""
        return tuple(dict.fromkeys(note for one in self.manifests for note in one.notes))

    def target(self) -> TargetInfo:
        """The target as the server describes it. Raises TraceCorruptError."""
        values = _target_fields(self.manifests[0])
        read: dict[Any, Callable[[str], Any]] = {
            str: values.text,
            bool: values.flag,
            int: lambda name: values.integer(name, 1, _LARGEST[name]),
            int | None: lambda name: values.optional_integer(name, 1, MAX_COUNT),
        }
        return TargetInfo(**{item.name: read[item.type](item.name) for item in fields(TargetInfo)})

    def engine(self) -> EngineInfo:
        """The header's engine: version, wiring as served, arguments, draft config."""
        first = self.manifests[0]
        details = {
            **first.details,
            "wiring": ",".join(first.wiring),
            "server_wiring": ",".join(first.server_wiring),
            "ranks": str(first.world),
        }
        return EngineInfo("sglang", first.sglang, details)


def ask_facts(api: ServerApi, recording: Path | None) -> ServerFacts:
    """Ask a server what it is. ``recording``: where its recording folder is seen here, if elsewhere than there.

    Raises CaptureError: no answer, not ready, no SGLang, a recording that is refused, has failed, lacks a rank, or
    lies where this process cannot read it.
    """
    try:
        model = api.get("/model_info", "/get_model_info")  # the latter: their names of old
        info = api.get("/server_info", "/get_server_info")
    except NoSuchPathError:
        _refuse_router(api)
        raise
    if isinstance(info, dict) and "router_manager" in info:
        _refuse_router(api)
    if not isinstance(model, dict) or not isinstance(info, dict):
        raise CaptureError(f"{api.url} answers no JSON objects: --server takes the address of an SGLang server")
    if model.get("is_generation") is False:
        raise CaptureError(f"{api.url} serves an embedding model: start it with a model that generates")
    states = [state for state in _list(info.get("internal_states")) if isinstance(state, dict)]
    folder, manifests = _recording(states, recording, api.url)
    told = Fields(f"{api.url}/model_info", model, _no_server)
    path = _path(told, "model_path")
    return ServerFacts(
        version=one_line(str(info.get("version") or ""), _MOST_VERSION),
        model_path=path,
        tokenizer_path=_path(told, "tokenizer_path") or path,
        vocab_size=None if not manifests else _target_fields(manifests[0]).integer("vocab_size", 1, MAX_VOCAB),
        context=_context(states, manifests),
        arguments=states[0] if states else info,
        spool=folder,
        manifests=manifests,
    )


def _refuse_router(api: ServerApi) -> None:
    """Raises CaptureError where a router answers: rows lie with the server that a request happens to go to.

    sglang-router 0.3.2: ``/workers`` lists its servers, and a page of a server's own facts it has not.
    """
    try:
        told = api.get("/workers")
    except CaptureError:
        return
    workers = _list(told.get("workers")) if isinstance(told, dict) else []
    urls = [one_line(str(one.get("url")), 100) for one in workers if isinstance(one, dict) and one.get("url")]
    if urls:
        raise CaptureError(
            f"{api.url} is a router of {counted(len(urls), 'server')}: give --server the address of one that records, "
            f"as {urls[0]}"
        )


def _target_fields(manifest: Manifest) -> Fields:
    return Fields("the server's manifest: target", dict(manifest.target))


def _no_server(said: str) -> CaptureError:
    return CaptureError(f"{said}: --server takes the address of an SGLang server")


def _path(told: Fields, name: str) -> str:
    """A path as the server gives it; empty where it gives none."""
    if not told.values.get(name):
        return ""
    path = told.text(name, _MOST_PATH)
    if not path.isprintable():
        raise told.refuse(name, "a path of printable characters")
    return path


def check_same_server(begun: EngineInfo, running: EngineInfo, trace: Path) -> None:
    """Refuse to go on with ``trace`` by a server that drafts or computes in another way. Raises TraceError.

    Traces of other engines are left to TraceWriter.resume, which names both.
    """
    if begun.name != running.name:
        return
    speculative = {name for name in (*begun.details, *running.details) if name.startswith("speculative_")}
    for name in (*_DECISIVE, *sorted(speculative), "draft_config"):  # the long one last
        before, now = (engine.details.get(name) for engine in (begun, running))
        if before != now:
            raise TraceError(
                f"{trace} was begun on a server with {name} {_told(before)}, the running one has {_told(now)}: start "
                "the server as before, or type another -o"
            )


def _told(value: str | None) -> str:
    return "unset" if value is None else show(value)


def _recording(
    states: Sequence[Mapping[str, Any]], seen_here: Path | None, url: str
) -> tuple[Path | None, tuple[Manifest, ...]]:
    told = [state["replay"] for state in states if isinstance(state.get("replay"), dict)]
    if not told:
        return None, ()
    if len(told) != len(states):
        raise CaptureError(f"{len(told)} of {len(states)} schedulers of {url} record: restart it")
    for one in told:
        if one.get("state") != "recording":
            raise CaptureError(
                f"{url} does not record ({one_line(str(one.get('state')), 60)}: "
                f"{one_line(str(one.get('reason')), 300)}): mend this and restart it"
            )
    there, launch, host = (str(told[0].get(name)) for name in ("folder", "launch", "host"))
    folder = launch_folder(as_path(seen_here or there), launch)
    manifests = read_manifests(folder)
    if not manifests:
        raise CaptureError(
            f"{url} records into {there} on {host}, and {folder} is not to be read here: run this command on {host} "
            "and copy the finished trace, or share that folder and name it here with --recording"
        )
    _check_manifests(manifests, launch, states, url)
    return folder, tuple(manifests)


def _check_manifests(manifests: Sequence[Manifest], launch: str, states: Sequence[Mapping[str, Any]], url: str) -> None:
    world = states[0].get("world_size")
    if isinstance(world, int) and len(manifests) != world:
        raise CaptureError(
            f"{url} has {world} ranks, {len(manifests)} of them wrote a manifest: see its log and restart it"
        )
    first = manifests[0]
    for one in manifests:
        if one.launch != launch or one.state != "recording":
            raise CaptureError(
                f"rank {json.dumps(dict(one.ranks))} of {url} does not record ({one.state}: {one.reason}): see its log "
                "and restart it"
            )
        if (one.taps, one.wiring, one.topk, one.dtype) != (first.taps, first.wiring, first.topk, first.dtype):
            raise CaptureError(f"the ranks of {url} record different taps: restart it")
    if FINAL not in first.taps:
        raise TraceCorruptError(f"the manifests of {url} name no tap {FINAL}")
    if not any(one.writer for one in manifests):
        raise CaptureError(f"no rank of {url} writes rows: see its log and restart it")


def _context(states: Sequence[Mapping[str, Any]], manifests: Sequence[Manifest]) -> int | None:
    lengths = [state.get("context_length") for state in states[:1]]
    lengths += [one.target.get("max_position_embeddings") for one in manifests[:1]]
    known = [length for length in lengths if isinstance(length, int) and not isinstance(length, bool)]
    return min(known) if known else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
