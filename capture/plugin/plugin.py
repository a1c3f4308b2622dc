"""The plugin in one scheduler process: what its hooks do, and what it says of itself.

What it cannot do it says in the log and in its manifest (manifest.py), and the server goes on. Two things stop it: a
``--wiring`` that cannot be had, because serving another one would be worse than not serving, and layer ids at which
SGLang itself would stop at the first request.
"""

import logging
import os
import threading
from typing import Any

from replay.capture.plugin.columns import Columns
from replay.capture.plugin.facts import server_details, server_url, target_info
from replay.capture.plugin.joined import Joined, keeps_final
from replay.capture.plugin.live import UNFORESEEN, LiveRecording, ask_for_states, in_words
from replay.capture.plugin.model import NeverFed, capture_boundaries, capturing_parts, check_fed
from replay.capture.plugin.recorder import RowRecorder
from replay.capture.plugin.recording import Recording
from replay.capture.plugin.reporter import Reporter
from replay.capture.plugin.seams import ACCEPTED, VERIFY, Found
from replay.capture.plugin.server_state import (
    drafting_problem,
    given_wiring,
    layout_problem,
    ranks,
    resolved_arguments,
    states_problem,
    versions,
    world,
)
from replay.errors import CaptureError, ReplayError, WiringError
from replay.targets.rules import release_of
from replay.traces.taps import FINAL, default_taps, parse_taps, sort_taps, tap_index, tap_name

logger = logging.getLogger(__name__)


