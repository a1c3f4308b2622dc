"""The SGLang general plugin (entry point group ``sglang.srt.plugins``): records a running server without source edits.

The only module that imports sglang, inside its functions. Idle unless ``replay serve`` asked for it by the environment.
In every scheduler process it hooks these places of SGLang 0.5.23 (SEAMS):

- after ``ModelRunner.init_attention_backends``, before graphs are captured: the target captures the wanted taps beside
  those the draft is fed, and keeps its final hidden states;
- before ``ModelRunner.forward`` of the draft's prefill: a few rows of what it is fed are copied, whatever was meant;
- after ``ModelRunner.forward`` of the target, before the sampler may write to the logits: rows are copied, and the
  hidden states are cut back to the columns that the draft is fed, on every rank;
- around ``EAGLEWorkerV2.verify``: which rows were accepted;
- ``Scheduler.get_internal_state``: where the rows lie, for clients that ask ``/server_info``.

What it cannot do it says in the log and in its manifest (spool.py), and the server goes on; only a ``--wiring`` that
cannot be had stops it, because serving another one would be worse than not serving.
"""

import functools
import importlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replay.capture.plugin.facts import server_details, server_url, target_info
from replay.capture.plugin.model import capture_boundaries, capturing_parts
from replay.capture.plugin.recorder import RowRecorder, summarise_rows
from replay.capture.plugin.recording import RECORD_VARIABLE, SIMULATED, VERSIONS, Recording
from replay.capture.plugin.reporter import Reporter
from replay.capture.plugin.rows import decode_rows, feed_rows, prefill_rows, verify_rows
from replay.capture.spool import RID_PREFIX
from replay.errors import CaptureError, ReplayError, WiringError
from replay.traces.header import TAP_DTYPES
from replay.traces.taps import FINAL, default_taps, parse_taps, sort_taps, tap_index, tap_name

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


# What our own code may raise on shapes or fields that it does not foresee: this ends recording, never the server.
_OURS = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, OSError)

# what is hooked or read: module, attribute, and the parameters or fields it must have
SEAMS = (
    ("sglang.srt.managers.scheduler", "Scheduler.init_model_worker", ("self",)),
    ("sglang.srt.managers.scheduler", "Scheduler.get_internal_state", ("self", "recv_req")),
    ("sglang.srt.model_executor.model_runner", "ModelRunner.init_attention_backends", ("self",)),
    ("sglang.srt.model_executor.model_runner", "ModelRunner.forward", ("self", "forward_batch")),
    ("sglang.srt.speculative.eagle_worker_v2", "EAGLEWorkerV2.verify", ("self", "batch")),
    (
        "sglang.srt.layers.logits_processor",
        "LogitsProcessorOutput",
        ("next_token_logits", "hidden_states", "last_hidden_states"),
    ),
    (
        "sglang.srt.model_executor.forward_batch_info",
        "ForwardBatch",
        (
            "forward_mode",
            "rids",
            "input_ids",
            "positions",
            "spec_info",
            "extend_seq_lens_cpu",
            "extend_prefix_lens_cpu",
        ),
    ),
    ("sglang.srt.speculative.eagle_info", "EagleDraftExtendInput", ("hidden_states",)),
)
FED_ROWS = 8  # of a request's first prefill: more would not tell more


def activate() -> None:
    """The entry point, called in every process of a server."""
    if RECORD_VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_model_worker", _install, HookType.BEFORE)


def problem_of(version: str) -> str | None:
    """Why this SGLang cannot be recorded, in half a sentence; None where it can."""
    if version not in VERSIONS:
        return f"SGLang {version} was seen, recording works with {', '.join(VERSIONS)}"
    for module, name, wanted in SEAMS:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        lacking = [one for one in wanted if found is None or one not in inspect.signature(found).parameters]
        if lacking:
            return (
                f"SGLang {version} has no {name}({', '.join(lacking)}) in {module} any more; recording works with "
                f"{', '.join(VERSIONS)}"
            )
    return None


