"""The entry point of the SGLang plugin (group ``sglang.srt.plugins``), and the places of SGLang that it hooks.

Idle unless the environment asks for it: by what ``replay serve`` sets, or by a folder in REPLAY_RECORD, which
by_environment.py takes care of. In every scheduler process of SGLang (seams.py has the places, and what is done where
one is not there):

- after ``ModelRunner.init_attention_backends``, before graphs are captured: the target captures the wanted taps beside
  those the draft is fed, and keeps its final hidden states;
- before ``ModelRunner.forward`` of the draft's prefill: a few rows of what it is fed are copied, whatever was meant;
- before ``ModelRunner.forward`` of a target without a draft: it is asked for hidden states, where SGLang asks requests;
- after ``ModelRunner.forward`` of the target, before the sampler may write to the logits: rows are copied, and the
  hidden states are cut back to the columns that the draft is fed, on every rank;
- before ``LogitsProcessor.forward`` of the target, where SGLang hands neither end of its stream on (joined.py);
- after ``EAGLEWorkerV2.verify``: which rows were accepted, and before 0.5.21 after ``eagle_sample``, which says so;
- ``Scheduler.get_internal_state``: where the rows lie, or why there are none, for clients that ask ``/server_info``.

Every process of a server imports this module, so it imports nothing heavy.
"""

import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from replay.capture.plugin import seams
from replay.capture.plugin.recording import Recording, asked_here, is_folder

logger = logging.getLogger(__name__)

_ENGINE = "sglang.srt.entrypoints.engine"  # which starts schedulers
_START = "sglang.srt.managers.scheduler.Scheduler.init_model_worker"  # of a scheduler, before its model is loaded


def activate() -> None:
    """The entry point, called in every process of a server, first in the one that starts it."""
    asked = asked_here(os.environ)
    if not asked:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if is_folder(asked) and multiprocessing.parent_process() is not None and _ENGINE not in sys.modules:
        return  # the child of a server that starts none, as its detokenizer
    if is_folder(asked):
        from replay.capture.plugin.by_environment import begin, not_begun

        begin(lambda place, hook: HookRegistry.register(place, hook, HookType.AROUND))
        HookRegistry.register(_START, not_begun, HookType.BEFORE)
    else:
        HookRegistry.register(_START, _install, HookType.BEFORE)


def _install(scheduler: Any) -> None:
    """Hook this scheduler process; runs before its model is loaded.

    Whatever goes wrong here leaves the server unrecorded, unless a wiring was asked for: then it ends (WiringError).
    """
    import sglang

    from replay.capture.plugin.live import UNFORESEEN, in_words
    from replay.capture.plugin.plugin import Plugin
    from replay.capture.plugin.reporter import Reporter

    recording = Recording.from_json(asked_here(os.environ))
    found = seams.find_seams(sglang.__version__)
    plugin = Plugin(recording, Reporter(recording, sglang.__version__), found)
    try:
        _set_up(plugin, found)
    except UNFORESEEN as error:
        plugin.refuse(f"the plugin could not be set up: {in_words(error)}")


def _set_up(plugin: Any, found: seams.Found) -> None:
    from replay.capture.plugin.server_state import simulation_problem

    if seams.STATE in found.ways:  # first, so that who asks the server is told why it is not recorded
        _after(*found.ways[seams.STATE].owner(), plugin.after_internal_state)
    problem = found.problem or simulation_problem()
    if problem is not None:
        plugin.refuse(problem)
        return
    for note in found.notes:
        logger.warning("replay: %s", note)
    plugin.reporter.tell(state="loading", notes=found.notes, no_feed=found.lacking.get(seams.FEED, ""))
    _hook(found, plugin)


def _hook(found: seams.Found, plugin: Any) -> None:
    """Put the hooks where their seams are."""
    if seams.FEED in found.ways:
        _before(*found.ways[seams.FORWARD].owner(), plugin.before_forward)
    _before(*found.ways[seams.FORWARD].owner(), plugin.ask_for_states)
    _after(*found.ways[seams.TAPS].owner(), plugin.after_attention)
    _after(*found.ways[seams.FORWARD].owner(), plugin.after_forward)
    if seams.VERIFY in found.ways:
        _after(*found.ways[seams.VERIFY].owner(), plugin.after_verify)
    if (way := found.ways.get(seams.ACCEPTED)) is not None and way.name == "eagle_sample":
        _after(*way.owner(), plugin.after_sample)


def _after(owner: Any, name: str, hook: Callable[..., None]) -> None:
    """Let ``hook(result, *args)`` run after each call of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        hook(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapper)


def _before(owner: Any, name: str, hook: Callable[..., None]) -> None:
    """Let ``hook(*args)`` run before each call of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)