class Plugin:
    """Hooks of one scheduler process, and what they need to know.

    ``columns``: what the target captures, once that is set. ``live``: the recording while it runs, None before, and in
    processes that write no rows.
    """

    def __init__(self, recording: Recording, reporter: Reporter, seams: Found | None = None) -> None:
        self.recording, self.reporter = recording, reporter
        self.lacking = {} if seams is None else seams.lacking
        self.release = release_of(reporter.manifest.sglang)
        self.sampled: Any | None = None  # accepted nodes of the verify that runs, where only its sampling tells them
        self.columns: Columns | None = None
        self.live: LiveRecording | None = None
        self.joined: Joined | None = None  # where SGLang hands on neither end of the stream
        self._asked = False  # whether it was we who had the forward that runs keep its hidden states
        self.no_feed: threading.Thread | None = None  # that tells why the feed is recorded no more, once it is not

    # ---- what it says ----

    def refuse(self, problem: str) -> None:
        """Go on unrecorded for this reason; a wiring that was asked for is then no longer to be had."""
        self.reporter.tell(state="refused", reason=problem)
        logger.error("replay: this server is not recorded: %s", problem)
        if self.recording.wiring is not None:
            raise WiringError(f"--wiring {self.recording.wiring} cannot be had: {problem}")

    def stop(self, problem: WiringError) -> None:
        """End a server that would start and then end at its first request."""
        self.reporter.tell(state="stopped", reason=str(problem))
        raise problem

    def failed(self, reason: str) -> None:
        """Recording has ended; serving goes on."""
        logger.error("replay: recording has ended, the server goes on: %s", reason)
        self.reporter.tell(state="failed", reason=reason)

    def end_feed(self, reason: str) -> None:
        """What the draft is fed is recorded no more; the target's rows are, and serving goes on."""
        logger.error("replay: what the draft is fed is recorded no more, all else is: %s", reason)
        # in a thread: the disk may hang, and a forward waits here
        self.no_feed = threading.Thread(
            target=self.reporter.tell, kwargs={"no_feed": reason}, name="replay-no-feed", daemon=True
        )
        self.no_feed.start()

    # ---- the hooks ----

    def after_attention(self, _: None, runner: Any) -> None:
        """Let the target capture what is wanted beside what the draft is fed."""
        if runner.is_draft_worker:
            return
        try:
            self._set_taps(runner)
        except NeverFed as error:
            self.stop(error)
        except ReplayError as error:
            self.refuse(str(error))
        except UNFORESEEN as error:
            if self.recording.wiring is not None:
                raise
            self.failed(f"the taps could not be set: {in_words(error)}")

    def before_forward(self, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Copy a few rows of what the draft is fed in a prefill: what comes to it, not what it should be.

        Before, because the head may write to its features (SGLang 0.5.23 models/llama_eagle3.py adds to them where
        there is no fc). Whatever goes wrong here ends no more than this: the target's rows do not need it.
        """
        if not runner.is_draft_worker or self.live is None or self.no_feed is not None:
            return
        try:
            self.live.record_feed(forward_batch)
        except CaptureError as error:
            self.end_feed(str(error))
        except UNFORESEEN as error:
            self.end_feed(f"the rows of a draft's prefill could not be copied: {in_words(error)}")

    def ask_for_states(self, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Before a target's forward without a draft, on every rank: let it keep hidden states for requests of ours.

        SGLang 0.5.15 and 0.5.16 model_executor/forward_batch_info.py ``ForwardBatch.init_new`` keep them for requests
        that ask to have them returned; from 0.5.17 on --enable-return-hidden-states is enough.
        """
        self._asked = False
        if runner.is_draft_worker or self.columns is None or self.columns.fed:
            return
        try:
            self._asked = ask_for_states(forward_batch)
        except UNFORESEEN as error:  # the forward then lacks them, which ends the recording
            logger.error("replay: hidden states could not be asked for: %s", in_words(error))

    def after_forward(self, out: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Copy the rows of a target forward; give the draft the columns it had without us."""
        if runner.is_draft_worker or self.columns is None:
            return
        given: Any = getattr(out, "logits_output", None)
        hidden, final = getattr(given, "hidden_states", None), getattr(given, "last_hidden_states", None)
        if hidden is None or not self.columns.are_all_in(hidden):
            if self.live is not None and given is not None:  # a forward in parts gives nothing before its last one
                self.live.miss_forward(forward_batch, hidden)
            return
        hidden, final = self.columns.apart(hidden, final)
        given.hidden_states = self.columns.fed_of(hidden) if self.columns.fed else _whole(final)
        if self._asked:
            given.hidden_states = None  # as without us
        if self.joined is not None and self.joined.problem and self.live is not None:
            self.live.recorder.fail(self.joined.problem)
        if self.live is not None:
            self.live.record_forward(forward_batch, hidden, final, given.next_token_logits)

    def after_verify(self, result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Copy the accepted rows of a verify."""
        sampled, self.sampled = self.sampled, None
        if self.live is not None:
            self.live.record_verify(result, batch, sampled)

    def after_sample(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """Keep which nodes a verify accepts, where its result does not say so (SGLang before 0.5.21)."""
        self.sampled = result[2] if isinstance(result, tuple) and len(result) > 2 else None

    def after_internal_state(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """Tell ``/server_info`` where the rows lie."""
        manifest = self.reporter.manifest
        told = {
            "folder": self.recording.folder,
            "launch": self.recording.launch,
            "host": manifest.host,
            "state": manifest.state,
            "reason": manifest.reason,
        }
        try:
            result.internal_state["replay"] = told
        except UNFORESEEN as error:  # clients then find the folder by --recording alone
            logger.error("replay: /server_info cannot say where the rows lie: %s", in_words(error))

    # ---- setting the taps ----

    def _set_taps(self, runner: Any) -> None:
        """Let the target capture the taps, and begin to record. Raises ReplayError, and what is UNFORESEEN."""
        problem = drafting_problem(runner) or self._lacks(runner) or layout_problem() or states_problem(runner)
        if problem is not None:
            raise CaptureError(problem)
        core, processor = capturing_parts(runner.model)
        config = runner.model_config.hf_text_config
        given = given_wiring(runner, core)
        fed = self._wanted_wiring(type(runner.model).__name__, given, int(config.num_hidden_layers))
        boundaries = self._boundaries(fed, int(config.num_hidden_layers))
        places = tuple(boundaries.index(one) for one in fed)
        kept = keeps_final(processor)
        width, vocabulary = int(config.hidden_size), int(runner.model_config.vocab_size)
        columns = Columns(boundaries, places, width, vocabulary, joined=not kept)
        captured = boundaries if kept else boundaries[1:]  # R[0], the first, is joined to them
        if not captured:
            raise CaptureError(
                f"SGLang {self.reporter.manifest.sglang} records embed beside other taps only: name one more"
            )
        joined = None if kept else Joined(core, processor)  # looks first: what it raises leaves the model as it was
        capture_boundaries(runner.model, core, captured, self.release)
        if joined is None:
            processor.keep_last_hidden_states = True
        else:
            joined.begin()
        self.joined = joined
        self.columns = columns  # from here on columns must be cut back, whatever else fails
        self._begin(runner, columns, given)

    def _lacks(self, runner: Any) -> str | None:
        """What of this SGLang is not there that a server which drafts like this one needs."""
        if runner.spec_algorithm.is_none():
            return None
        trees = ACCEPTED in self.lacking and int(resolved_arguments().get("speculative_eagle_topk") or 1) > 1
        return self.lacking.get(VERIFY) or (self.lacking[ACCEPTED] if trees else None)

    def _wanted_wiring(self, kind: str, given: tuple[int, ...], layers: int) -> tuple[int, ...]:
        """What the draft is fed, in its order: what --wiring says, else what it is given by a target of class ``kind``.

        Raises WiringError, NeverFed.
        """
        if self.recording.wiring is None:
            check_fed(kind, given, layers, self.release)
            return given
        names = parse_taps(self.recording.wiring, layers=layers)
        wanted = tuple(index for name in names if (index := tap_index(name)) is not None)
        if len(wanted) != len(given) or len(names) != len(wanted):
            raise WiringError(
                f"--wiring {self.recording.wiring} names {len(names)} taps, the head takes {len(given)} of the "
                "residual stream"
            )
        logger.info("replay: the draft is fed R%s, in this order, instead of R%s", list(wanted), list(given))
        return wanted

    def _boundaries(self, fed: tuple[int, ...], layers: int) -> tuple[int, ...]:
        """R indices to capture, rising: the taps, what is fed, and R[0] always, which shows whether it is a lookup."""
        text = self.recording.taps
        taps = default_taps(layers) if text is None else parse_taps(text, layers=layers)
        indices = {index for tap in taps if (index := tap_index(tap)) is not None}
        return tuple(sorted({0} | indices | set(fed)))

    def _begin(self, runner: Any, columns: Columns, given: tuple[int, ...]) -> None:
        """Say what is recorded; where that is on disk, record, in the process that writes for its group."""
        own_ranks, arguments = ranks(), resolved_arguments()
        writer = own_ranks["attn_tp"] == 0
        dtype = str(runner.model_config.dtype).removeprefix("torch.")
        taps = sort_taps([FINAL, *columns.taps])
        written = self.reporter.tell(
            state="recording",
            writer=writer,
            ranks=own_ranks,
            world=world(),
            wiring=tuple(columns.taps[place] for place in columns.fed),
            server_wiring=tuple(map(tap_name, given)),
            taps=taps,
            url=server_url(arguments),
            dtype=dtype,
            target=target_info(
                runner.model_config.hf_text_config,
                type(runner.model).__name__,
                runner.model_config.model_path,
                columns.width,
                columns.vocabulary,
                dtype,
            ),
            details=server_details(arguments, self.recording.arguments, versions(runner)),
        )
        if not written:
            return
        if writer:
            recorder = RowRecorder(self.reporter.folder, os.getpid(), self.failed)
            self.live = LiveRecording(columns, self.recording.topk, recorder)
        logger.info("replay: recording %s to %s", ", ".join(taps), self.reporter.folder)


def _whole(final: Any) -> Any:
    """A tensor of its own, as without us."""
    return None if final is None else final.contiguous()