def _install(scheduler: Any) -> None:
    """Hook this scheduler process; runs before its model is loaded."""
    import sglang

    recording = Recording.from_json(os.environ[RECORD_VARIABLE])
    plugin = _Plugin(recording, Reporter(recording, sglang.__version__))
    problem = problem_of(sglang.__version__) or _layout_problem() or _simulation_problem()
    if problem is not None:
        plugin.refuse(problem)
        return
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    plugin.reporter.tell(state="loading")
    _after(ModelRunner, "init_attention_backends", plugin.after_attention)
    _before(ModelRunner, "forward", plugin.before_forward)
    _after(ModelRunner, "forward", plugin.after_forward)
    _after(EAGLEWorkerV2, "verify", plugin.after_verify)
    _after(Scheduler, "get_internal_state", plugin.after_internal_state)


def _after(owner: type, name: str, hook: Callable[..., None]) -> None:
    """Let ``hook(result, *args)`` run after each call of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        hook(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapper)


def _before(owner: type, name: str, hook: Callable[..., None]) -> None:
    """Let ``hook(*args)`` run before each call of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


def _ranks() -> dict[str, int]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    names = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp")
    return {name: int(getattr(parallel, f"{name}_rank")) for name in names}


def _world() -> int:
    """Scheduler processes that share a model: ``/server_info`` counts those of all data-parallel replicas."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.tp_size) * int(parallel.pp_size)


def _layout_problem() -> str | None:
    """What of the server's parallel layout cannot be recorded."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    for name, flag in (("pp_size", "--pp-size"), ("attn_cp_size", "--attn-cp-size")):
        if getattr(parallel, name) != 1:
            return f"{flag} {getattr(parallel, name)} was seen, recording works with {flag} 1"
    return None


def _simulation_problem() -> str | None:
    """Whether the server makes its accept lengths up."""
    from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

    return (
        f"{SIMULATED} is {SIMULATE_ACC_LEN}, so its accept lengths are made up: unset it"
        if SIMULATE_ACC_LEN > 0
        else None
    )


def _resolved_arguments() -> dict[str, Any]:
    from sglang.srt.runtime_context import get_context

    arguments: dict[str, Any] = get_context().resolved_server_args_dict()
    return arguments


def _versions(runner: Any) -> dict[str, str]:
    import torch
    import transformers

    device = "" if runner.device == "cpu" else torch.get_device_module(runner.device).get_device_name()
    return {"torch": torch.__version__, "transformers": transformers.__version__, "accelerator": device}


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['?'])[0]}"


def _spans(batch: Any) -> Iterator[tuple[str, int, int, int]]:
    """Of each request of a prefill: its id, tokens before this piece, and where its rows begin and end."""
    end = 0
    for rid, length, prefix in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True):
        begin, end = end, end + int(length)
        yield rid, int(prefix), begin, end


def _own(numbers: "torch.Tensor") -> "torch.Tensor":
    """A copy as int32, made on the current stream: the engine writes the next step over what it gave."""
    import torch

    return numbers.to(torch.int32, copy=True)


@dataclass(slots=True)
class _Verify:
    """Between a verify's forward and its end: node rows [B*N, .] on the device, which only another forward overwrites.

    ``logits`` are the recorder's own already: the sampler may write to those of the engine.
    """

    hidden: "torch.Tensor"
    final: "torch.Tensor"
    logits: "dict[str, torch.Tensor]"


class _Plugin:
    """The hooks of one scheduler process, and what they share."""

    def __init__(self, recording: Recording, reporter: Reporter) -> None:
        self.recording, self.reporter = recording, reporter
        self.recorder: RowRecorder | None = None
        self.boundaries: tuple[int, ...] = ()  # what the target captures, in the order of its columns
        self.fed: list[int] = []  # the columns that the draft is fed, each H wide, as places in ``boundaries``
        self.width = 0
        self.vocabulary = 0
        self.pending: _Verify | None = None
        self.no_feed: threading.Thread | None = None  # tells why what the draft is fed is recorded no more

    def refuse(self, problem: str) -> None:
        """Record nothing, for this reason; a wiring that was asked for is then no longer to be had."""
        self.reporter.tell(state="refused", reason=problem)
        logger.error("replay: this server is not recorded: %s", problem)
        if self.recording.wiring is not None:
            raise WiringError(f"--wiring {self.recording.wiring} cannot be had: {problem}")

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
            self._widen(runner)
        except ReplayError as error:
            self.refuse(str(error))
        except _OURS as error:
            if self.recording.wiring is not None:
                raise
            self.failed(f"the taps could not be set: {_in_words(error)}")

    def before_forward(self, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Copy a few rows of what the draft is fed in a prefill: what comes to it, not what it should be.

        Before, because the head may write to its features (SGLang 0.5.23 models/llama_eagle3.py adds to them where
        there is no fc). Whatever goes wrong here ends no more than this: the target's rows do not need it.
        """
        if not runner.is_draft_worker or self.recorder is None or self.recorder.failure is not None or self.no_feed:
            return
        try:
            if forward_batch.rids and forward_batch.forward_mode.is_extend():
                self._record_feed(forward_batch)
        except CaptureError as error:
            self.end_feed(str(error))
        except _OURS as error:
            self.end_feed(f"the rows of a draft's prefill could not be copied: {_in_words(error)}")

    def after_forward(self, out: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Copy the rows of a target forward; give the draft the columns it had without us."""
        if runner.is_draft_worker or not self.boundaries:
            return
        logits_output, mode = out.logits_output, forward_batch.forward_mode
        full = getattr(logits_output, "hidden_states", None)
        final = getattr(logits_output, "last_hidden_states", None)
        if full is None or full.shape[-1] != len(self.boundaries) * self.width:
            return
        logits_output.hidden_states = self._columns(full) if self.fed else final
        self.pending = None
        if self.recorder is None or self.recorder.failure is not None or mode.is_idle():
            return
        with self._guarded(self.recorder):
            if any(rid.startswith(RID_PREFIX) for rid in forward_batch.rids or ()):
                self._record(forward_batch, full, final, logits_output.next_token_logits)

    def _record(self, forward_batch: Any, full: "torch.Tensor", final: Any, logits: Any) -> None:
        mode = forward_batch.forward_mode
        if final is None or logits is None or logits.shape[-1] != self.vocabulary:
            seen = "none" if logits is None else str(list(logits.shape))
            raise RuntimeError(f"a forward gave no final hidden states or no full logits (logits: {seen})")
        elif mode.is_target_verify():
            self.pending = _Verify(full, final, summarise_rows(logits, self.recording.topk))
        elif mode.is_extend():
            self._record_prefill(forward_batch, full, final, logits)
        elif mode.is_decode():
            self._record_decode(forward_batch, full, final, logits)

    def after_verify(self, result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Copy the accepted rows of a verify, in the order of their positions."""
        pending, self.pending = self.pending, None
        if pending is not None and self.recorder is not None:
            with self._guarded(self.recorder):
                if not batch.forward_mode.is_idle():
                    self._record_verify(pending, result, batch)

    def _record_verify(self, pending: _Verify, result: Any, batch: Any) -> None:
        index_bs = result.accept_index.long().clamp(min=0)  # [B, steps + 1], global node numbers
        size, depth = index_bs.shape
        nodes = result.speculative_num_draft_tokens
        flat = index_bs.reshape(-1)
        drafted = batch.spec_info.draft_token.reshape(size, nodes)
        tensors = {
            "hidden": pending.hidden[flat],
            "final": pending.final[flat],
            **{name: tensor[flat] for name, tensor in pending.logits.items()},
            "input_ids": _own(drafted.reshape(-1)[flat]),
            "drafted": _own(drafted),
            "chosen": _own(result.next_token_ids.reshape(size, nodes)[:, :depth]),
            "accept_lens": _own(result.accept_lens),
            # new length less what was accepted: batch.seq_lens may have been moved on
            "anchors": _own(result.new_seq_lens - result.accept_lens),
        }
        if batch.spec_info.topk > 1:
            for name in ("retrieve_next_token", "retrieve_next_sibling"):
                tensors[name] = _own(getattr(batch.spec_info, name).reshape(size, nodes))
        rids = [req.rid for req in batch.reqs]
        assert self.recorder is not None
        self.recorder.submit(tensors, functools.partial(verify_rows, rids, self._recorded(), self.width))

    def after_internal_state(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """Tell ``/server_info`` where the rows lie."""
        manifest = self.reporter.manifest
        result.internal_state["replay"] = {
            "folder": self.recording.folder,
            "launch": self.recording.launch,
            "host": manifest.host,
            "state": manifest.state,
            "reason": manifest.reason,
        }

    # ---- what they do ----

    def _widen(self, runner: Any) -> None:
        algorithm = runner.spec_algorithm
        if not (algorithm.is_none() or algorithm.is_eagle3()):
            raise CaptureError(f"the server drafts by {algorithm}, recording works with EAGLE3 or without a draft")
        if not algorithm.is_none() and _resolved_arguments().get("enable_multi_layer_eagle"):
            raise CaptureError("enable_multi_layer_eagle is set, recording works with EAGLE3 of one draft model")
        core, processor = capturing_parts(runner.model)
        config = runner.model_config.hf_text_config
        layers = int(config.num_hidden_layers)
        uses_aux = bool(runner.spec_aux_config.eagle_use_aux_hidden_state)
        given = tuple(sorted(core.layers_to_capture)) if uses_aux else ()
        if algorithm.is_eagle3() and not given:
            raise CaptureError("the draft uses no auxiliary hidden states, so it has no wiring to record")
        fed = self._wanted_wiring(given, layers)
        text = self.recording.taps
        taps = default_taps(layers) if text is None else parse_taps(text, layers=layers)
        indices = {index for tap in taps if (index := tap_index(tap)) is not None}
        # R[0] always: whether it is a lookup of the embedding is seen from it
        boundaries = tuple(sorted({0} | indices | set(fed)))
        self.width, self.vocabulary = int(config.hidden_size), int(runner.model_config.vocab_size)
        capture_boundaries(runner.model, core, boundaries)
        # From here on columns must be cut back, whatever else fails.
        self.boundaries, self.fed = boundaries, [boundaries.index(one) for one in fed]
        processor.keep_last_hidden_states = True
        self._announce(runner, given, fed, sort_taps([FINAL, *map(tap_name, self.boundaries)]))

    def _wanted_wiring(self, given: tuple[int, ...], layers: int) -> tuple[int, ...]:
        if self.recording.wiring is None:
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

    def _announce(self, runner: Any, given: Sequence[int], fed: Sequence[int], taps: Sequence[str]) -> None:
        ranks = _ranks()
        writer = ranks["attn_tp"] == 0
        dtype = str(runner.model_config.dtype).removeprefix("torch.")
        written = self.reporter.tell(
            state="recording",
            writer=writer,
            ranks=ranks,
            world=_world(),
            wiring=tuple(map(tap_name, fed)),
            server_wiring=tuple(map(tap_name, given)),
            taps=tuple(taps),
            url=server_url(_resolved_arguments()),
            dtype=dtype,
            target=target_info(
                runner.model_config.hf_text_config,
                type(runner.model).__name__,
                runner.model_config.model_path,
                self.width,
                self.vocabulary,
                dtype,
            ),
            details=server_details(_resolved_arguments(), self.recording.arguments, _versions(runner)),
        )
        if writer and written:
            self.recorder = RowRecorder(self.reporter.folder, os.getpid(), self.failed)
        if written:
            logger.info("replay: recording %s to %s", ", ".join(taps), self.reporter.folder)

    @contextmanager
    def _guarded(self, recorder: RowRecorder) -> Iterator[None]:
        """Rows that cannot be copied (no memory, an unforeseen shape) end the recording, not the server."""
        try:
            yield
        except _OURS as error:
            recorder.fail(f"a forward's rows could not be copied: {_in_words(error)}")

    def _columns(self, full: "torch.Tensor") -> "torch.Tensor":
        """What the draft is fed, of all that was captured [R, K*H]: a tensor of its own, as without us."""
        if self.fed == list(range(len(self.boundaries))):
            return full
        import torch

        # Slices, not a list of indices: that would be copied to the device, and the forward would wait for it.
        return torch.cat([full[:, place * self.width : (place + 1) * self.width] for place in self.fed], dim=-1)

    def _recorded(self) -> list[str]:
        return [tap_name(boundary) for boundary in self.boundaries]

    def _record_prefill(self, batch: Any, full: "torch.Tensor", final: "torch.Tensor", logits: "torch.Tensor") -> None:
        import torch

        spans = [(i, *span) for i, span in enumerate(_spans(batch)) if span[0].startswith(RID_PREFIX)]
        places = [slice(begin, end) for *_, begin, end in spans]
        chosen = torch.cat([logits[i : i + 1] for i, *_ in spans])
        tensors = {
            "hidden": torch.cat([full[place] for place in places]),
            "final": torch.cat([final[place] for place in places]),
            "input_ids": _own(torch.cat([batch.input_ids[place] for place in places])),
            **summarise_rows(chosen, self.recording.topk),
        }
        known = [(rid, prefix, end - begin) for _, rid, prefix, begin, end in spans]
        assert self.recorder is not None
        self.recorder.submit(tensors, functools.partial(prefill_rows, known, self._recorded(), self.width))

    def _record_feed(self, batch: Any) -> None:
        import torch

        places, known, end = [], [], 0
        for rid, prefix, begin, end in _spans(batch):
            if prefix or begin == end or not rid.startswith(RID_PREFIX):
                continue  # only of a first piece: of a prompt, or of all tokens so far where the request was put back
            step = -(-(end - begin) // FED_ROWS)  # evenly over the rows, the last one among them
            first = (end - begin - 1) % step
            places.append(slice(begin + first, end, step))
            known.append((rid, range(first, end - begin, step)))
        if not places:
            return
        features = batch.spec_info.hidden_states
        self._check_feed(batch.input_ids, batch.positions, features, end)
        tensors = {
            "feed.token": _own(torch.cat([batch.input_ids[place] for place in places])),
            "feed.position": _own(torch.cat([batch.positions[place] for place in places])),
            "feed.features": torch.cat([features[place] for place in places]),
        }
        assert self.recorder is not None
        self.recorder.submit(tensors, functools.partial(feed_rows, known))

    def _check_feed(self, tokens: "torch.Tensor", positions: "torch.Tensor", features: Any, rows: int) -> None:
        """Raises CaptureError where a draft's prefill lacks some of its ``rows``, or its features can be no slots.

        Short slices would make a file of rows that disagrees with itself, and the client refuses such a file whole.
        """
        for name, given in (("token ids", tokens), ("positions", positions), ("rows of features", features)):
            if given is None or len(given) < rows:
                raise CaptureError(f"a draft's prefill of {rows} rows had {0 if given is None else len(given)} {name}")
        dtype = str(features.dtype).removeprefix("torch.")
        if features.dim() != 2 or features.shape[1] % self.width or not features.shape[1] or dtype not in TAP_DTYPES:
            raise CaptureError(
                f"the draft was fed features {dtype} {list(features.shape)}, slots are of {self.width} features in "
                f"{', '.join(TAP_DTYPES)}"
            )

    def _record_decode(self, batch: Any, full: "torch.Tensor", final: "torch.Tensor", logits: "torch.Tensor") -> None:
        size = len(batch.rids)
        tensors = {
            "hidden": full[:size].clone(),
            "final": final[:size].clone(),
            "input_ids": _own(batch.input_ids[:size]),
            "starts": _own(batch.positions[:size]),
            **summarise_rows(logits[:size], self.recording.topk),
        }
        assert self.recorder is not None
        self.recorder.submit(tensors, functools.partial(decode_rows, list(batch.rids), self._recorded(), self.width))
